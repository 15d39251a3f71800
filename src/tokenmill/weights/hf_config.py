"""The config.json of Hugging Face transformers, old and new forms, as a ModelSpec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from tokenmill.errors import ModelUnreadable
from tokenmill.spec import Activation, ExpertsSpec, ModelSpec, RopeKind, RopeSpec
from tokenmill.weights.fields import Fields


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family, and what its config.json files leave to the architecture: values where they are absent.

    `has_windows` tells that sliding_window counts. Which layers have one is told by layer_types; or those without rope
    have; or all but each sliding_window_pattern-th, or those from max_window_layers on.
    """

    family: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    has_windows: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    is_gemma: bool = False

    @property
    def features(self) -> list[str]:
        """What its models may have, in words."""
        has = {
            "windows": self.has_windows,
            "experts": self.family in EXPERT_FAMILIES,
            "norms of q and k": self.qk_norm,
            "layers without rope": "no_rope_layer_interval" in self.defaults,
            "soft caps": "attn_logit_softcapping" in self.defaults,
        }
        return [name for name, is_so in has.items() if is_so]


GEMMA = {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}
GEMMA |= {"sliding_window": 4096, "head_dim": 256}
GEMMA2 = GEMMA | {"sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA3 = GEMMA | {"sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "vocab_size": 262_208}
GEMMA3 |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072}
OLMO3 = {"sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 5e5, "rope_local_base_freq": 5e5}
QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
SMOLLM3 = {"use_sliding_window": False, "no_rope_layer_interval": 4, "rope_theta": 2e6, "tie_word_embeddings": True}
ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture("llama"),
    "SmolLMForCausalLM": Architecture("llama"),
    "MistralForCausalLM": Architecture("mistral", {"sliding_window": 4096}, has_windows=True),
    "Qwen2ForCausalLM": Architecture("qwen2", QWEN, has_windows=True, qkv_bias=True),
    "Qwen3ForCausalLM": Architecture("qwen3", QWEN, has_windows=True, qk_norm=True),
    "Qwen3MoeForCausalLM": Architecture("qwen3_moe", {"use_sliding_window": False}, has_windows=True, qk_norm=True),
    "Qwen2MoeForCausalLM": Architecture("qwen2_moe", {"use_sliding_window": False}, has_windows=True, qkv_bias=True),
    "MixtralForCausalLM": Architecture("mixtral", has_windows=True),
    "Phi3ForCausalLM": Architecture("phi3", has_windows=True),
    "Olmo2ForCausalLM": Architecture("olmo2", qk_norm=True),
    "Olmo3ForCausalLM": Architecture("olmo3", OLMO3, has_windows=True, qk_norm=True),
    "SmolLM3ForCausalLM": Architecture("smollm3", SMOLLM3, has_windows=True),
    "Gemma2ForCausalLM": Architecture("gemma2", GEMMA2, has_windows=True, is_gemma=True),
    "Gemma3ForCausalLM": Architecture("gemma3", GEMMA3, has_windows=True, qk_norm=True, is_gemma=True),
}
WRITING_PARTS: Mapping[str, str] = {  # of models that also see
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
}
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
EXPERT_FAMILIES = ("qwen2_moe", "qwen3_moe", "mixtral")
ROPE_ALIASES = {"su": "longrope"}
FULL, SLIDING = "full_attention", "sliding_attention"
MOST_POSITIONS = 2**31 - 1
MOST_LAYERS = 4096


def spec_from_config(config: Mapping[str, Any], where: str) -> ModelSpec:
    """The shape of the model; `where` is the file's name for messages.

    Raises ModelUnreadable: unknown architecture, something unsupported, values missing or impossible.
    """
    if isinstance(config.get("text_config"), Mapping):
        config = {**config, **config["text_config"], "architectures": config.get("architectures")}
    architecture = _architecture(config, where)
    fields = Fields(where, {**architecture.defaults, **config})
    config = fields.values
    activation = str(config.get("hidden_activation") or config.get("hidden_act") or "silu")
    if activation not in ACTIVATIONS:
        raise ModelUnreadable(f"{where}: activation {activation!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    if fields.flag("use_bidirectional_attention"):
        raise ModelUnreadable(f"{where}: use_bidirectional_attention is not supported: attention here is causal")
    if fields.has("quantization_config"):
        given = config["quantization_config"]
        method = given.get("quant_method", "unknown") if isinstance(given, Mapping) else given
        raise ModelUnreadable(
            f"{where}: weights quantised by {method!r} are not supported: use the model's unquantised or GGUF files"
        )
    num_layers = fields.whole("num_hidden_layers", most=MOST_LAYERS)
    heads, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    head_dim = fields.whole("head_dim", max(1, hidden // heads))
    max_position = fields.whole("max_position_embeddings", 2048, most=MOST_POSITIONS)
    rope, local_rope = _ropes(fields, head_dim, max_position)
    window, window_layers = _windows(fields) if architecture.has_windows else (0, ())
    attention_bias = fields.flag("attention_bias")
    scalar = fields.optional("query_pre_attn_scalar")
    return check_spec(
        ModelSpec(
            family=architecture.family,
            vocab_size=fields.whole("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.whole("intermediate_size"),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=fields.whole("num_key_value_heads", heads),
            head_dim=head_dim,
            max_position=max_position,
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=rope,
            tie_embeddings=fields.flag("tie_word_embeddings"),
            attention_bias=attention_bias or fields.flag("qkv_bias", architecture.qkv_bias),
            attention_output_bias=attention_bias,
            qk_norm=architecture.qk_norm,
            mlp_bias=fields.flag("mlp_bias"),
            activation=ACTIVATIONS[activation],
            window=window,
            window_layers=window_layers,
            local_rope=None if local_rope == rope else local_rope,
            unrotated_layers=_unrotated(fields),
            attention_scale=None if scalar is None else max(scalar, 1e-6) ** -0.5,
            attention_cap=fields.number("attn_logit_softcapping", 0.0),
            logits_cap=fields.number("final_logit_softcapping", 0.0),
            norm_offset=float(architecture.is_gemma),
            experts=_experts(fields, architecture.family) if architecture.family in EXPERT_FAMILIES else None,
        ),
        where,
    )


def check_spec(spec: ModelSpec, where: str) -> ModelSpec:
    """`spec`, when its numbers go together. Raises ModelUnreadable: they do not."""
    if spec.num_heads % spec.num_kv_heads:
        raise ModelUnreadable(f"{where}: {spec.num_heads} heads cannot share {spec.num_kv_heads} K/V heads evenly")
    for rope in (spec.rope, spec.local_rope or spec.rope):
        rotary_dim = rope.rotary_dim or spec.head_dim
        if rotary_dim % 2 or rotary_dim > spec.head_dim:
            raise ModelUnreadable(f"{where}: {rotary_dim} rotary dimensions do not fit heads of {spec.head_dim}")
        if rope.theta <= 1 or rope.factor <= 0:
            raise ModelUnreadable(f"{where}: rope base {rope.theta} with factor {rope.factor} cannot work")
        for factors in (rope.frequency_factors, rope.long_factors):
            if factors is not None and (len(factors) != rotary_dim // 2 or min(factors) <= 0):
                raise ModelUnreadable(f"{where}: {len(factors)} rope factors for {rotary_dim // 2} pairs of dimensions")
    if spec.experts is not None and spec.activation != "silu":
        raise ModelUnreadable(f"{where}: experts with the activation {spec.activation} are not supported")
    if spec.experts is not None and spec.experts.num_chosen > spec.experts.num_experts:
        chosen, there_are = spec.experts.num_chosen, spec.experts.num_experts
        raise ModelUnreadable(f"{where}: a token cannot have {chosen} experts of {there_are}")
    return spec


def _architecture(config: Mapping[str, Any], where: str) -> Architecture:
    given = config.get("architectures")
    architecture = given[0] if isinstance(given, list) and given else given
    name = WRITING_PARTS.get(str(architecture), str(architecture))
    name = f"{name.removesuffix('Model')}ForCausalLM" if name.endswith("Model") else name
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelUnreadable(f"{where}: architecture {architecture} is not supported; known: {known}")
    return ARCHITECTURES[name]


def _experts(fields: Fields, family: str) -> ExpertsSpec:
    is_mixtral = family == "mixtral"
    key = "num_experts" if fields.has("num_experts") else "num_local_experts"
    step, dense = fields.whole("decoder_sparse_step", 1), fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ModelUnreadable(f"{fields.where}: mlp_only_layers must be a list, not {dense!r}")
    layers = range(fields.whole("num_hidden_layers"))
    return ExpertsSpec(
        num_experts=fields.whole(key),
        num_chosen=fields.whole("num_experts_per_tok"),
        size=fields.whole("intermediate_size" if is_mixtral else "moe_intermediate_size"),
        is_renormalised=is_mixtral or fields.flag("norm_topk_prob"),
        shared_size=fields.whole("shared_expert_intermediate_size", 0, least=0),
        has_shared_gate=family == "qwen2_moe",
        dense_layers=tuple(layer for layer in layers if layer in dense or (layer + 1) % step),
    )


def _windows(fields: Fields) -> tuple[int, tuple[int, ...]]:
    """The window, and the layers that have it."""
    if not fields.has("sliding_window") or not fields.flag("use_sliding_window", True):
        return 0, ()
    window, layers = fields.whole("sliding_window", most=MOST_POSITIONS), range(fields.whole("num_hidden_layers"))
    kinds = fields.values.get("layer_types")
    if kinds is None:
        pattern = fields.whole("sliding_window_pattern", 0, least=0)
        first = fields.whole("max_window_layers", 0, least=0)
        windowed = _unrotated(fields) or [
            its for its in layers if its >= first and (not pattern or (its + 1) % pattern)
        ]
        kinds = [SLIDING if layer in windowed else FULL for layer in layers]
    if not isinstance(kinds, list) or len(kinds) != len(layers) or not {SLIDING, FULL}.issuperset(map(str, kinds)):
        raise ModelUnreadable(
            f"{fields.where}: layer_types must be {FULL} or {SLIDING} for each of {len(layers)} layers"
        )
    windowed = [layer for layer in layers if kinds[layer] == SLIDING]
    return (window, tuple(windowed)) if windowed else (0, ())


def _unrotated(fields: Fields) -> tuple[int, ...]:
    """Layers without rope: those of zero in no_rope_layers, or each no_rope_layer_interval-th."""
    layers, given = range(fields.whole("num_hidden_layers")), fields.values.get("no_rope_layers")
    if given is None:
        interval = fields.whole("no_rope_layer_interval", 0, least=0)
        return tuple(layer for layer in layers if interval and (layer + 1) % interval == 0)
    if not isinstance(given, list) or len(given) < len(layers):
        raise ModelUnreadable(f"{fields.where}: no_rope_layers must have a number for each of {len(layers)} layers")
    return tuple(layer for layer in layers if not given[layer])


def _ropes(fields: Fields, head_dim: int, max_position: int) -> tuple[RopeSpec, RopeSpec | None]:
    """The rope, and that of layers with a window where the settings tell them apart."""
    values = fields.values
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if isinstance(given, Mapping) and given and set(given) <= {FULL, SLIDING}:
        return (
            _rope(fields, given.get(FULL) or {}, head_dim, max_position),
            _rope(fields, given.get(SLIDING) or {}, head_dim, max_position, fields.optional("rope_local_base_freq")),
        )
    rope, theta = _rope(fields, given, head_dim, max_position), fields.optional("rope_local_base_freq")
    return rope, None if theta is None else _rope(fields, {}, head_dim, max_position, theta)


def _rope(fields: Fields, given: Any, head_dim: int, max_position: int, theta: float | None = None) -> RopeSpec:
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise ModelUnreadable(f"{fields.where}: rope settings of an unknown form: {given!r}")
    rope = Fields(f"{fields.where}, rope settings", given)
    kind = str(given.get("rope_type") or given.get("type") or "default")
    kind = ROPE_ALIASES.get(kind, kind)
    kinds: tuple[RopeKind, ...] = get_args(RopeKind)
    if kind not in kinds:
        raise ModelUnreadable(f"{rope.where}: kind {kind!r} is not supported; known: {', '.join(kinds)}")
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0) if theta is None else theta)
    rotary_dim = None if share == 1.0 else int(head_dim * share)
    if kind == "default":
        return RopeSpec(theta=theta, rotary_dim=rotary_dim)
    key = "original_max_position_embeddings"
    original = fields.whole(key, rope.whole(key, max_position, most=MOST_POSITIONS), most=MOST_POSITIONS)
    is_llama3, is_long = kind == "llama3", kind == "longrope"
    return RopeSpec(
        kind=kind,
        theta=theta,
        rotary_dim=rotary_dim,
        factor=rope.number("factor", max_position / original if kind in ("yarn", "longrope") else None),
        original_max_position=original,
        low_freq_factor=rope.number("low_freq_factor", None if is_llama3 else 1.0),
        high_freq_factor=rope.number("high_freq_factor", None if is_llama3 else 4.0),
        beta_fast=rope.optional("beta_fast") or 32.0,
        beta_slow=rope.optional("beta_slow") or 1.0,
        attention_factor=rope.optional("attention_factor"),
        mscale=rope.optional("mscale"),
        mscale_all_dim=rope.optional("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
        frequency_factors=rope.numbers("short_factor") if is_long else None,
        long_factors=rope.numbers("long_factor") if is_long else None,
    )
