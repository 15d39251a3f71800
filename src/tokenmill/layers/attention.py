"""The attention part of a decoder layer: projections, rope, paged attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

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
    """Causal attention of layer number `layer`; each rank has some heads.

    With `whole_norms`, q and k are normalised over all heads together, not by head.
    """

    def __init__(self, build: Build, layer: int, *, whole_norms: bool = False) -> None:
        spec, group = build.spec, build.group
        self._kind = next(kind for kind, its in enumerate(spec.kv_kinds) if layer in its.layers)
        self._layer = spec.kv_kinds[self._kind].layers.index(layer)  # among those of its kind
        heads = split_evenly(spec.num_heads, group.rank, group.size, "attention heads")
        kv_heads = split_kv_heads(spec.num_heads, spec.num_kv_heads, group.rank, group.size)
        dim = spec.head_dim
        kv_part = (spec.num_kv_heads * dim, kv_heads.scaled(dim))
        parts = ((spec.num_heads * dim, heads.scaled(dim)), kv_part, kv_part)
        self._ops, self._group, self._backend = build.ops, group, build.attention[self._kind]
        self._fused = self._backend if isinstance(self._backend, FusedAttention) else None
        self._num_heads, self._num_kv_heads, self._head_dim = heads.size, kv_heads.size, dim
        self._norms: HeadNorms | None = None
        self._whole_norms: tuple[Norm, ...] = ()
        self._norm_sources: tuple[Source, ...] = ()
        if spec.qk_norm:
            spans = (parts[0], kv_part) if whole_norms else ((dim, Span(0, dim)),) * 2
            weights = [build.parameter(span.size) for _, span in spans]
            self._norm_sources = tuple(
                Source(weight, (size,), span, offset=spec.norm_offset)
                for weight, (size, span) in zip(weights, spans, strict=True)
            )
            if whole_norms:
                self._whole_norms = tuple(Norm(weight, spec.norm_eps) for weight in weights)
            else:
                self._norms = HeadNorms(weights[0], weights[1], spec.norm_eps)
        self._qkv = ColumnParallelLinear(build, spec.hidden_size, parts, bias=spec.attention_bias)
        self._output = RowParallelLinear(
            build, spec.num_heads * dim, heads.scaled(dim), spec.hidden_size, bias=spec.attention_output_bias
        )

    def __call__(
        self,
        hidden: Hidden,
        norms: tuple[Norm | None, Norm | None],
        rotation: Rotation,
        batch: ForwardBatch,
        caches: Sequence[KVCache],
    ) -> None:
        """Add the output for the hidden state to it; `norms` are those of input and output, where there are any.

        Writes the tokens' K and V to the cache of the layer's kind.
        """
        heads, kv_heads, layer = self._num_heads, self._num_kv_heads, self._layer
        kv, metadata = caches[self._kind], batch.attention[self._kind]
        joined = self._qkv(hidden, norms[0])
        if self._whole_norms:
            self._normalise(joined)
        qkv = joined.view(-1, heads + 2 * kv_heads, self._head_dim)
        if self._fused is not None and self._fused.prepares(metadata):
            mixed = self._fused.prepare_and_run(qkv, rotation, self._norms, kv, layer, metadata)
        else:
            keys, values = kv.keys[layer], kv.values[layer]
            query = self._ops.prepare_qkv(qkv, rotation, self._norms, keys, values, batch.kv_slots[self._kind])
            mixed = self._backend.run(query, kv, layer, metadata)  # [tokens, heads, head_dim]
        self._output(mixed.reshape(-1, heads * self._head_dim), hidden, norms[1])

    def _normalise(self, joined: Tensor) -> None:
        """Normalise all heads' q together, then all heads' k, of joined [tokens, q, k and v]."""
        sizes = [norm.weight.shape[0] for norm in self._whole_norms]
        for part, norm in zip(joined.split_with_sizes([*sizes, sizes[1]], 1), self._whole_norms, strict=False):
            if self._group.size == 1:
                part.copy_(self._ops.rms_norm(part, norm))
                continue
            wide = part.float()  # a head that several ranks have counts on each, so that the mean stays that of all
            mean = self._group.all_reduce(wide.square().mean(1, keepdim=True)) / self._group.size
            part.copy_(wide * (mean + norm.eps).rsqrt() * norm.weight)

    def sources(self, names: AttentionNames) -> Sources:
        """Where the projections' and norms' tensors go."""
        found = {**self._qkv.sources((names.query, names.key, names.value)), **self._output.sources(names.output)}
        keys = (f"{names.query_norm}.weight", f"{names.key_norm}.weight")
        return found | dict(zip(keys, self._norm_sources, strict=False))
