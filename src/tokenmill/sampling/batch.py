"""The sampling parameters of every slot, as columns on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.types import SamplingParams

TOP_K_LIMIT = 1024


class SamplingTable:
    """One row a slot; `open` writes it when a request takes the slot. Written only by the engine."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.device = device
        self.temperature = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.top_p = torch.ones(num_slots, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self.seed = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._is_greedy = [True] * num_slots
        self._is_filtered = [False] * num_slots
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}
        self._blocked: dict[int, tuple[int, Tensor]] = {}

    def open(self, slot: int, params: SamplingParams, prompt_len: int, blocked_ids: tuple[int, ...]) -> None:
        """Load a request's parameters into `slot`; what was there before is forgotten."""
        self.temperature[slot] = params.temperature
        self.top_k[slot] = max(params.top_k, 0)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seed[slot] = params.seed or 0
        self._is_greedy[slot] = params.is_greedy
        self._is_filtered[slot] = params.top_k > 0 or params.top_p < 1.0
        self._bias.pop(slot, None)
        self._blocked.pop(slot, None)
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=self.device)
            values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=self.device)
            self._bias[slot] = ids, values
        if blocked_ids and params.min_tokens:
            ids = torch.tensor(blocked_ids, dtype=torch.int64, device=self.device)
            self._blocked[slot] = prompt_len + params.min_tokens, ids

    def is_greedy(self, slot: int) -> bool:
        """Whether the slot takes the likeliest token."""
        return self._is_greedy[slot]

    def is_filtered(self, slot: int) -> bool:
        """Whether the slot needs its tokens in order of probability (top_k or top_p)."""
        return self._is_filtered[slot]

    def adjust(self, logits: Tensor, slots: list[int], positions: list[int]) -> None:
        """Add biases and forbid early ends, in place.

        Args:
            logits: [sampled, vocab] float32.
            slots: the slot of each row.
            positions: the position of the token that each row draws.
        """
        for index, slot in enumerate(slots):
            if slot in self._bias:
                ids, values = self._bias[slot]
                logits[index].index_add_(0, ids, values)
            if slot in self._blocked:
                first_free, ids = self._blocked[slot]
                if positions[index] < first_free:
                    logits[index].index_fill_(0, ids, float("-inf"))
