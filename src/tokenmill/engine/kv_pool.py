"""K/V tensors, page table and last-token table: the device state that lives from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.attention.base import KVCache
from tokenmill.config import ResolvedConfig
from tokenmill.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DeviceState:
    """Written only by the engine, in the order of the steps."""

    kv: KVCache
    page_table: Tensor  # [slots, pages_per_request] int64
    last_tokens: Tensor  # [slots] int64


def allocate(config: ResolvedConfig, spec: ModelSpec, device: torch.device) -> DeviceState:
    """Room for `config.num_pages` pages. On a CPU the memory is taken as pages are first written."""
    shape = (spec.num_layers, config.pool_tokens, spec.num_kv_heads, spec.head_dim)
    dtype = getattr(torch, config.dtype)
    return DeviceState(
        kv=KVCache(
            keys=torch.empty(shape, dtype=dtype, device=device),
            values=torch.empty(shape, dtype=dtype, device=device),
            page_size=config.page_size,
        ),
        page_table=torch.zeros((config.max_running, config.pages_per_request), dtype=torch.int64, device=device),
        last_tokens=torch.zeros(config.max_running, dtype=torch.int64, device=device),
    )
