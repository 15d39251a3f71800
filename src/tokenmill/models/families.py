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
FAMILIES: Mapping[str, DecoderNames] = MappingProxyType(
    {"llama": LLAMA, "qwen3": LLAMA, "qwen3_moe": LLAMA, "mixtral": MIXTRAL}
)
