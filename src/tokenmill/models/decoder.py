"""The decoder that most open models share: attention and gated MLP, with norms and residuals around."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.attention.base import KVCache
from tokenmill.layers.attention import Attention, AttentionNames
from tokenmill.layers.batch import ForwardBatch
from tokenmill.layers.build import Build, Source, Sources
from tokenmill.layers.mlp import GatedMLP, MLPNames
from tokenmill.layers.moe import ExpertNames, MixtureOfExperts
from tokenmill.layers.norm import RMSNorm
from tokenmill.layers.rope import RotaryEmbedding
from tokenmill.layers.vocabulary import VocabularyMatrix
from tokenmill.ops.api import Hidden, Rotation
from tokenmill.parallel.shard import split_kv_heads
from tokenmill.spec import ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class DecoderNames:
    """A family: what its checkpoints call their tensors, those of a layer below `layer` and its number; and its flow.

    A norm without a name is not there. Out norms stand between attention or MLP and the residual. With
    `scales_embedding` token vectors are multiplied by the root of their length; `whole_qk_norms`: see `Attention`.
    """

    embedding: str
    layer: str
    attention: AttentionNames
    mlp: MLPNames
    final_norm: str
    output: str
    experts: ExpertNames
    attention_norm: str = ""
    attention_out_norm: str = ""
    mlp_norm: str = ""
    mlp_out_norm: str = ""
    scales_embedding: bool = False
    whole_qk_norms: bool = False


class Layer:
    """One layer of a decoder; `rope` is the number of its rotation."""

    def __init__(self, build: Build, names: DecoderNames, number: int, rope: int) -> None:
        self._names, self._rope = names, rope
        self._norms = [
            RMSNorm(build, build.spec.hidden_size) if name else None
            for name in (names.attention_norm, names.attention_out_norm, names.mlp_norm, names.mlp_out_norm)
        ]
        before, after, mlp_before, mlp_after = (None if norm is None else norm.norm for norm in self._norms)
        self._attention_norms, self._mlp_norms = (before, after), (mlp_before, mlp_after)
        self._attention = Attention(build, number, whole_norms=names.whole_qk_norms)
        experts = build.spec.experts_of(number)
        self._mlp = MixtureOfExperts(build, experts) if experts else GatedMLP(build)

    def __call__(
        self, hidden: Hidden, rotations: Sequence[Rotation], batch: ForwardBatch, kv: Sequence[KVCache]
    ) -> None:
        """Bring the hidden state from before the layer to behind it."""
        self._attention(hidden, self._attention_norms, rotations[self._rope], batch, kv)
        self._mlp(hidden, self._mlp_norms)

    def sources(self) -> Sources:
        """Where the layer's tensors go."""
        names, found = self._names, dict[str, Source]()
        norms = names.attention_norm, names.attention_out_norm, names.mlp_norm, names.mlp_out_norm
        for name, norm in zip(norms, self._norms, strict=True):
            found |= {} if norm is None else norm.sources(name)
        mlp = self._mlp.sources(names.mlp) if isinstance(self._mlp, GatedMLP) else self._mlp.sources(names.experts)
        return {**found, **self._attention.sources(names.attention), **mlp}


class Decoder:
    """A `CausalLM`. Parameters are not filled until `models.load` follows `sources`."""

    def __init__(self, build: Build, names: DecoderNames) -> None:
        spec, group = build.spec, build.group
        self._spec, self._names, self._ops = spec, names, build.ops
        self._num_kv_heads = split_kv_heads(spec.num_heads, spec.num_kv_heads, group.rank, group.size).size
        self._embedding = VocabularyMatrix(build)
        self._output = self._embedding if spec.tie_embeddings else VocabularyMatrix(build)
        # As checkpoints were trained: the factor is rounded to the type of the vectors.
        self._scale = torch.tensor(spec.hidden_size**0.5, dtype=build.dtype).item() if names.scales_embedding else 1.0
        ropes = [_rope_of(spec, layer) for layer in range(spec.num_layers)]
        kinds = list(dict.fromkeys(ropes))
        self._ropes = [RotaryEmbedding(rope, spec, build.ops, build.device) for rope in kinds]
        self._layers = [Layer(build, names, layer, kinds.index(rope)) for layer, rope in enumerate(ropes)]
        self._final_norm = RMSNorm(build, spec.hidden_size)

    @property
    def spec(self) -> ModelSpec:
        """The whole model's shape."""
        return self._spec

    @property
    def num_kv_heads(self) -> int:
        """K/V heads of this rank."""
        return self._num_kv_heads

    def forward(self, batch: ForwardBatch, kv: Sequence[KVCache]) -> Tensor:
        """See `CausalLM.forward`."""
        return self.logits(self.hidden(batch, kv))

    def hidden(self, batch: ForwardBatch, kv: Sequence[KVCache]) -> Hidden:
        """See `CausalLM.hidden`."""
        rotations = [rope.rotation(batch.positions) for rope in self._ropes]
        hidden = Hidden(self._embedding.embed(batch.input_ids))
        if self._scale != 1.0:
            hidden.value.mul_(self._scale)
        for layer in self._layers:
            layer(hidden, rotations, batch, kv)
        if batch.logits_indices is not None:
            return Hidden(self._ops.settle(hidden).index_select(0, batch.logits_indices))
        return hidden

    def final_states(self, hidden: Hidden) -> Tensor:
        """See `CausalLM.final_states`."""
        return self._ops.rms_norm(self._ops.settle(hidden), self._final_norm.norm)

    def logits(self, hidden: Hidden) -> Tensor:
        """See `CausalLM.logits`."""
        return self._output.logits(hidden, self._final_norm.norm)

    def sources(self) -> Sources:
        """Where every tensor of a checkpoint goes."""
        names = self._names
        found = {**self._embedding.sources(names.embedding), **self._final_norm.sources(names.final_norm)}
        if not self._spec.tie_embeddings:
            found |= self._output.sources(names.output)
        for number, layer in enumerate(self._layers):
            found |= {f"{names.layer}.{number}.{name}": source for name, source in layer.sources().items()}
        return found


def _rope_of(spec: ModelSpec, layer: int) -> RopeSpec | None:
    if layer in spec.unrotated_layers:
        return None
    return spec.local_rope or spec.rope if layer in spec.window_layers else spec.rope
