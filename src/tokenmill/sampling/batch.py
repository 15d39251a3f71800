"""The sampling parameters of every slot, as columns on the device."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tokenmill.sampling.adjust import FORBIDDEN, LAST_RESORT, BadSequences, SlotRows, Upload, penalise
from tokenmill.types import SamplingParams

TOP_K_LIMIT = 1024
NO_LIMIT = 0
COLUMNS = 12  # int32: slot, temperature, two of the seed, top_k, top_p, min_p, is_greedy, three penalties, nothing


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

    def __init__(self, num_slots: int, vocab_size: int, upload: Upload) -> None:
        device = upload(array("i")).device
        self._upload = upload
        self.temperature = torch.ones(num_slots, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.top_p = torch.ones(num_slots, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self.seed = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.is_greedy = torch.ones(num_slots, dtype=torch.int32, device=device)
        self.penalties = torch.zeros(num_slots, 3, device=device)  # repetition, frequency, presence
        self._greedy_slots = [True] * num_slots
        self._filtered_slots: dict[int, bool] = {}  # the slots with filters; whether tokens' order matters to them
        self._bias = SlotRows(vocab_size, torch.float32, upload)
        self._counts = SlotRows(vocab_size, torch.int32, upload)  # see `penalise`
        self._bad: dict[int, BadSequences] = {}
        self._blocked: dict[int, tuple[int, Tensor]] = {}

    def open(self, openings: Sequence[Opening]) -> None:
        """Load requests' parameters into their slots; what was there before is forgotten."""
        if not openings:
            return
        numbers = array("i")
        for opening in openings:
            slot, params = opening.slot, opening.params
            packed = struct.pack(
                "<ifqiffifff4x", slot, 1.0 if params.is_greedy else params.temperature, params.seed or 0,
                max(params.top_k, NO_LIMIT), params.top_p, params.min_p, params.is_greedy,
                params.repetition_penalty, params.frequency_penalty, params.presence_penalty,
            )  # fmt: skip
            numbers.frombytes(packed)
            self._greedy_slots[slot] = params.is_greedy
            self._filtered_slots.pop(slot, None)
            is_ranked = params.top_k > 0 or params.top_p < 1.0
            if not params.is_greedy and (is_ranked or params.min_p > 0.0):
                self._filtered_slots[slot] = is_ranked
            self._open_adjustments(opening)
        rows = self._upload(numbers).view(-1, COLUMNS)
        slots = rows[:, 0].long()
        self.temperature.index_copy_(0, slots, rows[:, 1].contiguous().view(torch.float32))
        self.seed.index_copy_(0, slots, rows[:, 2:4].contiguous().view(torch.int64).flatten())
        self.top_k.index_copy_(0, slots, rows[:, 4])
        self.top_p.index_copy_(0, slots, rows[:, 5].contiguous().view(torch.float32))
        self.min_p.index_copy_(0, slots, rows[:, 6].contiguous().view(torch.float32))
        self.is_greedy.index_copy_(0, slots, rows[:, 7])
        self.penalties.index_copy_(0, slots, rows[:, 8:11].contiguous().view(torch.float32))

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
        if self._bias.has_any(slots) or self._has_history(slots):
            return True
        if self._blocked.keys().isdisjoint(slots):
            return False
        return any(self._is_blocked(slot, position) for slot, position in zip(slots, positions, strict=True))

    def adjust(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Favour and forbid ids and penalise repetition, in place.

        Args:
            logits: [sampled, vocab] float32.
            slots: the slot of each row.
            positions: the position of the token before the one that each row draws.
        """
        if self._bias.has_any(slots):
            places, _, rows = self._bias.find(slots)
            logits.index_add_(0, places, self._bias.take(rows))
        for index, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            if slot in self._bad:
                self._bad[slot].forbid(logits[index])
            if self._is_blocked(slot, position):
                logits[index].index_fill_(0, self._blocked[slot][1], LAST_RESORT)
        if self._counts.has_any(slots):
            places, numbers, rows = self._counts.find(slots)
            repetition, frequency, presence = self.penalties.index_select(0, numbers).T.unsqueeze(2)  # [rows, 1] each
            counts = self._counts.take(rows)
            changed = penalise(logits.index_select(0, places), counts, repetition, frequency, presence)
            logits.index_copy_(0, places, changed)

    def advance(self, drawn: Tensor, slots: Sequence[int]) -> None:
        """Take in the ids [sampled] int64 that were drawn, on the device: later steps look at them."""
        if self._counts.has_any(slots):
            places, _, rows = self._counts.find(slots)
            self._counts.add(rows, drawn.index_select(0, places), 2)
        for index, slot in enumerate(slots) if self._bad else ():
            if slot in self._bad:
                self._bad[slot].append(drawn[index : index + 1])

    def _has_history(self, slots: Sequence[int]) -> bool:
        return self._counts.has_any(slots) or (bool(self._bad) and not self._bad.keys().isdisjoint(slots))

    def _is_blocked(self, slot: int, position: int) -> bool:
        return slot in self._blocked and position < self._blocked[slot][0]

    def _open_adjustments(self, opening: Opening) -> None:
        slot, params, sequences = opening.slot, opening.params, opening.params.bad_sequences
        for kept in (self._bias, self._counts, self._bad, self._blocked):
            kept.pop(slot, None)
        biases = params.logit_bias | {ids[0]: LAST_RESORT for ids in sequences if len(ids) == 1}
        if biases or params.allowed_token_ids is not None:
            self._open_bias(self._bias.open(slot), biases, params.allowed_token_ids)
        history = array("i", opening.history)
        if params.is_penalised:
            counts, ids = self._counts.open(slot), self._upload(history).long()
            counts.index_fill_(0, ids[: opening.prompt_len], 1)
            output = ids[opening.prompt_len :]
            counts.index_add_(0, output, torch.full_like(output, 2, dtype=counts.dtype))
        if longer := [ids for ids in sequences if len(ids) > 1]:
            self._bad[slot] = BadSequences(longer, history[opening.prompt_len :], self._upload)
        if opening.blocked_ids and params.min_tokens:
            blocked = self._upload(array("i", opening.blocked_ids)).long()
            self._blocked[slot] = opening.prompt_len + params.min_tokens - 1, blocked

    def _open_bias(self, row: Tensor, biases: Mapping[int, float], allowed: Sequence[int] | None) -> None:
        if allowed is not None:
            row.fill_(FORBIDDEN).index_fill_(0, self._upload(array("i", allowed)).long(), 0.0)
        bits = array("i")
        bits.frombytes(array("f", biases.values()).tobytes())
        row.index_add_(0, self._upload(array("i", biases)).long(), self._upload(bits).view(torch.float32))
