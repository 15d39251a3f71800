"""What layers are built with, and where the numbers of their parameters come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    attention: Sequence[AttentionBackend]  # one for each of the spec's kinds of K/V
    dtype: torch.dtype
    device: torch.device

    def parameter(self, *shape: int) -> Tensor:
        """Memory for a parameter, not yet filled."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Source:
    """The part of a checkpoint's tensor that fills `target`, a parameter or some of its rows.

    `shape` is the whole tensor's; `columns` None takes all of them; `offset` is added. `others` are further parts.
    """

    target: Tensor  # [rows.size, columns.size], or [rows.size] of a vector
    shape: tuple[int, ...]
    rows: Span
    columns: Span | None = None
    offset: float = 0.0
    others: tuple[Source, ...] = ()


Sources = Mapping[str, Source]  # by the checkpoint tensor's name
