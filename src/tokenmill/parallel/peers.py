"""Small sums over the GPUs of a host by kernels of our own, in memory that the GPUs map from one another."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tokenmill.parallel.group import Group
from tokenmill.parallel.triton_reduce import all_reduce, memory_bytes

ONE_SHOT_BYTES = 1 << 19  # that a rank sends in all; above, two shots send less
MOST_BYTES = 1 << 21  # of a tensor; above, NCCL's rings use the links better
MOST_ROWS = 512

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Memory of all ranks, for sums of [rows, dim] of one type. `keeper` holds the mapping."""

    rank: int
    size: int
    dim: int
    dtype: torch.dtype
    peers: Tensor  # [size] int64 addresses
    counters: Tensor  # [most rows] int32
    keeper: Any = None

    def takes(self, tensor: Tensor) -> bool:
        """Whether a sum of this shape is for this memory; the same on every rank."""
        has_room = 0 < tensor.numel() <= self.counters.shape[0] * self.dim
        return has_room and tensor.dtype == self.dtype and tensor.shape[-1] == self.dim and tensor.is_contiguous()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        sent = tensor.nbytes * (self.size - 1)
        rows = tensor.view(-1, self.dim)
        all_reduce(rows, self.peers, self.counters, self.rank, is_two_shot=self.size > 2 and sent > ONE_SHOT_BYTES)
        return tensor


def with_peer_memory(group: Group, dim: int, dtype: torch.dtype, device: torch.device) -> Group:
    """The group, with memory for sums of [rows, dim] if all ranks' GPUs can map one another's; else as it is."""
    rows = min(MOST_ROWS, MOST_BYTES // (dim * dtype.itemsize))
    memory, reason = None, ""
    try:
        memory = _map_memory(group, dim, dtype, device, rows)
    except (RuntimeError, AttributeError, ImportError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
    reasons = group.exchange("peer memory", reason)
    if any(reasons):
        told = "; ".join(f"rank {rank}: {its}" for rank, its in enumerate(reasons) if its)
        log.warning("small sums are NCCL's, which is slower: GPUs cannot map one another's memory (%s)", told)
        return group
    return replace(group, memory=memory)


def _map_memory(group: Group, dim: int, dtype: torch.dtype, device: torch.device, rows: int) -> PeerMemory:
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # torch has no other way to say so; nothing here needs it
    from torch._C import _distributed_c10d as c10d

    kind: Any = c10d._SymmetricMemory
    kind.set_group_info("tokenmill", group.rank, group.size, group.store)
    size = memory_bytes(group.size, rows, dim, dtype.itemsize)
    buffer = kind.empty_strided_p2p((size,), (1,), torch.uint8, device, "tokenmill").zero_()
    torch.cuda.synchronize()
    handle = kind.rendezvous(buffer, "tokenmill")
    peers = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    counters = torch.zeros(rows, dtype=torch.int32, device=device)
    return PeerMemory(group.rank, group.size, dim, dtype, peers, counters, (buffer, handle))
