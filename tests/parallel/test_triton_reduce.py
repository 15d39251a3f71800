"""Sums through shared memory, by processes that run the kernel at the same time in Triton's interpreter."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import connection
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")


def inputs(rank: int, dtype: torch.dtype, is_two_shot: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank + 10 * is_two_shot)
    return [torch.randn(rows, 64, generator=generator).to(dtype) for rows in (1, 5, 3, 5, 2)]


def sum_up(rank: int, size: int, folder: Path, dtype: torch.dtype, pipe: connection.Connection) -> None:
    """One rank's sums, one way and the other in turns; the memory of all ranks is files that all map."""
    os.environ["TRITON_INTERPRET"] = "1"
    from tokenmill.parallel.triton_reduce import all_reduce, memory_bytes

    length = memory_bytes(size, 6, 64, dtype.itemsize)
    maps = [torch.from_file(str(folder / str(peer)), True, length, dtype=torch.uint8) for peer in range(size)]
    peers = torch.tensor([its.data_ptr() for its in maps])
    counters = torch.zeros(6, dtype=torch.int32)
    found = []
    for one, two in zip(inputs(rank, dtype, False), inputs(rank, dtype, True), strict=True):
        all_reduce(one, peers, counters, rank, is_two_shot=False)
        all_reduce(two, peers, counters, rank, is_two_shot=True)
        found += [one.float().tolist(), two.float().tolist()]
    pipe.send(found)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), (3, torch.bfloat16)])
def test_every_rank_gets_the_same_sum(tmp_path: Path, size: int, dtype: torch.dtype) -> None:
    from tokenmill.parallel.triton_reduce import memory_bytes

    for rank in range(size):
        (tmp_path / str(rank)).write_bytes(bytes(memory_bytes(size, 6, 64, dtype.itemsize)))
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=sum_up, args=(rank, size, tmp_path, dtype, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    found = [pipe.recv() for pipe in pipes]
    for process, pipe in zip(processes, pipes, strict=True):
        process.join()
        pipe.close()
    assert all(its == found[0] for its in found)
    for at, is_two_shot in enumerate((False, True)):
        parts = [inputs(rank, dtype, is_two_shot) for rank in range(size)]
        for sums, tensors in zip(found[0][at::2], zip(*parts, strict=True), strict=True):
            expected = torch.stack([its.float() for its in tensors]).sum(0).to(dtype)
            torch.testing.assert_close(torch.tensor(sums).to(dtype), expected)
