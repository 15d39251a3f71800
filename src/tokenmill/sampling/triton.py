"""The sampler of CUDA devices."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.ops.triton.rows import SamplingColumns, make_scratch
from tokenmill.ops.triton.sampling import sample_rows
from tokenmill.sampling.batch import SamplingTable


class TritonSampler:
    """Draws with kernels that read the slots' parameters themselves, so that a graph of them serves any rows."""

    def __init__(self, table: SamplingTable, vocab_size: int, max_rows: int, *, pdl: bool) -> None:
        self._columns = SamplingColumns(
            table.temperature, table.top_k, table.top_p, table.min_p, table.seed, table.is_greedy
        )
        self._scratch = make_scratch(max_rows, vocab_size, table.seed.device)
        self._pdl = pdl

    def draw(
        self, logits: Tensor, slots: Tensor, positions: Tensor, last_tokens: Tensor, *, is_filtered: bool
    ) -> Tensor:
        """See `Sampler.draw`."""
        ids = torch.empty(slots.shape, dtype=torch.int64, device=slots.device)
        sample_rows(
            logits, slots, positions, self._columns, ids, last_tokens, self._scratch,
            has_filters=is_filtered, pdl=self._pdl,
        )  # fmt: skip
        return ids
