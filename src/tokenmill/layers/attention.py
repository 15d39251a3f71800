"""The attention part of a decoder layer: projections, rope, paged attention."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.attention.base import FusedAttention, KVCache
from tokenmill.layers.batch import ForwardBatch
from tokenmill.layers.build import Build, Source, Sources
from tokenmill.layers.linear import ColumnParallelLinear, RowParallelLinear
from tokenmill.ops.api import HeadNorms, Hidden, Norm, Rotation
from tokenmill.parallel.shard import Span, split_evenly, split_kv_heads


@dataclass(frozen=True, slots=True)
class AttentionNames:
    """What a checkpoint calls the projections, and the norms of heads where the model has them."""

    query: str
    key: str
    value: str
    output: str
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"


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
        self._fused = build.attention if isinstance(build.attention, FusedAttention) else None
        self._num_heads, self._num_kv_heads, self._head_dim = heads.size, kv_heads.size, dim
        self._norms: HeadNorms | None = None
        if spec.qk_norm:
            self._norms = HeadNorms(build.parameter(dim), build.parameter(dim), spec.norm_eps)
        self._qkv = ColumnParallelLinear(build, spec.hidden_size, parts, bias=spec.attention_bias)
        self._output = RowParallelLinear(
            build, spec.num_heads * dim, heads.scaled(dim), spec.hidden_size, bias=spec.attention_output_bias
        )

    def __call__(self, hidden: Hidden, norm: Norm, rotation: Rotation, batch: ForwardBatch, kv: KVCache) -> None:
        """Add the output for the normalised hidden state to it; writes the tokens' K and V to `kv`."""
        heads, kv_heads, layer = self._num_heads, self._num_kv_heads, self._layer
        qkv = self._qkv(hidden, norm).view(-1, heads + 2 * kv_heads, self._head_dim)
        if self._fused is not None and self._fused.prepares(batch.attention):
            mixed = self._fused.prepare_and_run(qkv, rotation, self._norms, kv, layer, batch.attention)
        else:
            keys, values = kv.keys[layer], kv.values[layer]
            query = self._ops.prepare_qkv(qkv, rotation, self._norms, keys, values, batch.kv_slots)
            mixed = self._backend.run(query, kv, layer, batch.attention)  # [tokens, heads, head_dim]
        self._output(mixed.reshape(-1, heads * self._head_dim), hidden)

    def sources(self, names: AttentionNames) -> Sources:
        """Where the projections' and norms' tensors go."""
        found = {**self._qkv.sources((names.query, names.key, names.value)), **self._output.sources(names.output)}
        if self._norms is not None:
            dim = Span(0, self._head_dim)
            found[f"{names.query_norm}.weight"] = Source(self._norms.query, (self._head_dim,), dim)
            found[f"{names.key_norm}.weight"] = Source(self._norms.key, (self._head_dim,), dim)
        return found
