"""A Hugging Face folder: config.json, and safetensors in one file or several with an index.

The safetensors layout is that of its documentation: eight bytes of header length, a JSON header, then the data.
"""

from __future__ import annotations

import json
import logging
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tokenmill.errors import ModelUnreadable
from tokenmill.spec import ModelSpec
from tokenmill.weights.hf_config import spec_from_config
from tokenmill.weights.stored import StoredTensor, check_ends, float_decoder

log = logging.getLogger(__name__)
SEEING = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
HEAD = "lm_head.weight"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_folder(folder: Path) -> tuple[ModelSpec, dict[str, StoredTensor]]:
    """The model's shape, and where its tensors lie.

    Raises ModelUnreadable: files missing, damaged or contradicting each other.
    """
    spec = read_spec(folder)
    tensors: dict[str, StoredTensor] = {}
    num_seeing = 0
    for path in _weight_files(folder):
        for stored_name, tensor in read_safetensors(path).items():
            if SEEING.match(stored_name):
                num_seeing += 1
                continue
            name = stored_name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)
            if name in tensors:
                raise ModelUnreadable(f"tensor {name} is twice in {folder}: in {tensors[name].path.name}, {path.name}")
            tensors |= _of_experts(name, tensor)
    check_ends(tensors)
    if num_seeing:
        log.warning("%d tensors for images are left out: this model reads text alone here", num_seeing)
    if not any(name.startswith("model.") for name in tensors):  # saved without the head, as embedding models are
        has_output = HEAD in tensors or spec.tie_embeddings
        spec = replace(spec, has_output=has_output, tie_embeddings=HEAD not in tensors)
        tensors = {name if name == HEAD else f"model.{name}": tensor for name, tensor in tensors.items()}
    return spec, tensors


def _of_experts(name: str, tensor: StoredTensor) -> dict[str, StoredTensor]:
    """A stack of experts' tensors, as transformers 5 may write it, one by one; any other tensor as it is."""
    stack, _, kind = name.rpartition(".")
    if kind not in ("gate_up_proj", "down_proj") or len(tensor.shape) != 3:
        return {name: tensor}
    each = list(enumerate(tensor.unstacked()))
    if kind == "down_proj":
        return {f"{stack}.{number}.down_proj.weight": its for number, its in each}
    half, lines = tensor.shape[1] // 2, tensor.shape[1]
    gates = {f"{stack}.{number}.gate_proj.weight": its.part(0, half) for number, its in each}
    return gates | {f"{stack}.{number}.up_proj.weight": its.part(half, lines) for number, its in each}


def read_spec(folder: Path) -> ModelSpec:
    """The model's shape, from config.json alone.

    Raises ModelUnreadable: there is none, or it is damaged or not supported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelUnreadable(f"{folder} has no config.json: it is not a model folder in Hugging Face layout")
    return spec_from_config(_json(path, path.read_bytes), str(path))


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Where the tensors of one file lie, in the file's order.

    Raises ModelUnreadable: truncated, damaged, a name twice, or a type that is not a floating one.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
            raise ModelUnreadable(f"{path} is not a safetensors file, or it is truncated. Fetch it again.")
        header = _json(path, lambda: file.read(length))
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            tensors[name] = _stored(path, name, entry, 8 + length)
    return dict(sorted(tensors.items(), key=lambda item: item[1].offset))


def _weight_files(folder: Path) -> list[Path]:
    if not (folder / INDEX).is_file():
        if (folder / SINGLE).is_file():
            return [folder / SINGLE]
        kinds = "other kinds, such as pickle files (.bin, .pt), are not read: save it with transformers, as safetensors"
        raise ModelUnreadable(f"{folder} has neither {SINGLE} nor {INDEX}; {kinds}")
    weight_map = _json(folder / INDEX, (folder / INDEX).read_bytes).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelUnreadable(f"{folder / INDEX} has no weight_map")
    files = [folder / file for file in sorted(set(weight_map.values()))]
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        raise ModelUnreadable(f"{folder} lacks files that {INDEX} names: {', '.join(absent[:5])}. Fetch them again.")
    return files


def _stored(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    try:
        kind, shape, (start, stop) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        count = math.prod(shape)
        is_sound = all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop)) and count > 0
    except (TypeError, KeyError, ValueError) as error:
        raise ModelUnreadable(f"{path} is damaged: its tensor {name} is not described. Fetch it again.") from error
    if kind not in DTYPES:
        raise ModelUnreadable(f"{path}: tensor {name} is of type {kind}, which is not read; known: {', '.join(DTYPES)}")
    dtype = DTYPES[kind]
    if not is_sound or stop - start != count * dtype.itemsize or not shape:
        raise ModelUnreadable(f"{path} is damaged: the size of its tensor {name} is contradictory. Fetch it again.")
    return StoredTensor(path, data_start + start, shape, count // shape[0] * dtype.itemsize, float_decoder(dtype))


def _json(path: Path, read: Any) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise ModelUnreadable(f"{path} names twice: {', '.join(twice[:5])}")
        return dict(pairs)

    try:
        value = json.loads(read().decode("utf-8"), object_pairs_hook=once)
    except OSError as error:
        raise ModelUnreadable(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelUnreadable(f"{path} is damaged: it does not hold JSON ({error}). Fetch it again.") from error
    if not isinstance(value, dict):
        raise ModelUnreadable(f"{path} is damaged: it does not hold a JSON object. Fetch it again.")
    return value
