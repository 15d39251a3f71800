from typing import Any

import pytest

from tokenmill.errors import ModelUnreadable
from tokenmill.spec import ExpertsSpec, ModelSpec, RopeSpec
from tokenmill.weights.hf_config import spec_from_config

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}


def spec_of(**changes: Any) -> ModelSpec:
    return spec_from_config({**CONFIG, **changes}, "config.json")


def test_defaults_are_those_of_transformers() -> None:
    spec = spec_of()
    assert (spec.num_kv_heads, spec.head_dim, spec.max_position) == (4, 16, 2048)
    assert (spec.norm_eps, spec.rope, spec.tie_embeddings) == (1e-6, RopeSpec(), False)


def test_explicit_values() -> None:
    spec = spec_of(num_key_value_heads=2, head_dim=24, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    assert (spec.num_kv_heads, spec.head_dim) == (2, 24)
    assert all((spec.attention_bias, spec.attention_output_bias, spec.mlp_bias, spec.tie_embeddings))


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_rope_forms(key: str, type_key: str) -> None:
    yarn = {type_key: "yarn", "factor": 4, "beta_fast": 16, "original_max_position_embeddings": 512}
    expected = RopeSpec(kind="yarn", theta=500.0, factor=4, original_max_position=512, beta_fast=16)
    assert spec_of(rope_theta=500.0, **{key: yarn}).rope == expected
    assert spec_of(**{key: {**yarn, "rope_theta": 500.0}}).rope == expected


def test_rope_original_length_falls_back_to_the_context() -> None:
    rope = spec_of(max_position_embeddings=1024, rope_scaling={"rope_type": "yarn", "factor": 2.0}).rope
    assert rope.original_max_position == 1024


def test_partial_rotary() -> None:
    assert spec_of(partial_rotary_factor=0.5).rope.rotary_dim == 8


ALL = (0, 1)


@pytest.mark.parametrize(
    ("architecture", "changes", "window", "layers"),
    [
        ("Llama", {"sliding_window": 64}, 0, ()),
        ("Mistral", {"sliding_window": 64}, 64, ALL),
        ("Mistral", {"sliding_window": None}, 0, ()),
        ("Mistral", {"sliding_window": 2048}, 2048, ALL),
        ("Qwen2", {"sliding_window": 64}, 0, ()),
        ("Qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, 64, (1,)),
        ("Phi3", {"sliding_window": 64}, 64, ALL),
        ("SmolLM3", {"sliding_window": 64}, 0, ()),
        ("SmolLM3", {"sliding_window": 64, "use_sliding_window": True, "no_rope_layers": [1, 0]}, 64, (1,)),
        ("Gemma2", {"sliding_window": 64}, 64, (0,)),
        ("Gemma3", {"sliding_window": 64}, 64, ALL),
        ("Gemma3", {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, 64, (1,)),
    ],
)
def test_windows(architecture: str, changes: dict[str, Any], window: int, layers: tuple[int, ...]) -> None:
    spec = spec_of(architectures=[f"{architecture}ForCausalLM"], **changes)
    assert (spec.window, spec.window_layers) == (window, layers)
    assert sorted(layer for kind in spec.kv_kinds for layer in kind.layers) == [0, 1]


def test_a_window_as_long_as_the_context_is_none() -> None:
    gemma = {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6}
    spec = spec_of(**gemma, sliding_window=64)
    assert len(spec.kv_kinds) == 2
    assert spec.within(65) == spec
    short = spec.within(64)
    assert [kind.window for kind in short.kv_kinds] == [0]
    assert (short.window_layers, short.local_rope) == (spec.window_layers, spec.local_rope)
    assert spec_of(**gemma, sliding_window=512, max_position_embeddings=512).within(None).window == 0


def test_ropes_of_gemma3_in_its_old_and_new_forms() -> None:
    gemma = {"architectures": ["Gemma3ForCausalLM"]}
    spec = spec_of(**gemma, rope_theta=1e5, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert (spec.rope.kind, spec.rope.theta, spec.local_rope) == ("linear", 1e5, RopeSpec())
    kinds = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5}}
    assert spec_of(**gemma, rope_parameters=kinds) == spec
    assert spec_of(**gemma, rope_parameters={**kinds, "sliding_attention": {"rope_theta": 7.0}}).local_rope == RopeSpec(
        theta=7.0
    )


def test_smollm3_rotates_three_layers_of_four() -> None:
    smollm = {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 8}
    assert spec_of(**smollm).unrotated_layers == (3, 7)
    assert spec_of(**smollm, no_rope_layers=[0, 1, 1, 1, 0, 1, 1, 1]).unrotated_layers == (0, 4)


def test_layers_with_experts() -> None:
    spec = spec_of(**EXPERTS, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert spec.experts == ExpertsSpec(8, 2, 48, is_renormalised=False, dense_layers=(0, 2, 3, 4))
    assert [spec.experts_of(layer) is not None for layer in range(6)] == [False, True, False, False, False, True]
    assert spec.num_telling_layers == 2
    mixtral = {**EXPERTS, "architectures": ["MixtralForCausalLM"]}
    assert spec_of(**mixtral).experts == ExpertsSpec(8, 2, 96)


def test_longrope() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2] * 8}
    changes = {"max_position_embeddings": 512, "original_max_position_embeddings": 64}
    rope = spec_of(**changes, rope_scaling={"type": "su", **factors}).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("longrope", 8.0, 64)
    assert (rope.frequency_factors, rope.long_factors) == ((1.0,) * 8, (2.0,) * 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; known: LlamaForCausalLM"),
        ({"architectures": None}, "architecture None is not supported"),
        ({"architectures": []}, "is not supported"),
        ({"quantization_config": "fp8"}, "quantised by 'fp8'"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq'"),
        ({"hidden_size": None}, "does not say hidden_size"),
        ({"hidden_size": "64"}, "hidden_size must be a number, not '64'"),
        ({"hidden_size": 64.5}, "hidden_size must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number from 1"),
        ({"hidden_size": 2**40}, "hidden_size must be a whole number"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"head_dim": 7}, "7 rotary dimensions do not fit heads of 7"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "'dynamic' is not supported; known: default"),
        ({"rope_scaling": {"rope_type": "linear"}}, "does not say factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor 0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "does not say low_freq_factor"),
        ({"rope_parameters": {"global_attention": {"rope_type": "default"}}}, "unknown form"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8}}, "long_factor must be a list"),
        ({"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0] * 8}}, "1 rope factors for 8"),
        ({"no_rope_layers": [1]}, "no_rope_layers must have a number for each of 2 layers"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "layer_types": ["chunked"]},
            "layer_types",
        ),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({"rope_theta": float("nan")}, "rope_theta must be a number"),
        ({**EXPERTS, "num_experts_per_tok": 9}, "a token cannot have 9 experts of 8"),
        ({**EXPERTS, "num_experts": None}, "does not say num_local_experts"),
        ({**EXPERTS, "mlp_only_layers": 1}, "mlp_only_layers must be a list, not 1"),
        ({**EXPERTS, "decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number from 1"),
        ({**EXPERTS, "hidden_act": "gelu_pytorch_tanh"}, "experts with the activation gelu_tanh"),
    ],
)
def test_what_cannot_work_is_said(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelUnreadable, match=message):
        spec_of(**changes)
