"""Tiny random checkpoints of each family, made by transformers itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

SIZES = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 3,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
ORIGINAL = 32
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [2.0 + 0.5 * pair for pair in range(8)],
    "original_max_position_embeddings": ORIGINAL,
}
GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 16}
EXPERTS = {"num_experts_per_tok": 3, "num_experts": 8, "moe_intermediate_size": 48, "norm_topk_prob": True}
LOCAL_AND_GLOBAL = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
MIXTURES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 24}),
    "qwen3_moe-weights of all": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": False}),
    "qwen3_moe-each second": ("Qwen3Moe", {**EXPERTS, "decoder_sparse_step": 2}),
    "qwen3_moe-listed": ("Qwen3Moe", {**EXPERTS, "mlp_only_layers": [0, 2]}),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 40, "norm_topk_prob": False}),
    "mixtral": ("Mixtral", {"num_experts_per_tok": 2, "num_local_experts": 5}),
    "mixtral-window": ("Mixtral", {"num_experts_per_tok": 3, "num_local_experts": 3, "sliding_window": 16}),
}
YARN_AND_LOCAL = {
    "full_attention": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 5e5, "original_max_position_embeddings": 32},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 16}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL}),
    "phi3-window": ("Phi3", {"sliding_window": 16}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 16, "rope_parameters": YARN_AND_LOCAL}),
    "smollm3": ("SmolLM3", {}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3Text", {**GEMMA, "sliding_window_pattern": 3, "rope_parameters": LOCAL_AND_GLOBAL}),
    **MIXTURES,
}


def make_family(folder: Path, name: str, *, is_stacked: bool = False, **changes: Any) -> Path:
    """Write the checkpoint called `name`; its weights are large enough for greedy outputs to be far from ties."""
    prefix, options = FAMILIES[name]
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **options, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")(config)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            is_norm, is_vector = "norm" in key, tensor.dim() == 1
            scale = 0.2 if is_norm else 0.5 if is_vector else 0.3 if "embed" in key else 1.5 * tensor.shape[-1] ** -0.5
            mean = 1.0 if is_norm and not prefix.startswith("Gemma") else 0.0
            tensor.copy_(mean + scale * torch.randn(tensor.shape))
    model.save_pretrained(folder, save_original_format=not is_stacked)
    return folder
