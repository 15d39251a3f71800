"""Masks of what grammars allow: matchers on the host follow the drawn ids, and the device forbids the others."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from tokenmill.errors import InvalidRequest
from tokenmill.sampling.adjust import FORBIDDEN, Upload
from tokenmill.sampling.batch import Opening
from tokenmill.types import StructuredOutputs

NO_ID = -1  # in place of an id, where there is none to draw
NOTHING_LEFT = "the grammar and allowed_token_ids leave no token that could come next"


class Matcher(Protocol):
    """The state of a grammar behind a request's output so far."""

    def consume_tokens(self, sampled_tokens: list[int], /) -> bool:
        """Go on by these ids; False: one of them was not allowed, or a limit is passed."""

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int, /) -> None:
        """Write one bit an id: whether it may come next."""

    def is_error(self) -> bool:
        """Whether nothing more can be told."""

    def get_error(self) -> str:
        """Why."""


class MatcherSource(Protocol):
    """Where matchers come from. They know the ids of the model's vocabulary and a spare one behind them."""

    @property
    def end_ids(self) -> Sequence[int]:
        """Those that end an output, perhaps the spare one; known when the first matcher is made."""

    def make(self, wanted: StructuredOutputs, worn: object = None, /) -> tuple[Matcher, object]:
        """One at its beginning, and what it shares with others of its grammar: not `worn`, if that is given."""


class Fetched(Protocol):
    """Numbers on their way from the device."""

    def wait(self) -> list[int]:
        """Block until they are there."""


Apply = Callable[[Tensor, Tensor, Tensor], Tensor]  # see `apply_masks`


@dataclass(slots=True)
class _Slot:
    """A matcher and what it is made of: what it shares with others may be worn out by them, and is then replaced.

    With `has_ended`, its request drew an end id: what steps in flight draw for it is of no use.
    """

    matcher: Matcher
    shared: object
    wanted: StructuredOutputs
    avoids_ends: bool
    ids: list[int]  # that the matcher has gone on by
    has_ended: bool = False


class GrammarTable:
    """The matchers of slots. Used only where the device's work is queued, in the order of the steps.

    A step's mask waits for the ids of the step before, which `fetch` brings to the host; meanwhile the device computes
    what was queued ahead of the mask.
    """

    def __init__(
        self,
        vocab_size: int,
        upload: Upload,
        fetch: Callable[[Tensor], Fetched],
        source: MatcherSource | None,
        apply: Apply | None = None,
    ) -> None:
        self._apply = apply or apply_masks
        self._num_words = -(-(vocab_size + 1) // 32)
        self._upload, self._fetch, self._source = upload, fetch, source
        self._slots: dict[int, _Slot] = {}
        self._drawn: tuple[Fetched, list[tuple[int, _Slot]]] | None = None  # not looked at yet
        self._verdicts: dict[int, InvalidRequest | None] = {}

    def open(self, openings: Iterable[Opening]) -> None:
        """Requests take slots; what was there before is forgotten."""
        for slot, params, prompt_len, _, history in openings:
            self._slots.pop(slot, None)
            self._verdicts.pop(slot, None)
            if params.structured_outputs is not None:
                assert self._source is not None, "an engine without grammars is given none"
                matcher, shared = self._source.make(params.structured_outputs)
                ids = array("i", history)[prompt_len:].tolist()
                matcher.consume_tokens(ids)
                self._slots[slot] = _Slot(matcher, shared, params.structured_outputs, params.ignore_eos, ids)

    def has_any(self, slots: Iterable[int]) -> bool:
        """Whether any of these slots has a grammar."""
        return bool(self._slots) and not self._slots.keys().isdisjoint(slots)

    def verdict(self, slot: int) -> InvalidRequest | None:
        """Why a step had no id for the slot; None: its output is complete. Stays until the slot is opened again."""
        param = self._slots[slot].wanted.param if slot in self._slots else None
        return self._verdicts.get(slot, InvalidRequest(NOTHING_LEFT, param))

    def mask(self, logits: Tensor, slots: Sequence[int]) -> Tensor:
        """Forbid in place what the grammars do not allow, except in rows where nothing is left.

        Args:
            logits: [sampled, vocab] float32.
            slots: the slot of each row.

        Returns:
            [sampled] bool: the rows where nothing is left.
        """
        if self._drawn is not None:
            self._follow(*self._drawn)
            self._drawn = None
        places = [place for place, _ in self._find(slots)]
        masks = array("i", bytes(4 * self._num_words * len(places)))
        start, length = masks.buffer_info()[0], 4 * self._num_words
        bits = memoryview(masks).cast("B")
        for index, place in enumerate(places):
            self._fill(slots[place], bits[index * length :][:length], start + index * length)
        numbers = self._upload(array("i", places) + masks)
        rows = numbers[: len(places)].long()
        return self._apply(logits, rows, numbers[len(places) :].view(len(places), self._num_words))

    def advance(self, drawn: Tensor, slots: Sequence[int]) -> None:
        """Take in the ids [sampled] int64 that were drawn, or NO_ID, on the device."""
        self._drawn = self._fetch(drawn), self._find(slots)

    def _find(self, slots: Sequence[int]) -> list[tuple[int, _Slot]]:
        return [(place, its) for place, its in enumerate(map(self._slots.get, slots)) if its and not its.has_ended]

    def _follow(self, fetched: Fetched, followers: list[tuple[int, _Slot]]) -> None:
        assert self._source is not None
        ids = fetched.wait()
        for place, its in followers:
            if ids[place] != NO_ID:
                its.ids.append(ids[place])
                its.matcher.consume_tokens([ids[place]])
                its.has_ended = its.has_ended or ids[place] in self._source.end_ids

    def _fill(self, slot: int, mask: memoryview, address: int) -> None:
        """Write the slot's mask; without end ids where they are to be avoided and something else may come."""
        assert self._source is not None
        its = self._slots[slot]
        its.matcher.unsafe_compute_mask_ptr(address, len(mask))
        if its.matcher.is_error():
            its.matcher, its.shared = self._source.make(its.wanted, its.shared)
            its.matcher.consume_tokens(its.ids)
            its.matcher.unsafe_compute_mask_ptr(address, len(mask))
        if its.matcher.is_error():
            mask[:] = bytes(len(mask))
            words = its.matcher.get_error().partition("\n")[0]
            param = its.wanted.param
            error = InvalidRequest(f"{param}: the grammar cannot be followed further: {words}", param)
            self._verdicts.setdefault(slot, error)
            return
        ends = [end for end in self._source.end_ids if mask[end >> 3] >> (end & 7) & 1]
        if ends:
            others = bytearray(mask)
            for end in ends:
                others[end >> 3] &= ~(1 << (end & 7))
            if not any(others):
                self._verdicts.setdefault(slot, None)
            elif its.avoids_ends:
                mask[:] = others


def apply_masks(logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
    """See `GrammarTable.mask`.

    Args:
        logits: [sampled, vocab] float32.
        rows: [masked] int64, which of them; all in their order, or some.
        masks: [masked, words] int32, bit i % 32 of word i // 32 for id i.
    """
    octets = masks.view(torch.uint8).flatten().int()
    most = _octet_bounds(logits.device).index_select(0, octets).view(len(rows), 32 * masks.shape[1])
    is_whole = len(rows) == len(logits)
    masked = logits if is_whole else logits.index_select(0, rows)
    torch.minimum(masked, most[:, : logits.shape[1]], out=masked)
    is_dead = masked.amax(dim=1) == FORBIDDEN
    # Rows without any id are drawn from as well: with equal numbers, that no sampler stumbles over.
    torch.maximum(masked, torch.where(is_dead, 0.0, FORBIDDEN).unsqueeze(1), out=masked)
    if is_whole:
        return is_dead
    logits.index_copy_(0, rows, masked)
    return torch.zeros(len(logits), dtype=torch.bool, device=logits.device).index_copy_(0, rows, is_dead)


@cache
def _octet_bounds(device: torch.device) -> Tensor:
    """What a logit may be at most, [256, 8] float32: FORBIDDEN where an octet of a mask lacks the id's bit."""
    octets, bits = (torch.arange(count, device=device) for count in (256, 8))
    return torch.full((256, 8), torch.inf, device=device).masked_fill((octets.unsqueeze(1) >> bits) & 1 == 0, FORBIDDEN)
