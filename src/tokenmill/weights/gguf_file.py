"""A GGUF file: tensors under Hugging Face names, dequantised a few rows at a time by the `gguf` package."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from tokenmill.errors import ModelUnreadable
from tokenmill.gguf_metadata import TensorInfo, read_header
from tokenmill.spec import ModelSpec
from tokenmill.weights.gguf_config import FLOATS, QUANTISED, Architecture, find_architecture, spec_from_metadata
from tokenmill.weights.stored import StoredTensor, check_ends, float_decoder

NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
ROPE_FACTORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
PAIRED = ("self_attn.q_proj", "self_attn.k_proj")
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def read_gguf(path: Path) -> tuple[ModelSpec, dict[str, StoredTensor]]:
    """The model's shape, and where its tensors lie; of a split file `path` is the first part.

    Raises ModelUnreadable: truncated, damaged, of an unknown architecture or tensor type, a part is missing, or a name
    is there twice.
    """
    metadata, infos = read_header(path)
    parts = _other_parts(path, metadata)
    architecture = find_architecture(metadata, str(path))
    found = [(path, info) for info in infos]
    for part in parts:
        found += [(part, info) for info in read_header(part)[1]]
    names = [info.name for _, info in found]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ModelUnreadable(f"{path} holds tensors twice: {', '.join(twice[:5])}. Convert it again.")
    stored = {info.name: _stored(file, info) for file, info in found}
    check_ends(stored)
    ropes = {name: stored.pop(f"{name}.weight", None) for name in ROPE_FACTORS}
    factors = {name: tuple(rope.read(0, rope.shape[0]).tolist()) for name, rope in ropes.items() if rope}
    spec = spec_from_metadata(metadata, {name: tensor.shape for name, tensor in stored.items()}, factors, str(path))
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        tensors |= _renamed(name, tensor, architecture, spec)
    return spec, tensors


def hugging_face_name(name: str, architecture: Architecture) -> str:
    """The Hugging Face name of a GGUF tensor, with {} for an expert's number; an unknown one stays as it is."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    stem = architecture.names.get(match[2], NAMES.get(match[2])) if match else None
    if match is None or stem is None:
        return name
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{stem}.{match[3]}"


def _other_parts(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    count, number = metadata.get("split.count") or 1, metadata.get("split.no") or 0
    if count == 1:
        return []
    named = PART.fullmatch(path.name)
    if number != 0 or named is None or int(named[3]) != count:
        first = f"NAME-00001-of-{count:05}.gguf"
        raise ModelUnreadable(f"{path} is part {number + 1} of {count} of a model: name the first part, called {first}")
    parts = [path.with_name(f"{named[1]}-{part:05}-of-{count:05}.gguf") for part in range(2, count + 1)]
    absent = [part.name for part in parts if not part.is_file()]
    if absent:
        raise ModelUnreadable(f"{path} lacks its other parts beside it: {', '.join(absent[:5])}. Fetch them too.")
    return parts


def _renamed(name: str, tensor: StoredTensor, architecture: Architecture, spec: ModelSpec) -> dict[str, StoredTensor]:
    """The tensor, or one for each expert, under Hugging Face names and with the numbers that are meant there."""
    new = hugging_face_name(name, architecture)
    part = new.removesuffix(".bias").removesuffix(".weight")
    if architecture.is_paired and part.endswith(PAIRED) and tensor.shape[0] % spec.head_dim == 0:
        tensor = replace(tensor, paired_head_dim=spec.head_dim)
    if part.endswith("shared_expert_gate") and len(tensor.shape) == 1:  # a matrix of one row
        tensor = replace(tensor, shape=(1, *tensor.shape), row_bytes=tensor.end - tensor.offset)
    if "{}" not in new or len(tensor.shape) != 3:
        return {new: tensor}
    return {new.format(expert): its for expert, its in enumerate(tensor.unstacked())}


def _stored(path: Path, info: TensorInfo) -> StoredTensor:
    kind = GGMLQuantizationType(info.kind).name if info.kind in set(GGMLQuantizationType) else str(info.kind)
    if kind not in (*FLOATS, *QUANTISED):
        known = ", ".join((*FLOATS, *QUANTISED))
        raise ModelUnreadable(f"{path}: tensor {info.name} is of type {kind}, which is not read; known: {known}")
    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(info.kind)]
    columns = math.prod(info.shape[1:])
    if not info.shape or not info.shape[0] or not columns or columns % block_size:
        raise ModelUnreadable(f"{path}: tensor {info.name} of type {kind} cannot have the shape {list(info.shape)}")
    decode = float_decoder(getattr(torch, FLOATS[kind])) if kind in FLOATS else _dequantiser(info.kind)
    row_bytes, quantised = columns // block_size * block_bytes, "" if kind in FLOATS else kind
    return StoredTensor(path, info.offset, info.shape, row_bytes, decode, kind=quantised)


def _dequantiser(kind: int) -> Callable[[Tensor], Tensor]:
    def decode(rows: Tensor) -> Tensor:
        with np.errstate(all="ignore"):
            return torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType(kind)))

    return decode
