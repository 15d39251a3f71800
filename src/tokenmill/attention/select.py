"""Attention backends by name, and why one cannot be used. Imports those that it makes only when it makes them."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import Any

import torch

from tokenmill.attention.base import AttentionBackend, GraphAttention
from tokenmill.attention.reference import ReferenceAttention
from tokenmill.attention.split import GraphSplitAttention, SplitAttention
from tokenmill.errors import ConfigError
from tokenmill.ops.select import has_pdl
from tokenmill.parallel.shard import split_evenly, split_kv_heads
from tokenmill.spec import KVKind, ModelSpec

CPU = torch.device("cpu")
MAX_HEAD_DIM = 256
FLASHINFER_HEAD_DIMS = (64, 128, 256)
INSTALL = {"triton": "it comes with torch for CUDA", "flashinfer": "pip install 'tokenmill[cuda]'"}
DTYPES = {
    "triton": (torch.float32, torch.bfloat16, torch.float16),
    "flashinfer": (torch.bfloat16, torch.float16),
}


def make_backends(
    choice: str,
    spec: ModelSpec,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    group_size: int = 1,
) -> tuple[AttentionBackend, ...]:
    """The attention backend called `choice`, or of two as "PREFILL,DECODE", for each kind of K/V that the model has.

    "auto" is the fastest that the device has.

    Raises:
        ConfigError: there is none of that name, or it cannot serve this model here.
    """
    names = choice.split(",")
    if len(names) > 2:
        raise ConfigError(f"--attention takes one name, or two as PREFILL,DECODE, not {choice!r}")
    fastest = "triton" if why_not("triton", spec, device, dtype) is None else "reference"
    names = [fastest if name == "auto" else name for name in names]
    reasons = [reason for name in dict.fromkeys(names) if (reason := why_not(name, spec, device, dtype)) is not None]
    if reasons:
        raise ConfigError(f"--attention {choice} cannot be used: {'; '.join(reasons)}")
    if len(names) == 1:
        return tuple(_make(names[0], spec, kind, dtype, device, group_size, (1, 2)) for kind in spec.kv_kinds)
    backends: list[AttentionBackend] = []
    for kind in spec.kv_kinds:
        prefill, decode = (
            _make(name, spec, kind, dtype, device, group_size, (length,))
            for name, length in zip(names, (2, 1), strict=True)
        )
        split = GraphSplitAttention if isinstance(decode, GraphAttention) else SplitAttention
        backends.append(split(prefill, decode))
    return tuple(backends)


def _make(
    name: str,
    spec: ModelSpec,
    kind: KVKind,
    dtype: torch.dtype,
    device: torch.device,
    group_size: int,
    lengths: tuple[int, ...],
) -> AttentionBackend:
    """A backend for rows of such lengths; 2 stands for all above 1."""
    scale = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
    options: dict[str, Any] = {"scale": scale, "window": kind.window, "cap": spec.attention_cap}
    if name == "reference":
        return ReferenceAttention(**options, token_elements=spec.num_kv_heads * spec.head_dim)
    options |= {
        "num_heads": split_evenly(spec.num_heads, 0, group_size, "attention heads").size,
        "num_kv_heads": split_kv_heads(spec.num_heads, spec.num_kv_heads, 0, group_size).size,
        "head_dim": spec.head_dim,
        "dtype": dtype,
    }
    if name == "flashinfer":
        from tokenmill.attention.flashinfer import FlashInferAttention

        return FlashInferAttention(**options, device=device, lengths=lengths)
    from tokenmill.attention.triton import TritonAttention

    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return TritonAttention(**options, num_sms=num_sms, pdl=has_pdl(device))


def why_not(name: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the attention backend called `name` cannot serve this model on this device; None: it can."""
    if name == "reference":
        return None
    if name not in DTYPES:
        return f"there is no attention backend called {name!r}; known: reference, {', '.join(DTYPES)}"
    if device.type != "cuda":
        return f"{name} needs an NVIDIA GPU, and the device is {device.type}"
    if importlib.util.find_spec(name) is None:
        return f"the package {name} is not installed; {INSTALL[name]}"
    if dtype not in DTYPES[name]:
        *types, last = (_name(its) for its in DTYPES[name])
        return f"{name} takes {', '.join(types)} or {last}, not {_name(dtype)}"
    if name == "flashinfer":
        return _why_not_flashinfer(spec)
    if spec.head_dim > MAX_HEAD_DIM:
        return f"triton takes heads of at most {MAX_HEAD_DIM} dimensions, and this model's have {spec.head_dim}"
    return None


def _why_not_flashinfer(spec: ModelSpec) -> str | None:
    if spec.head_dim not in FLASHINFER_HEAD_DIMS:
        return f"flashinfer takes heads of 64, 128 or 256 dimensions, and this model's have {spec.head_dim}"
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    if shutil.which("nvcc") is None and not os.path.exists(f"{home}/bin/nvcc"):
        return "flashinfer compiles its kernels, and there is no nvcc: install CUDA's toolkit or flashinfer-jit-cache"
    if shutil.which("ninja") is None:
        return "flashinfer compiles its kernels, and there is no ninja in PATH: pip install ninja"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
