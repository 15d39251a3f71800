"""The config.json of Hugging Face transformers, old and new forms, as a ModelSpec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from tokenmill.errors import ModelUnreadable
from tokenmill.spec import ExpertsSpec, ModelSpec, RopeKind, RopeSpec
from tokenmill.weights.fields import Fields

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "SmolLMForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
}
EXPERT_FAMILIES = ("qwen3_moe", "mixtral")
MOST_POSITIONS = 2**31 - 1


def spec_from_config(config: Mapping[str, Any], where: str) -> ModelSpec:
    """The shape of the model; `where` is the file's name for messages.

    Raises ModelUnreadable: unknown architecture, something unsupported, values missing or impossible.
    """
    fields = Fields(where, config)
    family = _family(config, where)
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise ModelUnreadable(f"{where}: activation {activation!r} is not supported; known: silu")
    if fields.has("quantization_config"):
        given = config["quantization_config"]
        method = given.get("quant_method", "unknown") if isinstance(given, Mapping) else given
        raise ModelUnreadable(
            f"{where}: weights quantised by {method!r} are not supported: use the model's unquantised or GGUF files"
        )
    heads, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    head_dim = fields.whole("head_dim", max(1, hidden // heads))
    max_position = fields.whole("max_position_embeddings", 2048, most=MOST_POSITIONS)
    rope = _rope(fields, head_dim, max_position)
    # Within the window, attention is the same as without one.
    if fields.has("sliding_window") and fields.flag("use_sliding_window", True):
        max_position = min(max_position, fields.whole("sliding_window", most=MOST_POSITIONS))
    attention_bias = fields.flag("attention_bias")
    return check_spec(
        ModelSpec(
            family=family,
            vocab_size=fields.whole("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.whole("intermediate_size"),
            num_layers=fields.whole("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=fields.whole("num_key_value_heads", heads),
            head_dim=head_dim,
            max_position=max_position,
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=rope,
            tie_embeddings=fields.flag("tie_word_embeddings"),
            attention_bias=attention_bias,
            attention_output_bias=attention_bias,
            qk_norm=family in ("qwen3", "qwen3_moe"),
            mlp_bias=fields.flag("mlp_bias"),
            experts=_experts(fields, family) if family in EXPERT_FAMILIES else None,
        ),
        where,
    )


def check_spec(spec: ModelSpec, where: str) -> ModelSpec:
    """`spec`, when its numbers go together. Raises ModelUnreadable: they do not."""
    if spec.num_heads % spec.num_kv_heads:
        raise ModelUnreadable(f"{where}: {spec.num_heads} heads cannot share {spec.num_kv_heads} K/V heads evenly")
    rotary_dim = spec.rope.rotary_dim or spec.head_dim
    if rotary_dim % 2 or rotary_dim > spec.head_dim:
        raise ModelUnreadable(f"{where}: {rotary_dim} rotary dimensions do not fit heads of {spec.head_dim}")
    if spec.rope.theta <= 1 or spec.rope.factor <= 0:
        raise ModelUnreadable(f"{where}: rope base {spec.rope.theta} with factor {spec.rope.factor} cannot work")
    if spec.experts is not None and spec.experts.num_chosen > spec.experts.num_experts:
        chosen, there_are = spec.experts.num_chosen, spec.experts.num_experts
        raise ModelUnreadable(f"{where}: a token cannot have {chosen} experts of {there_are}")
    factors = spec.rope.frequency_factors
    if factors is not None and (len(factors) != rotary_dim // 2 or min(factors) <= 0):
        raise ModelUnreadable(f"{where}: {len(factors)} rope factors for {rotary_dim // 2} pairs of dimensions")
    return spec


def _family(config: Mapping[str, Any], where: str) -> str:
    given = config.get("architectures")
    architecture = given[0] if isinstance(given, list) and given else given
    name = str(architecture)
    family = ARCHITECTURES.get(name if not name.endswith("Model") else f"{name.removesuffix('Model')}ForCausalLM")
    if family is None:
        known = ", ".join(ARCHITECTURES)
        raise ModelUnreadable(f"{where}: architecture {architecture} is not supported; known: {known}")
    return family


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
        dense_layers=tuple(layer for layer in layers if layer in dense or (layer + 1) % step),
    )


def _rope(fields: Fields, head_dim: int, max_position: int) -> RopeSpec:
    given = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise ModelUnreadable(f"{fields.where}: rope settings of an unknown form: {given!r}")
    rope = Fields(f"{fields.where}, rope settings", given)
    kind = given.get("rope_type") or given.get("type") or "default"
    kinds: tuple[RopeKind, ...] = get_args(RopeKind)
    if kind not in kinds:
        raise ModelUnreadable(f"{rope.where}: kind {kind!r} is not supported; known: {', '.join(kinds)}")
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    rotary_dim = None if share == 1.0 else int(head_dim * share)
    if kind == "default":
        return RopeSpec(theta=theta, rotary_dim=rotary_dim)
    key = "original_max_position_embeddings"
    original = fields.whole(key, rope.whole(key, max_position, most=MOST_POSITIONS), most=MOST_POSITIONS)
    is_llama3 = kind == "llama3"
    return RopeSpec(
        kind=kind,
        theta=theta,
        rotary_dim=rotary_dim,
        factor=rope.number("factor", max_position / original if kind == "yarn" else None),
        original_max_position=original,
        low_freq_factor=rope.number("low_freq_factor", None if is_llama3 else 1.0),
        high_freq_factor=rope.number("high_freq_factor", None if is_llama3 else 4.0),
        beta_fast=rope.optional("beta_fast") or 32.0,
        beta_slow=rope.optional("beta_slow") or 1.0,
        attention_factor=rope.optional("attention_factor"),
        mscale=rope.optional("mscale"),
        mscale_all_dim=rope.optional("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )
