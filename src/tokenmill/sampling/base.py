"""What the engine asks of a sampler."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tokenmill.sampling.batch import SamplingTable
from tokenmill.sampling.sampler import sample


class Sampler(Protocol):
    """Draws one token a row. Written logits are of no use afterwards."""

    def draw(
        self, logits: Tensor, slots: Tensor, positions: Tensor, last_tokens: Tensor, *, is_filtered: bool
    ) -> Tensor:
        """Draw without looking at anything on the host.

        Args:
            logits: [rows, vocab], float32 or the model's type.
            slots: [rows] integers.
            positions: [rows] integers, of the tokens before those drawn.
            last_tokens: [slots] int64, written at `slots`.
            is_filtered: whether any row has top_k, top_p or min_p, which may be ignored otherwise.

        Returns:
            ids [rows] int64.
        """


class ReferenceSampler:
    """The sampler in plain torch, which looks at the host's copies of slots and positions."""

    def __init__(self, table: SamplingTable) -> None:
        self._table = table

    def draw(
        self, logits: Tensor, slots: Tensor, positions: Tensor, last_tokens: Tensor, *, is_filtered: bool
    ) -> Tensor:
        """See `Sampler.draw`."""
        ids = sample(logits.float(), self._table, slots.tolist(), (positions + 1).tolist())
        last_tokens[slots] = ids
        return ids
