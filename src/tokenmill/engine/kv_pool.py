"""K/V tensors, page tables and last-token table: the device state that lives from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.attention.base import KVCache
from tokenmill.config import ResolvedConfig
from tokenmill.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DeviceState:
    """Written only by the engine, in the order of the steps.

    Slot `spare_slot` belongs to no request; its only page lies behind the scheduler's pages. Padded rows use it.
    """

    kv: tuple[KVCache, ...]  # of each kind
    page_tables: Tensor  # [kinds, slots + 1, pages_per_request] int64 on a CPU, else int32
    last_tokens: Tensor  # [slots + 1] int64
    spare_slot: int
    page_size: int


def allocate(config: ResolvedConfig, spec: ModelSpec, num_kv_heads: int, device: torch.device) -> DeviceState:
    """Room for each kind's pages and a spare one. On a CPU memory is taken as pages are first written."""
    dtype = getattr(torch, config.kv_dtype)
    slots = config.max_running + 1

    def pool(layers: int, pages: int) -> Tensor:
        shape = (layers, (pages + 1) * config.page_size, num_kv_heads, spec.head_dim)
        return torch.empty(shape, dtype=dtype, device=device)

    index = torch.int64 if device.type == "cpu" else torch.int32
    kinds = [(len(kind.layers), pages) for kind, pages in zip(spec.kv_kinds, config.kind_pages, strict=True)]
    page_tables = torch.zeros((len(kinds), slots, config.pages_per_request), dtype=index, device=device)
    page_tables[:, config.max_running] = torch.tensor(config.kind_pages).unsqueeze(1).to(page_tables)
    return DeviceState(
        kv=tuple(KVCache(pool(*sizes), pool(*sizes), config.page_size) for sizes in kinds),
        page_tables=page_tables,
        last_tokens=torch.zeros(slots, dtype=torch.int64, device=device),
        spare_slot=config.max_running,
        page_size=config.page_size,
    )
