"""Which attention backends can be used, and why not the others. Imports none of them."""

from __future__ import annotations

import importlib.util
import os
import shutil

import torch

from tokenmill.spec import ModelSpec

MAX_HEAD_DIM = 256
FLASHINFER_HEAD_DIMS = (64, 128, 256)
INSTALL = {"triton": "it comes with torch for CUDA", "flashinfer": "pip install 'tokenmill[cuda]'"}
DTYPES = {
    "triton": (torch.float32, torch.bfloat16, torch.float16),
    "flashinfer": (torch.bfloat16, torch.float16),
}


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
