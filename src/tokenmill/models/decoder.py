"""The decoder that most open models share: norm, attention, norm, gated MLP, with residuals around."""

from __future__ import annotations

from dataclasses import dataclass

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
from tokenmill.ops.api import Hidden
from tokenmill.parallel.shard import split_kv_heads
from tokenmill.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DecoderNames:
    """What a family's checkpoints call their tensors; those of a layer stand below `layer` and its number."""

    embedding: str
    layer: str
    attention_norm: str
    attention: AttentionNames
    mlp_norm: str
    mlp: MLPNames
    final_norm: str
    output: str
    experts: ExpertNames


class Decoder:
    """A `CausalLM`. Parameters are not filled until `models.load` follows `sources`."""

    def __init__(self, build: Build, names: DecoderNames) -> None:
        spec, group = build.spec, build.group
        self._spec, self._names, self._ops = spec, names, build.ops
        self._num_kv_heads = split_kv_heads(spec.num_heads, spec.num_kv_heads, group.rank, group.size).size
        self._embedding = VocabularyMatrix(build)
        self._output = self._embedding if spec.tie_embeddings else VocabularyMatrix(build)
        self._rope = RotaryEmbedding(spec, build.ops, build.device)
        self._attentions = [Attention(build, layer) for layer in range(spec.num_layers)]
        each = map(spec.experts_of, range(spec.num_layers))
        self._mlps = [MixtureOfExperts(build, experts) if experts else GatedMLP(build) for experts in each]
        self._attention_norms = [RMSNorm(build, spec.hidden_size) for _ in range(spec.num_layers)]
        self._mlp_norms = [RMSNorm(build, spec.hidden_size) for _ in range(spec.num_layers)]
        self._final_norm = RMSNorm(build, spec.hidden_size)

    @property
    def spec(self) -> ModelSpec:
        """The whole model's shape."""
        return self._spec

    @property
    def num_kv_heads(self) -> int:
        """K/V heads of this rank."""
        return self._num_kv_heads

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """See `CausalLM.forward`."""
        return self.logits(self.hidden(batch, kv))

    def hidden(self, batch: ForwardBatch, kv: KVCache) -> Hidden:
        """See `CausalLM.hidden`."""
        rotation = self._rope.rotation(batch.positions)
        hidden = Hidden(self._embedding.embed(batch.input_ids))
        for attention_norm, attention, mlp_norm, mlp in zip(
            self._attention_norms, self._attentions, self._mlp_norms, self._mlps, strict=True
        ):
            attention(hidden, attention_norm.norm, rotation, batch, kv)
            mlp(hidden, mlp_norm.norm)
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
        for layer in range(self._spec.num_layers):
            mlp = self._mlps[layer]
            own: dict[str, Source] = {
                **self._attention_norms[layer].sources(names.attention_norm),
                **self._attentions[layer].sources(names.attention),
                **self._mlp_norms[layer].sources(names.mlp_norm),
                **(mlp.sources(names.mlp) if isinstance(mlp, GatedMLP) else mlp.sources(names.experts)),
            }
            found |= {f"{names.layer}.{layer}.{name}": source for name, source in own.items()}
        return found
