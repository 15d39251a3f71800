"""The attention part of a decoder layer: projections, rope, paged attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tokenmill.attention.base import KVCache
from tokenmill.layers.batch import ForwardBatch
from tokenmill.layers.build import Build, Sources
from tokenmill.layers.linear import ColumnParallelLinear, RowParallelLinear
from tokenmill.parallel.shard import split_evenly, split_kv_heads


@dataclass(frozen=True, slots=True)
class AttentionNames:
    """What a checkpoint calls the projections."""

    query: str
    key: str
    value: str
    output: str


class Attention:
    """Causal attention of layer number `layer`; each rank has some heads."""

    def __init__(self, build: Build, layer: int) -> None:
        spec, group = build.spec, build.group
        heads = split_evenly(spec.num_heads, group.rank, group.size, "attention heads")
        kv_heads = split_kv_heads(spec.num_heads, spec.num_kv_heads, group.rank, group.size)
        dim = spec.head_dim
        kv_part = (spec.num_kv_heads * dim, kv_heads.scaled(dim))
        parts = ((spec.num_heads * dim, heads.scaled(dim)), kv_part, kv_part)
        self._layer, self._ops, self._backend = layer, build.ops, build.attention
        self._num_heads, self._num_kv_heads, self._head_dim = heads.size, kv_heads.size, dim
        self._qkv = ColumnParallelLinear(build, spec.hidden_size, parts, bias=spec.attention_bias)
        self._output = RowParallelLinear(
            build, spec.num_heads * dim, heads.scaled(dim), spec.hidden_size, bias=spec.attention_output_bias
        )

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor], batch: ForwardBatch, kv: KVCache) -> Tensor:
        """[tokens, hidden] to [tokens, hidden]; writes the tokens' K and V to `kv`."""
        heads, kv_heads = self._num_heads, self._num_kv_heads
        qkv = self._qkv(x).view(-1, heads + 2 * kv_heads, self._head_dim)  # [tokens, heads + 2 kv_heads, head_dim]
        turned = self._ops.rope(qkv[:, : heads + kv_heads], *angles)
        query, key, value = turned[:, :heads], turned[:, heads:], qkv[:, heads + kv_heads :]
        mixed = self._backend.run(query, key, value, kv, self._layer, batch.attention)  # [tokens, heads, head_dim]
        return self._output(mixed.reshape(-1, heads * self._head_dim))

    def sources(self, names: AttentionNames) -> Sources:
        """Where the projections' tensors go."""
        fused = self._qkv.sources((names.query, names.key, names.value))
        return {**fused, **self._output.sources(names.output)}
