"""A group of ranks that compute one model together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tokenmill.errors import RankLost

LOOK = 0.02  # seconds between two looks for another rank's word


class SharedSum(Protocol):
    """A faster way to sum some tensors."""

    def takes(self, tensor: Tensor) -> bool:
        """Whether it can sum tensors like this; the same on every rank."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `Group.all_reduce`."""


@dataclass(frozen=True, slots=True)
class Group:
    """This process's place among `size` ranks. With one rank every operation returns its argument.

    Without links the results have the right shapes only, for plans that are made without the other ranks. `data` is
    used in the order of the steps, `control` and `store` by the thread that plans. All raise RankLost when a rank does
    not take part.
    """

    rank: int
    size: int
    data: Any = None  # a process group of torch.distributed, as is `control`
    control: Any = None
    store: Any = None
    memory: SharedSum | None = None  # for small sums, where the ranks have some in common
    patience: float = 0.0  # seconds that `exchange` waits
    while_waiting: Callable[[], None] = lambda: None  # and what it calls meanwhile, to raise if that is in vain

    @staticmethod
    def solo() -> Group:
        """The group of a single process; needs no torch.distributed."""
        return Group(rank=0, size=1)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place; the same bits on every rank."""
        if self.memory is not None and self.memory.takes(tensor):
            return self.memory.all_reduce(tensor)
        if self.data is not None:
            self._run(self.data.allreduce, [tensor])
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """The ranks' tensors joined along `dim`, in rank order."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        if self.data is not None:
            self._run(self.data.allgather, [parts], [tensor.contiguous()])
        return torch.cat(parts, dim=dim)

    def all_agree(self, wish: bool) -> bool:
        """Whether every rank wishes it."""
        return wish if self.control is None else all(self._gather_control(bytes([wish])))

    def all_digests(self, digest: str) -> list[str]:
        """Every rank's digest, hexadecimal of one length, in rank order."""
        data = bytes.fromhex(digest)
        joined = self._gather_control(data).hex()
        return [joined[at : at + len(digest)] for at in range(0, len(joined), len(digest))]

    def exchange(self, topic: str, word: str) -> list[str]:
        """Every rank's word on a topic, in rank order. For the start: words are kept as long as the group."""
        if self.store is None:
            return [word] * self.size
        keys, until = [f"{topic}/{rank}" for rank in range(self.size)], time.monotonic() + self.patience
        try:
            self.store.set(keys[self.rank], word)
            for rank, key in enumerate(keys):
                while not self.store.check([key]):
                    self.while_waiting()
                    if time.monotonic() > until:
                        raise RankLost(f"rank {rank} did not come within {self.patience:g} s ({topic})")
                    time.sleep(LOOK)
            return [self.store.get(key).decode() for key in keys]
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank} lost rank 0 ({topic}): {error}") from None

    def _gather_control(self, data: bytes) -> bytes:
        parts = [torch.empty(len(data), dtype=torch.uint8) for _ in range(self.size)]
        self._run(self.control.allgather, [parts], [torch.frombuffer(bytearray(data), dtype=torch.uint8)])
        return bytes(torch.cat(parts).tolist())

    def _run(self, operation: Any, *tensors: Any) -> None:
        try:
            operation(*tensors).wait()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise RankLost(f"rank {self.rank} of {self.size} lost another: {reason}") from error
