"""Rewrites a folder in Hugging Face layout as GGUF, as llama.cpp's converter does; names come from the gguf package."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file
from torch import Tensor

ARCHITECTURES = {
    "LlamaForCausalLM": MODEL_ARCH.LLAMA,
    "MistralForCausalLM": MODEL_ARCH.LLAMA,
    "MixtralForCausalLM": MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": MODEL_ARCH.QWEN3,
    "Qwen2MoeForCausalLM": MODEL_ARCH.QWEN2MOE,
    "Qwen3MoeForCausalLM": MODEL_ARCH.QWEN3MOE,
    "Phi3ForCausalLM": MODEL_ARCH.PHI3,
    "Olmo2ForCausalLM": MODEL_ARCH.OLMO2,
    "Olmo3ForCausalLM": MODEL_ARCH.OLMO2,
    "SmolLM3ForCausalLM": MODEL_ARCH.SMOLLM3,
    "Gemma2ForCausalLM": MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": MODEL_ARCH.GEMMA3,
}
PERMUTED = (MODEL_ARCH.LLAMA, MODEL_ARCH.SMOLLM3)
SHIFTED = (MODEL_ARCH.GEMMA2, MODEL_ARCH.GEMMA3)
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


def convert(
    folder: Path,
    path: Path,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    tensors_per_file: int = 0,
    metadata: Mapping[str, int | float] | None = None,
) -> Path:
    """The GGUF file, or the first of several; matrices are stored as `kind`.

    `metadata` are more keys, without the architecture's name in front.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["architectures"][0]]
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=tensors_per_file)
    _add_keys(writer, config)
    for key, value in (metadata or {}).items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{gguf.MODEL_ARCH_NAMES[arch]}.{key}", value)
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, tensor in _stacked(tensors).items():
        stored = _as_stored(name, tensor.float(), config, arch)
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new is not None, name
        if stored.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(new, stored.numpy())
        else:
            writer.add_tensor(new, gguf.quants.quantize(stored.numpy(), kind), raw_dtype=kind)
    _add_rope_factors(writer, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not tensors_per_file else next(iter(sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))))


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts' matrices in stacks, all else as it is."""
    found: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            stacks.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = tensor
        else:
            found[name] = tensor
    return found | {name: torch.stack([its[number] for number in sorted(its)]) for name, its in stacks.items()}


def _as_stored(name: str, tensor: Tensor, config: dict[str, Any], arch: MODEL_ARCH) -> Tensor:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
    if arch in PERMUTED and heads:
        return tensor.view(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    if name.endswith("shared_expert_gate.weight"):
        return tensor.squeeze(0)
    return tensor + 1 if arch in SHIFTED and name.endswith("norm.weight") else tensor


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {**config, **rope.get("full_attention", rope)}


def _add_keys(writer: GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = _rope(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * (rope.get("partial_rotary_factor") or 1)))
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if original := rope.get("original_max_position_embeddings"):
        writer.add_rope_scaling_orig_ctx_len(original)
        if rope.get("rope_type") in ("longrope", "su"):
            scale = config["max_position_embeddings"] / original
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        writer.add_sliding_window(config["sliding_window"])
    if cap := config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(cap)
    if cap := config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(cap)
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if width := config.get("moe_intermediate_size"):
            writer.add_expert_feed_forward_length(width)
        if width := config.get("shared_expert_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(width)


def _add_rope_factors(writer: GGUFWriter, config: dict[str, Any]) -> None:
    rope = _rope(config)
    for end in ("long", "short"):
        if factors := rope.get(f"{end}_factor"):
            writer.add_tensor(f"rope_factors_{end}.weight", torch.tensor(factors, dtype=torch.float32).numpy())
    if rope.get("rope_type") == "llama3":
        dim, theta = config["head_dim"], rope["rope_theta"]
        waves = 2 * math.pi * theta ** (torch.arange(0, dim, 2) / dim)
        original, low, high = (
            rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        smooth = ((original / waves - low) / (high - low)).clamp(0, 1)
        writer.add_tensor("rope_freqs.weight", (1 / ((1 - smooth) / rope["factor"] + smooth)).float().numpy())
