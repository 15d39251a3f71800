"""What layers are built with, and where the numbers of their parameters come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.attention.base import AttentionBackend
from tokenmill.ops.api import Ops
from tokenmill.parallel.group import Group
from tokenmill.parallel.shard import Span
from tokenmill.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Build:
    """The same for every layer of a model."""

    spec: ModelSpec
    group: Group
    ops: Ops
    attention: AttentionBackend
    dtype: torch.dtype
    device: torch.device

    def parameter(self, *shape: int) -> Tensor:
        """Memory for a parameter, not yet filled."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Source:
    """The part of a checkpoint's tensor that fills `target`, a parameter or some of its rows.

    `shape` is the whole tensor's; `columns` None takes all of them.
    """

    target: Tensor  # [rows.size, columns.size], or [rows.size] of a vector
    shape: tuple[int, ...]
    rows: Span
    columns: Span | None = None


Sources = Mapping[str, Source]  # by the checkpoint tensor's name
