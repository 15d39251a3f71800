"""Model families as data. A family whose data flow is the decoder's needs an entry here and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from tokenmill.layers.attention import AttentionNames
from tokenmill.layers.mlp import MLPNames
from tokenmill.layers.moe import ExpertNames
from tokenmill.models.decoder import DecoderNames

LLAMA = DecoderNames(
    embedding="model.embed_tokens",
    layer="model.layers",
    attention_norm="input_layernorm",
    attention=AttentionNames("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    mlp_norm="post_attention_layernorm",
    mlp=MLPNames("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    final_norm="model.norm",
    output="lm_head",
    experts=ExpertNames("mlp.gate", "mlp.experts", MLPNames("gate_proj", "up_proj", "down_proj")),
)
MIXTRAL = replace(
    LLAMA, experts=ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", MLPNames("w1", "w3", "w2"))
)
PHI3 = replace(
    LLAMA,
    attention=AttentionNames("self_attn.qkv_proj", "self_attn.qkv_proj", "self_attn.qkv_proj", "self_attn.o_proj"),
    mlp=MLPNames("mlp.gate_up_proj", "mlp.gate_up_proj", "mlp.down_proj"),
)
OLMO2 = replace(
    LLAMA,
    attention_norm="",
    attention_out_norm="post_attention_layernorm",
    mlp_norm="",
    mlp_out_norm="post_feedforward_layernorm",
    whole_qk_norms=True,
)
GEMMA2 = replace(
    LLAMA,
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
    scales_embedding=True,
)
FAMILIES: Mapping[str, DecoderNames] = MappingProxyType(
    {
        **dict.fromkeys(("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"), LLAMA),
        "mixtral": MIXTRAL,
        "phi3": PHI3,
        "olmo2": OLMO2,
        "olmo3": OLMO2,
        "gemma2": GEMMA2,
        "gemma3": GEMMA2,
    }
)
