"""Configurations with odd values in any place: a shape, or one error that says what is wrong."""

from __future__ import annotations

import random
from typing import Any

from tokenmill.errors import ModelUnreadable
from tokenmill.weights import gguf_config, hf_config

CONFIG: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 64,
    "use_sliding_window": True,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "sliding_window_pattern": 2,
    "max_window_layers": 2,
    "no_rope_layers": [1, 0, 1, 1],
    "hidden_act": "silu",
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "no_rope_layer_interval": 2,
    "partial_rotary_factor": 1.0,
    "rope_theta": 1e4,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
    "rope_parameters": None,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 3.0,
    "query_pre_attn_scalar": 16,
    "original_max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "text_config": None,
}
METADATA: dict[str, Any] = {
    "block_count": 4,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.sliding_window": 64,
    "attention.sliding_window_pattern": 2,
    "rope.freq_base": 1e4,
    "rope.dimension_count": 16,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 2.0,
    "rope.scaling.original_context_length": 128,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "attn_logit_softcapping": 5.0,
}
ODD = [
    *(0, -1, 1, 3, 7, 2**19, 2**40, 10**18, 0.5, 1e300, float("nan"), float("inf"), "x", "", None, True, False),
    *([], [1], [True] * 4, ["a"], [{}] * 4, [[]] * 4, ["sliding_attention"] * 4, {}, {"a": 1}, {"rope_type": ["x"]}),
    *({"type": "llama3"}, {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": 3}),
]


def test_folders() -> None:
    draw = random.Random(1)
    names = [*hf_config.ARCHITECTURES, *hf_config.WRITING_PARTS]
    errors, num_read = [], 0
    for _ in range(1500):
        changes = {draw.choice(list(CONFIG)): draw.choice(ODD) for _ in range(draw.choice((1, 1, 2)))}
        config = {name: value for name, value in CONFIG.items() if draw.random() < 0.8} | changes
        try:
            hf_config.spec_from_config(config | {"architectures": [draw.choice(names)]}, "config.json")
            num_read += 1
        except ModelUnreadable as error:
            errors.append(error.message)
    assert num_read > 100
    assert all("config.json" in error for error in errors)


def test_gguf_files() -> None:
    draw = random.Random(2)
    names = [name for name in gguf_config.ARCHITECTURES if " " not in name]
    errors, num_read = [], 0
    for _ in range(1500):
        changes = {draw.choice(list(METADATA)): draw.choice(ODD) for _ in range(draw.choice((0, 1, 2)))}
        name = draw.choice(names)
        fields = {f"{name}.{key}": value for key, value in (METADATA | changes).items()}
        factors = {"rope_freqs": (draw.choice((1.0, 0.0)),) * draw.choice((8, 3))} if draw.random() < 0.1 else {}
        try:
            metadata = {"general.architecture": name, **fields}
            gguf_config.spec_from_metadata(metadata, {"token_embd.weight": (50, 64)}, factors, "m.gguf")
            num_read += 1
        except ModelUnreadable as error:
            errors.append(error.message)
    assert num_read > 100
    assert all("m.gguf" in error for error in errors)
