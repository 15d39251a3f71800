"""The sampling parameters of every slot, as columns on the device."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tokenmill.types import SamplingParams

TOP_K_LIMIT = 1024
NO_LIMIT = 0
COLUMNS = 8  # slot, temperature, top_k, top_p, min_p, is_greedy as int32; seed as two

Upload = Callable[["array[int]"], Tensor]  # int32 numbers to a tensor on the device


class Opening(NamedTuple):
    """A request that takes a slot; `history` are its tokens so far as int32 bytes if its parameters need them."""

    slot: int
    params: SamplingParams
    prompt_len: int
    blocked_ids: tuple[int, ...]
    history: bytes = b""


class SamplingTable:
    """One row a slot; `open` writes it when a request takes the slot. Written only by the engine.

    `upload` brings int32 numbers to the device in one copy that nothing waits for.
    """

    def __init__(self, num_slots: int, upload: Upload) -> None:
        device = upload(array("i")).device
        self._upload = upload
        self.temperature = torch.ones(num_slots, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.top_p = torch.ones(num_slots, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self.seed = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.is_greedy = torch.ones(num_slots, dtype=torch.int32, device=device)
        self._greedy_slots = [True] * num_slots
        self._filtered_slots: dict[int, bool] = {}  # the slots with filters; whether tokens' order matters to them
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}
        self._blocked: dict[int, tuple[int, Tensor]] = {}

    def open(self, openings: Sequence[Opening]) -> None:
        """Load requests' parameters into their slots; what was there before is forgotten."""
        if not openings:
            return
        numbers = array("i")
        for slot, params, prompt_len, blocked_ids, _ in openings:
            packed = struct.pack(
                "<ififfiq", slot, 1.0 if params.is_greedy else params.temperature, max(params.top_k, NO_LIMIT),
                params.top_p, params.min_p, params.is_greedy, params.seed or 0,
            )  # fmt: skip
            numbers.frombytes(packed)
            self._greedy_slots[slot] = params.is_greedy
            self._filtered_slots.pop(slot, None)
            is_ranked = params.top_k > 0 or params.top_p < 1.0
            if not params.is_greedy and (is_ranked or params.min_p > 0.0):
                self._filtered_slots[slot] = is_ranked
            self._open_sparse(slot, params, prompt_len, blocked_ids)
        rows = self._upload(numbers).view(-1, COLUMNS)
        slots = rows[:, 0].long()
        self.temperature.index_copy_(0, slots, rows[:, 1].contiguous().view(torch.float32))
        self.top_k.index_copy_(0, slots, rows[:, 2])
        self.top_p.index_copy_(0, slots, rows[:, 3].contiguous().view(torch.float32))
        self.min_p.index_copy_(0, slots, rows[:, 4].contiguous().view(torch.float32))
        self.is_greedy.index_copy_(0, slots, rows[:, 5])
        self.seed.index_copy_(0, slots, rows[:, 6:].contiguous().view(torch.int64).flatten())

    def is_greedy_slot(self, slot: int) -> bool:
        """Whether the slot takes the likeliest token."""
        return self._greedy_slots[slot]

    def is_filtered_slot(self, slot: int) -> bool:
        """Whether the slot draws and needs its tokens in order of probability (top_k or top_p)."""
        return self._filtered_slots.get(slot, False)

    def needs_filters(self, slots: Iterable[int]) -> bool:
        """Whether any of these slots draws with top_k, top_p or min_p."""
        return bool(self._filtered_slots) and not self._filtered_slots.keys().isdisjoint(slots)

    def needs_adjusting(self, slots: Sequence[int], positions: Sequence[int]) -> bool:
        """Whether `adjust` has anything to do for these rows."""
        if not self._bias.keys().isdisjoint(slots):
            return True
        if self._blocked.keys().isdisjoint(slots):
            return False
        return any(self._is_blocked(slot, position) for slot, position in zip(slots, positions, strict=True))

    def adjust(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Add biases and forbid early ends, in place.

        Args:
            logits: [sampled, vocab] float32.
            slots: the slot of each row.
            positions: the position of the token before the one that each row draws.
        """
        for index, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            if slot in self._bias:
                ids, values = self._bias[slot]
                logits[index].index_add_(0, ids, values)
            if self._is_blocked(slot, position):
                logits[index].index_fill_(0, self._blocked[slot][1], float("-inf"))

    def _is_blocked(self, slot: int, position: int) -> bool:
        return slot in self._blocked and position < self._blocked[slot][0]

    def _open_sparse(self, slot: int, params: SamplingParams, prompt_len: int, blocked_ids: tuple[int, ...]) -> None:
        self._bias.pop(slot, None)
        self._blocked.pop(slot, None)
        if params.logit_bias:
            values = array("f", params.logit_bias.values())
            bits = array("i")
            bits.frombytes(values.tobytes())
            ids = self._upload(array("i", params.logit_bias)).long()
            self._bias[slot] = ids, self._upload(bits).view(torch.float32)
        if blocked_ids and params.min_tokens:
            self._blocked[slot] = prompt_len + params.min_tokens - 1, self._upload(array("i", blocked_ids)).long()
