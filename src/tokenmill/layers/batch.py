"""The tensors of one step, complete when built; models take it as an argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tokenmill.attention.base import AttentionMetadata


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Inputs of one forward pass over `tokens` tokens of `rows` rows, of which `sampled` draw a token."""

    input_ids: Tensor  # [tokens] integers, as are the others
    positions: Tensor  # [tokens]
    kv_slots: Sequence[Tensor]  # of each kind of K/V: [tokens], where the tokens' K and V go
    logits_indices: Tensor | None  # [sampled], into tokens; None: all of them draw
    attention: Sequence[AttentionMetadata]  # of each kind of K/V
