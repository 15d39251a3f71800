"""Ranks as threads of one process, which exchange tensors through memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from tokenmill.parallel.group import Group

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ThreadGroup(Group):
    """A Group whose ranks are threads; every rank must call the same operations in the same order."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    board: list[Tensor | None] = field(default_factory=lambda: [None])

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self._exchange(tensor)).sum(0))

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self._exchange(tensor), dim)

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self.board[self.rank] = tensor.clone()
        self.barrier.wait(60)
        found = [part for part in self.board if part is not None]
        self.barrier.wait(60)
        return found


def run_ranks(size: int, work: Callable[[Group], T]) -> list[T]:
    """`work` on `size` ranks at once; their results in rank order."""
    barrier = threading.Barrier(size)
    board: list[Tensor | None] = [None] * size

    def run(rank: int) -> T:
        try:
            return work(ThreadGroup(rank, size, barrier=barrier, board=board))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
