"""Paged attention by the C kernels of `ops.cpu`: nothing is gathered."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tokenmill.attention.base import KVCache, RowLayout
from tokenmill.ops.cpu.kernels import AttentionPlan, CpuKernels


@dataclass(frozen=True, slots=True)
class CpuMetadata:
    """What the kernels read; the struct points into the others."""

    struct: AttentionPlan
    columns: array[int]
    page_table: Tensor

    def over(self, kv: KVCache) -> AttentionPlan:
        """The struct for this cache."""
        self.struct.is_bfloat = kv.keys.dtype == torch.bfloat16
        return self.struct


class CpuAttention:
    """`attention.base.AttentionBackend` for layers without window or cap, over K/V in float32 or bfloat16.

    Heads have a multiple of 16 dimensions, at most 256; at most 16 share K and V. `scale` multiplies the scores.
    """

    name = "cpu"

    def __init__(self, kernels: CpuKernels, *, scale: float, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self._kernels, self._scale = kernels, scale
        self._shape = num_heads, num_kv_heads, head_dim

    def plan(self, layout: RowLayout, page_table: Tensor, page_size: int) -> CpuMetadata:
        """See `AttentionBackend.plan`; the page table is only pointed at, if it is of int64."""
        count, table = len(layout.slots), page_table.to(torch.int64).contiguous()
        columns = array("i", (*layout.slots, *layout.starts, 0, *accumulate(layout.lengths)))
        slots, _ = columns.buffer_info()
        places = slots, slots + 4 * count, slots + 8 * count
        struct = AttentionPlan(
            *self._shape, page_size, count, 0, table.shape[1], 0, self._scale, 0, table.data_ptr(), *places
        )
        return CpuMetadata(struct, columns, table)

    def run(self, query: Tensor, kv: KVCache, layer: int, metadata: CpuMetadata) -> Tensor:
        """See `AttentionBackend.run`."""
        mixed = self._kernels.attention(metadata.over(kv), query.float(), kv.keys[layer], kv.values[layer])
        return mixed.to(query.dtype)
