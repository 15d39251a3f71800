"""The metadata of llama.cpp's GGUF files in the words of transformers' config.json, and from there a ModelSpec."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from tokenmill.errors import ModelUnreadable
from tokenmill.spec import ModelSpec
from tokenmill.weights.fields import Fields
from tokenmill.weights.hf_config import FULL, MOST_POSITIONS, SLIDING, check_spec, spec_from_config

GEMMA_NORMS = {"ffn_norm": "pre_feedforward_layernorm"}
QWEN_MOE = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How llama.cpp writes the models of one of transformers' classes.

    `config` is what files leave out, `names` are those of tensors where they are not the usual ones. With `is_paired`
    rows of q and k lie as llama.cpp's rope turns them, neighbours together.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    is_paired: bool = False


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture("LlamaForCausalLM", is_paired=True),
        "llama with window": Architecture("MistralForCausalLM", is_paired=True),
        "llama with experts": Architecture("MixtralForCausalLM", names=MIXTRAL_EXPERTS, is_paired=True),
        "qwen2": Architecture("Qwen2ForCausalLM"),
        "qwen3": Architecture("Qwen3ForCausalLM"),
        "qwen2moe": Architecture("Qwen2MoeForCausalLM"),
        "qwen3moe": Architecture("Qwen3MoeForCausalLM", QWEN_MOE),
        "phi3": Architecture("Phi3ForCausalLM", names={"ffn_up": "mlp.gate_up_proj"}),
        "olmo2": Architecture("Olmo2ForCausalLM"),
        "olmo2 with window": Architecture("Olmo3ForCausalLM"),
        "smollm3": Architecture("SmolLM3ForCausalLM", is_paired=True),
        "gemma2": Architecture("Gemma2ForCausalLM", names=GEMMA_NORMS),
        "gemma3": Architecture("Gemma3ForCausalLM", names=GEMMA_NORMS),
    }
)
FLOATS: Mapping[str, str] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
QUANTISED = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "TQ1_0", "TQ2_0"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
)
SCALED_BY_WIDTH = {"gemma2.": 46, "gemma3.": 62}  # layers of the 27B models; llama.cpp knows them by that
NEEDED = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
OPTIONAL = {
    "num_key_value_heads": "attention.head_count_kv",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "rope_local_base_freq": "rope.freq_base_swa",
}
UNSUPPORTED = ("expert_shared_count", "expert_group_count", "leading_dense_block_count", "logit_scale")
Factors = Mapping[str, tuple[float, ...]]


def find_architecture(metadata: Mapping[str, Any], where: str) -> Architecture:
    """How a file with these key-value pairs is written. Raises ModelUnreadable: its architecture is not known."""
    name = str(metadata.get("general.architecture"))
    if name not in ARCHITECTURES or " " in name:
        known = ", ".join(name for name in ARCHITECTURES if " " not in name)
        raise ModelUnreadable(f"{where}: architecture {name!r} is not supported; known: {known}")
    for addition, key in (("experts", "expert_count"), ("window", "attention.sliding_window")):
        if metadata.get(f"{name}.{key}"):
            name = f"{name} with {addition}" if f"{name} with {addition}" in ARCHITECTURES else name
    return ARCHITECTURES[name]


def spec_from_metadata(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Factors, where: str
) -> ModelSpec:
    """The shape of the model.

    Args:
        metadata: the file's key-value pairs.
        shapes: the tensors' shapes under GGUF names; they tell the vocabulary's size, biases and tied output.
        factors: the tensors rope_freqs, rope_factors_long, rope_factors_short, where there are any.
        where: the file's name for messages.

    Raises:
        ModelUnreadable: unknown architecture, something unsupported, values missing or impossible.
    """
    architecture = find_architecture(metadata, where)
    prefix = f"{metadata['general.architecture']}."
    fields = Fields(where, {key.removeprefix(prefix): value for key, value in metadata.items()})
    config = _config(architecture, fields, shapes)
    config |= {"architectures": [architecture.name], "tie_word_embeddings": "output.weight" not in shapes}
    if (layers := SCALED_BY_WIDTH.get(prefix)) is not None:
        is_by_width = config["num_hidden_layers"] == layers
        width = config["hidden_size"] / config["num_attention_heads"]
        config["query_pre_attn_scalar"] = width if is_by_width else config["head_dim"]
    spec = spec_from_config(config | _rope(fields, config, factors), where)
    spec = replace(
        spec,
        attention_bias="blk.0.attn_q.bias" in shapes or "blk.0.attn_qkv.bias" in shapes,
        attention_output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_down.bias" in shapes,
        norm_offset=0.0,  # the converter added it
    )
    if "rope_freqs" in factors:
        spec = replace(spec, rope=replace(spec.rope, frequency_factors=factors["rope_freqs"]))
    return check_spec(spec, where)


def _config(architecture: Architecture, fields: Fields, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    where = fields.where
    if "token_embd.weight" not in shapes or len(shapes["token_embd.weight"]) != 2:
        raise ModelUnreadable(f"{where} lacks the tensor token_embd.weight. Fetch or convert it again.")
    vocab_size = shapes["token_embd.weight"][0]
    if fields.whole("vocab_size", vocab_size) != vocab_size:
        raise ModelUnreadable(f"{where}: its vocab_size contradicts its {vocab_size} token vectors")
    for key in UNSUPPORTED:
        if fields.values.get(key):
            raise ModelUnreadable(f"{where}: {key} {fields.values[key]!r} is not supported")
    config = dict(architecture.config)
    config |= {name: fields.number(key) for name, key in OPTIONAL.items() if fields.values.get(key)}
    config |= {name: fields.number(key) for name, key in NEEDED.items()}
    if isinstance(pattern := fields.values.get("attention.sliding_window_pattern"), list):
        config["layer_types"] = [SLIDING if has_window else FULL for has_window in pattern]
    elif pattern:
        config["sliding_window_pattern"] = fields.number("attention.sliding_window_pattern")
    heads, hidden = fields.whole("attention.head_count"), fields.whole("embedding_length")
    head_dim = fields.whole("attention.key_length", max(1, hidden // heads))
    if fields.whole("attention.value_length", head_dim) != head_dim:
        raise ModelUnreadable(f"{where}: keys and values of different sizes are not supported")
    return config | {"vocab_size": vocab_size, "head_dim": head_dim}


def _rope(fields: Fields, config: Mapping[str, Any], factors: Factors) -> dict[str, Any]:
    theta, head_dim = fields.number("rope.freq_base", 10000.0), config["head_dim"]
    found: dict[str, Any] = {"rope_theta": theta}
    rotary_dim = fields.whole("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        found["partial_rotary_factor"] = math.nextafter(rotary_dim / head_dim, 1)  # as it is rounded down
    key, context = "rope.scaling.original_context_length", config["max_position_embeddings"]
    original = {"original_max_position_embeddings": fields.whole(key, int(context), most=MOST_POSITIONS)}
    kind = fields.values.get("rope.scaling.type", "linear")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    attention = fields.number("rope.scaling.yarn_attn_factor", fields.number("rope.scaling.attn_factor", 1.0))
    if "rope_factors_long" in factors and "rope_factors_short" in factors:
        ends = {f"{end}_factor": list(factors[f"rope_factors_{end}"]) for end in ("long", "short")}
        return found | original | {"rope_scaling": {"type": "longrope", "attention_factor": attention, **ends}}
    if kind not in ("none", "linear", "yarn"):
        raise ModelUnreadable(f"{fields.where}: rope scaling {kind!r} is not supported; known: none, linear, yarn")
    if kind == "none" or factor in (0.0, 1.0):
        return found
    if kind == "linear":
        return found | {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    yarn = {
        "rope_type": "yarn",
        "factor": factor,
        # llama.cpp multiplies the paper's attention factor by the file's, where transformers replaces it.
        "attention_factor": attention * (0.1 * math.log(max(factor, 1.0)) + 1.0),
        "beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    return found | {"rope_scaling": yarn | original}
