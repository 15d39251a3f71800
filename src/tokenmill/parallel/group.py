"""A group of ranks that compute one model together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """This process's place among `size` ranks. With one rank every operation returns its argument."""

    rank: int
    size: int
    handle: dist.ProcessGroup | None = None

    @staticmethod
    def solo() -> Group:
        """The group of a single process; needs no torch.distributed."""
        return Group(rank=0, size=1)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.handle)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """The ranks' tensors joined along `dim`, in rank order."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.handle)
        return torch.cat(parts, dim=dim)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """`source`'s tensor on every rank, in place."""
        if self.size > 1:
            dist.broadcast(tensor, src=source, group=self.handle)
        return tensor
