"""Which attention backends can be used, and why not the others. Imports none of them."""

from __future__ import annotations

import importlib.util

import torch

from tokenmill.spec import ModelSpec

MAX_HEAD_DIM = 256
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not(name: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the attention backend called `name` cannot serve this model on this device; None: it can."""
    if name == "reference":
        return None
    if name != "triton":
        return f"there is no attention backend called {name!r}; known: reference, triton"
    if device.type != "cuda":
        return f"triton needs an NVIDIA GPU, and the device is {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed; it comes with torch for CUDA"
    if dtype not in TRITON_DTYPES:
        return f"triton takes float32, bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    if spec.head_dim > MAX_HEAD_DIM:
        return f"triton takes heads of at most {MAX_HEAD_DIM} dimensions, and this model's have {spec.head_dim}"
    return None
