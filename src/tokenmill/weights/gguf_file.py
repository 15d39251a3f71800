"""A GGUF file: tensors under Hugging Face names, dequantised a few rows at a time by the `gguf` package."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from tokenmill.errors import ModelUnreadable
from tokenmill.gguf_metadata import TensorInfo, read_header
from tokenmill.spec import ModelSpec
from tokenmill.weights.gguf_config import spec_from_metadata
from tokenmill.weights.stored import Bytes, StoredTensor, check_ends, float_decoder

NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FREQUENCY_FACTORS = "rope_freqs.weight"
PAIRED = ("attn_q", "attn_k")  # rows as llama.cpp's rope wants them, neighbours turned together
FLOATS: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def read_gguf(path: Path) -> tuple[ModelSpec, dict[str, StoredTensor]]:
    """The model's shape, and where its tensors lie.

    Raises ModelUnreadable: truncated, damaged, of an unknown architecture or tensor type, or a name is there twice.
    """
    metadata, infos = read_header(path)
    names = [info.name for info in infos]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ModelUnreadable(f"{path} holds tensors twice: {', '.join(twice[:5])}. Convert it again.")
    stored = {info.name: _stored(path, info) for info in infos}
    check_ends(stored)
    factors = _frequency_factors(stored.pop(FREQUENCY_FACTORS, None))
    spec = spec_from_metadata(metadata, {name: tensor.shape for name, tensor in stored.items()}, factors, str(path))
    return spec, {hugging_face_name(name): _unpaired(name, tensor, spec) for name, tensor in stored.items()}


def hugging_face_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown one stays as it is."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in NAMES:
        return name
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{NAMES[match[2]]}.{match[3]}"


def _stored(path: Path, info: TensorInfo) -> StoredTensor:
    kind = GGMLQuantizationType(info.kind).name if info.kind in set(GGMLQuantizationType) else str(info.kind)
    if kind not in (*FLOATS, *QUANTISED):
        known = ", ".join((*FLOATS, *QUANTISED))
        raise ModelUnreadable(f"{path}: tensor {info.name} is of type {kind}, which is not read; known: {known}")
    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(info.kind)]
    columns = math.prod(info.shape[1:])
    if not info.shape or not info.shape[0] or not columns or columns % block_size:
        raise ModelUnreadable(f"{path}: tensor {info.name} of type {kind} cannot have the shape {list(info.shape)}")
    decode = float_decoder(FLOATS[kind]) if kind in FLOATS else _dequantiser(info.kind)
    return StoredTensor(path, info.offset, info.shape, columns // block_size * block_bytes, decode)


def _dequantiser(kind: int) -> Callable[[Bytes], Tensor]:
    def decode(rows: Bytes) -> Tensor:
        with np.errstate(all="ignore"):
            return torch.from_numpy(dequantize(rows, GGMLQuantizationType(kind)))

    return decode


def _frequency_factors(tensor: StoredTensor | None) -> tuple[float, ...] | None:
    return None if tensor is None else tuple(tensor.read(0, tensor.shape[0]).tolist())


def _unpaired(name: str, tensor: StoredTensor, spec: ModelSpec) -> StoredTensor:
    is_paired = name.split(".")[-2:][0] in PAIRED and tensor.shape[0] % spec.head_dim == 0
    return replace(tensor, paired_head_dim=spec.head_dim) if is_paired else tensor
