"""Writes small Llamas as GGUF, the way llama.cpp's converter lays them out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from tests.support.tiny_models import random_llama_tensors
from tests.text.vocabularies import add_fields
from tokenmill.weights.checkpoint import open_checkpoint

SIZES: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, ending = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{ending}"
    layer, rest = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{NAMES[rest]}.{ending}"


def permuted(rows: Tensor, heads: int) -> Tensor:
    """What the converter does to q and k."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    vocabulary: dict[str, Any] | None = None,
    extra: Mapping[str, npt.NDArray[Any]] | None = None,
    leave_out: tuple[str, ...] = (),
    architecture: str = "llama",
    **sizes: Any,
) -> tuple[Path, dict[str, Tensor]]:
    """The file, and the tensors that it was made from under Hugging Face names; matrices are stored as `kind`.

    `metadata` adds to or replaces the keys below "llama."; a value of None removes one. `vocabulary` is that of
    `tests.text.vocabularies`.
    """
    config = {**SIZES, **sizes}
    tensors = random_llama_tensors(config, seed=3)
    writer = gguf.GGUFWriter(path, architecture)
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": 128,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": config["head_dim"],
        **(metadata or {}),
    }
    for key, value in keys.items():
        if isinstance(value, str):
            writer.add_string(f"{architecture}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    add_fields(writer, vocabulary or {})
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        part = name.split(".")[-2]
        stored = permuted(tensor, heads[part]) if part in heads else tensor
        if name not in leave_out:
            _add(writer, gguf_name(name), stored, kind)
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, tensors


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: GGMLQuantizationType) -> None:
    if tensor.ndim == 1 or kind == GGMLQuantizationType.F32:
        writer.add_tensor(name, tensor.numpy())
    elif kind == GGMLQuantizationType.F16:
        writer.add_tensor(name, tensor.half().numpy())
    elif kind == GGMLQuantizationType.BF16:
        writer.add_tensor(name, tensor.bfloat16().view(torch.uint8).numpy(), raw_dtype=kind)
    else:
        writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)


def write_raw(path: Path, kind: GGMLQuantizationType, rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """A file that fits no model but for its tensor token_embd.weight of random blocks; returns the blocks."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 0x3C, (rows, columns // block_size * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("block_count", "context_length", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 1)
    writer.add_uint32("llama.embedding_length", columns)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return raw


def read_all(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole."""
    checkpoint = open_checkpoint(path)
    return {name: checkpoint.read(name, 0, shape[0]) for name, shape in checkpoint.shapes.items()}
