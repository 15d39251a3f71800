"""Sums over ranks through memory that all can write: for small tensors faster than NCCL, which waits more often.

A program sums one row. It writes its row into a place of its own at the others, raises a flag there, and waits for
theirs. In one shot everybody sends to everybody; in two, rank `row % size` sums, and sends the result to all. Either
way every rank gets the same bits. Flags hold the number of the row's sum, kept in device memory, so that a CUDA graph
counts on. There are two places for data, in turns: who begins a sum knows that all have begun the one before, and so
are done with the one before that.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _raise_flag(flag, number):
    tl.atomic_xchg(flag, number, sem="release", scope="sys")


@triton.jit
def _wait_for_flag(flag, number):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - number < 0:  # numbers may wrap
        pass


@triton.jit
def _sum_places(place, columns, is_column, DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(SIZE):  # past the first cache, which does not see what other GPUs write
        part = tl.load(place + rank * DIM + columns, mask=is_column, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float32)
    return total


@triton.jit(do_not_specialize=["rank"])
def _all_reduce_kernel(
    x, peers, counters, rank,
    DIM: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, DATA: tl.constexpr,
    IS_TWO_SHOT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    is_column = columns < DIM
    kind: tl.constexpr = x.dtype.element_ty
    number = tl.load(counters + row) + 1
    value = tl.load(x + row.to(tl.int64) * DIM + columns, mask=is_column, other=0.0)  # [BLOCK]
    place = (((number & 1) * ROWS + row) * (SIZE + 1)).to(tl.int64) * DIM  # SIZE rows, and one for a result
    arrivals, results = row * SIZE, (ROWS + row) * SIZE  # flags
    own = tl.load(peers + rank)
    own_place = (own + DATA).to(tl.pointer_type(kind)) + place
    owner = row % SIZE
    for step in tl.static_range(SIZE):
        peer = (rank + step) % SIZE
        base = tl.load(peers + peer)
        is_sent = peer == owner if IS_TWO_SHOT else peer == peer
        if is_sent:
            there = (base + DATA).to(tl.pointer_type(kind)) + place + rank * DIM
            tl.store(there + columns, value, mask=is_column)
            tl.debug_barrier()
            _raise_flag(base.to(tl.pointer_type(tl.int32)) + arrivals + rank, number)
    flags = own.to(tl.pointer_type(tl.int32))
    sums = rank == owner if IS_TWO_SHOT else rank == rank
    if sums:
        for source in tl.static_range(SIZE):
            _wait_for_flag(flags + arrivals + source, number)
        tl.debug_barrier()
        value = _sum_places(own_place, columns, is_column, DIM, SIZE, BLOCK).to(kind)
    if IS_TWO_SHOT:
        if rank == owner:
            for turn in tl.static_range(SIZE):
                target = tl.load(peers + (rank + turn) % SIZE)
                result = (target + DATA).to(tl.pointer_type(kind)) + place + SIZE * DIM
                tl.store(result + columns, value, mask=is_column)
                tl.debug_barrier()
                _raise_flag(target.to(tl.pointer_type(tl.int32)) + results, number)
        _wait_for_flag(flags + results, number)
        tl.debug_barrier()
        value = tl.load(own_place + SIZE * DIM + columns, mask=is_column, other=0.0, cache_modifier=".cg")
    tl.store(x + row.to(tl.int64) * DIM + columns, value, mask=is_column)
    tl.store(counters + row, number)


def flag_bytes(size: int, rows: int) -> int:
    """Where data begins in a rank's memory: behind the flags of `rows` rows, which begin as zeros."""
    return -(-2 * rows * size * 4 // 256) * 256


def memory_bytes(size: int, rows: int, dim: int, element_size: int) -> int:
    """How much memory each of `size` ranks gives, for sums of up to `rows` rows of `dim` elements."""
    return flag_bytes(size, rows) + 2 * rows * (size + 1) * dim * element_size


def all_reduce(x: Tensor, peers: Tensor, counters: Tensor, rank: int, *, is_two_shot: bool) -> None:
    """Sum x over ranks, in place; all ranks call it with tensors of one shape, in one order.

    Args:
        x: [rows, dim], contiguous.
        peers: [size] int64, the addresses of all ranks' memory (see `memory_bytes`), as this rank sees them.
        counters: [most rows] int32, zeros at first.
        rank: this one's.
        is_two_shot: send less, but wait twice.
    """
    rows, dim = x.shape
    size, most = peers.shape[0], counters.shape[0]
    block = triton.next_power_of_2(dim)
    _all_reduce_kernel[(rows,)](
        x, peers, counters, rank, DIM=dim, BLOCK=block, SIZE=size, ROWS=most, DATA=flag_bytes(size, most),
        IS_TWO_SHOT=is_two_shot, num_warps=min(max(block // 256, 1), 16),
    )  # fmt: skip
