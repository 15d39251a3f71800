"""Attention backends by name."""

from __future__ import annotations

from typing import Any

import torch

from tokenmill.attention.availability import why_not
from tokenmill.attention.base import AttentionBackend, GraphAttention
from tokenmill.attention.reference import ReferenceAttention
from tokenmill.attention.split import GraphSplitAttention, SplitAttention
from tokenmill.errors import ConfigError
from tokenmill.ops.select import has_pdl
from tokenmill.parallel.shard import split_evenly, split_kv_heads
from tokenmill.spec import ModelSpec

CPU = torch.device("cpu")


def make_backend(
    choice: str,
    spec: ModelSpec,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    group_size: int = 1,
) -> AttentionBackend:
    """The attention backend called `choice`, or of two as "PREFILL,DECODE"; "auto" is the fastest that the device has.

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
        return _make(names[0], spec, dtype, device, group_size, (1, 2))
    prefill, decode = (
        _make(name, spec, dtype, device, group_size, (length,)) for name, length in zip(names, (2, 1), strict=True)
    )
    return (GraphSplitAttention if isinstance(decode, GraphAttention) else SplitAttention)(prefill, decode)


def _make(
    name: str, spec: ModelSpec, dtype: torch.dtype, device: torch.device, group_size: int, lengths: tuple[int, ...]
) -> AttentionBackend:
    """A backend for rows of such lengths; 2 stands for all above 1."""
    scale = spec.head_dim**-0.5
    if name == "reference":
        return ReferenceAttention(scale=scale, token_elements=spec.num_kv_heads * spec.head_dim)
    options: dict[str, Any] = {
        "scale": scale,
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
