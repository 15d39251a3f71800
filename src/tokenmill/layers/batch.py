"""The tensors of one step, complete when built; models take it as an argument."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tokenmill.attention.base import AttentionMetadata


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Inputs of one forward pass over `tokens` tokens of `rows` rows, of which `sampled` draw a token."""

    input_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    kv_slots: Tensor  # [tokens] int64, where the tokens' K and V go
    logits_indices: Tensor | None  # [sampled] int64, into tokens; None: all of them draw
    attention: AttentionMetadata
