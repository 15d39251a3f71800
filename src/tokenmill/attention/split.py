"""One attention backend for prefill and another for decode."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tokenmill.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    FusedAttention,
    GraphAttention,
    KVCache,
    RowLayout,
)
from tokenmill.ops.api import HeadNorms, Rotation


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a step that one backend computes."""

    backend: AttentionBackend
    metadata: AttentionMetadata
    tokens: Tensor | None  # [tokens of the part] int64, into the step's tokens; None: all of them in order


class SplitAttention:
    """`attention.base.AttentionBackend` that gives rows of one token to `decode`, and longer ones to `prefill`."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self.name = f"{prefill.name},{decode.name}"
        self._prefill, self._decode = prefill, decode

    def plan(self, layout: RowLayout, page_table: Tensor, page_size: int) -> tuple[Part, ...]:
        """See `AttentionBackend.plan`."""
        singles = [length == 1 for length in layout.lengths]
        if all(singles) or not any(singles):
            backend = self._decode if singles[0] else self._prefill
            return (Part(backend, backend.plan(layout, page_table, page_size), None),)
        rows = list(zip(layout.slots, layout.starts, layout.lengths, accumulate(layout.lengths), strict=True))
        parts = []
        for backend, is_decode in ((self._prefill, False), (self._decode, True)):
            slots, starts, lengths, ends = zip(*[row for row in rows if (row[2] == 1) is is_decode], strict=True)
            flat = [token for length, end in zip(lengths, ends, strict=True) for token in range(end - length, end)]
            tokens = torch.tensor(flat, pin_memory=page_table.is_cuda).to(page_table.device, non_blocking=True)
            parts.append(Part(backend, backend.plan(RowLayout(slots, starts, lengths), page_table, page_size), tokens))
        return tuple(parts)

    def run(self, query: Tensor, kv: KVCache, layer: int, metadata: tuple[Part, ...]) -> Tensor:
        """See `AttentionBackend.run`."""
        out = query.new_empty(query.shape)  # [tokens, heads, head_dim]
        for part in metadata:
            if part.tokens is None:
                return part.backend.run(query, kv, layer, part.metadata)
            out[part.tokens] = part.backend.run(query[part.tokens], kv, layer, part.metadata)
        return out

    def prepares(self, metadata: tuple[Part, ...]) -> bool:
        """See `FusedAttention.prepares`."""
        backend = metadata[0].backend
        return len(metadata) == 1 and isinstance(backend, FusedAttention) and backend.prepares(metadata[0].metadata)

    def prepare_and_run(
        self,
        qkv: Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        kv: KVCache,
        layer: int,
        metadata: tuple[Part, ...],
    ) -> Tensor:
        """See `FusedAttention.prepare_and_run`."""
        (part,) = metadata
        assert isinstance(part.backend, FusedAttention)
        return part.backend.prepare_and_run(qkv, rotation, norms, kv, layer, part.metadata)


class GraphSplitAttention(SplitAttention):
    """A SplitAttention and `attention.base.GraphAttention`: decode steps are captured as `decode` has them."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        super().__init__(prefill, decode)
        assert isinstance(decode, GraphAttention)
        self._graph: GraphAttention = decode

    def plan_decode(self, slots: Tensor, positions: Tensor, page_table: Tensor, page_size: int) -> tuple[Part, ...]:
        """See `GraphAttention.plan_decode`."""
        return (Part(self._decode, self._graph.plan_decode(slots, positions, page_table, page_size), None),)
