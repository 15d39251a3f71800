"""What a model is (ModelSpec) and what a machine is (HardwareInfo), as plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]
Activation = Literal["silu", "gelu_tanh"]
DTypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. Names follow Hugging Face's `rope_scaling`.

    `attention_factor` None means the kind's own default (yarn: 0.1 ln(factor) + 1, or from mscale).
    `frequency_factors` divide the frequencies one by one (the `rope_freqs` tensor of GGUF files); `long_factors` do so
    in their place where the served context is over the original one (longrope).
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    rotary_dim: int | None = None
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class KVKind:
    """Layers whose tokens' K and V live alike. With a `window` above 0, a token attends to so many, itself the last."""

    layers: tuple[int, ...]
    window: int = 0


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Mixture of experts in place of the gated MLP, in all layers but `dense_layers`.

    A token's experts are the `num_chosen` with the greatest router scores. Their weights are the softmax of all scores,
    or with `is_renormalised` that of the chosen ones' alone (which is also softmax, choice, division by the sum). Every
    token has a shared expert too if `shared_size` is not 0, whose output may be gated.
    """

    num_experts: int
    num_chosen: int
    size: int  # inner dimensions of an expert
    is_renormalised: bool = True
    shared_size: int = 0
    has_shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape of a decoder-only transformer; everything that `models` needs besides the weights.

    `window_layers` have a `window` if that is not 0, and `local_rope` if there is one; `unrotated_layers` have no rope.
    `attention_scale` None is 1 / sqrt(head_dim); a cap of 0 is none. `norm_offset` is what the checkpoint left out of
    the weights of norms.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float = 1e-5
    rope: RopeSpec = field(default_factory=RopeSpec)
    tie_embeddings: bool = False
    has_output: bool = True  # False: its output matrix was left out, and it makes embeddings only
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: Activation = "silu"
    window: int = 0
    window_layers: tuple[int, ...] = ()
    local_rope: RopeSpec | None = None
    unrotated_layers: tuple[int, ...] = ()
    attention_scale: float | None = None
    attention_cap: float = 0.0
    logits_cap: float = 0.0
    norm_offset: float = 0.0
    experts: ExpertsSpec | None = None

    @property
    def kv_kinds(self) -> tuple[KVKind, ...]:
        """The kinds that the model has: layers that attend to everything, then those with a window."""
        layers = range(self.num_layers)
        windowed = tuple(its for its in self.window_layers if its in layers) if self.window else ()
        full = tuple(layer for layer in layers if layer not in windowed)
        return tuple(kind for kind in (KVKind(full), KVKind(windowed, self.window)) if kind.layers)

    def within(self, context: int | None) -> ModelSpec:
        """The model where no request is longer than `context`: a window as long as that is none."""
        context = self.max_position if context is None else min(context, self.max_position)
        spec = replace(self, window=0) if self.window >= context else self
        return replace(spec, max_position=context) if self.rope.kind == "longrope" else spec

    def experts_of(self, layer: int) -> ExpertsSpec | None:
        """The experts of layer number `layer`; None: it is dense."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    @property
    def num_telling_layers(self) -> int:
        """How many of the first layers show all kinds of layers that there are."""
        kinds = [(self.experts_of(layer) is None, layer in self.window_layers) for layer in range(self.num_layers)]
        return 1 + max(kinds.index(kind) for kind in set(kinds))

    def weights_per_token(self) -> int:
        """Weights of all layers that a token is multiplied by."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        dense, layers = 3 * self.intermediate_size, range(self.num_layers)
        inner = [
            3 * (its.num_chosen * its.size + its.shared_size) if its else dense for its in map(self.experts_of, layers)
        ]
        return self.hidden_size * (attention * self.num_layers + sum(inner))

    def kv_bytes_per_token(self, element_size: int, kind: KVKind | None = None) -> int:
        """Bytes of K and V that one token takes over all layers, or those of a kind."""
        num_layers = self.num_layers if kind is None else len(kind.layers)
        return 2 * num_layers * self.num_kv_heads * self.head_dim * element_size


@dataclass(frozen=True, slots=True)
class HardwareInfo:
    """What the machine offers, measured once at start by `engine.device`.

    `memory_bytes` is what is free for weights and K/V; `fastest_dtype` was timed on this processor.
    """

    device: Literal["cpu", "cuda"]
    num_threads: int
    memory_bytes: int
    fastest_dtype: DTypeName
    name: str = ""
