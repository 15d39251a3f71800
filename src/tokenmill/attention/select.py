"""Attention backends by name."""

from __future__ import annotations

import torch

from tokenmill.attention.availability import why_not
from tokenmill.attention.base import AttentionBackend
from tokenmill.attention.reference import ReferenceAttention
from tokenmill.errors import ConfigError
from tokenmill.ops.select import has_pdl
from tokenmill.parallel.shard import split_evenly, split_kv_heads
from tokenmill.spec import ModelSpec

CPU = torch.device("cpu")


def make_backend(
    name: str,
    spec: ModelSpec,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    group_size: int = 1,
) -> AttentionBackend:
    """The attention backend called `name` for models of this shape; "auto" is the fastest that the device has.

    Raises:
        ConfigError: there is none of that name, or it cannot serve this model here.
    """
    if name == "auto":
        name = "triton" if why_not("triton", spec, device, dtype) is None else "reference"
    reason = why_not(name, spec, device, dtype)
    if reason is not None:
        raise ConfigError(f"--attention {name} cannot be used: {reason}")
    scale = spec.head_dim**-0.5
    if name == "reference":
        return ReferenceAttention(scale=scale, token_elements=spec.num_kv_heads * spec.head_dim)
    from tokenmill.attention.triton import TritonAttention

    return TritonAttention(
        scale=scale,
        num_heads=split_evenly(spec.num_heads, 0, group_size, "attention heads").size,
        num_kv_heads=split_kv_heads(spec.num_heads, spec.num_kv_heads, 0, group_size).size,
        head_dim=spec.head_dim,
        dtype=dtype,
        num_sms=torch.cuda.get_device_properties(device).multi_processor_count,
        pdl=has_pdl(device),
    )
