"""What a step must give beside ids: known on the host when it is launched, and found again in what comes back."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.sampling.logprobs import record_width
from tokenmill.sched.plan import Row, SlotOpening
from tokenmill.types import Pooling

Extras = tuple[dict[int, bytes], dict[int, tuple[int, bytes]], dict[int, bytes]]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The token that a row draws. `place` is the row's among those that draw."""

    uid: int
    place: int
    top: int


@dataclass(frozen=True, slots=True)
class Scored:
    """Tokens of a prompt, from position `first` on; `at` tells which of the step's tokens comes before the first."""

    uid: int
    first: int
    token_ids: array[int]
    at: int
    top: int


@dataclass(frozen=True, slots=True)
class Pooled:
    """Tokens of a prompt whose states go into its embedding: from the step's token `at` on; `is_last` ends it.

    `num_before` tokens of the prompt were in the steps before.
    """

    uid: int
    slot: int
    at: int
    length: int
    num_before: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a step gives: `num_drawn` ids, then records of `drawn`, then of `scored`, then the embeddings that end."""

    num_drawn: int
    drawn: Sequence[Drawn]
    scored: Sequence[Scored]
    pooled: Sequence[Pooled]

    @property
    def needs_states(self) -> bool:
        """Whether tokens are looked at that draw nothing."""
        return bool(self.scored or self.pooled)

    @property
    def drawn_top(self) -> int:
        """The likeliest tokens in each record of a drawn one."""
        return max((its.top for its in self.drawn), default=0)

    @property
    def scored_top(self) -> int:
        """The likeliest tokens in each record of a prompt's."""
        return max((its.top for its in self.scored), default=0)

    def targets(self) -> tuple[array[int], array[int]]:
        """Of the prompts' tokens that are scored: which of the step's tokens comes before each, and their ids."""
        at, token_ids = array("i"), array("i")
        for part in self.scored:
            at.extend(range(part.at, part.at + len(part.token_ids)))
            token_ids += part.token_ids
        return at, token_ids

    def pooled_places(self) -> array[int]:
        """Which of the step's tokens go into embeddings."""
        return array("i", [place for part in self.pooled for place in range(part.at, part.at + part.length)])

    def split(self, numbers: list[int]) -> Extras:
        """By uid: the record of a drawn token; first position and records of a prompt's tokens; an embedding.

        All as bytes of four a number.
        """
        drawn, scored, start = {}, {}, self.num_drawn
        width = record_width(self.drawn_top)
        for row in self.drawn:
            drawn[row.uid] = array("i", numbers[start : start + record_width(row.top)]).tobytes()
            start += width
        width = record_width(self.scored_top)
        for part in self.scored:
            records = array("i")
            for _ in part.token_ids:
                records.extend(numbers[start : start + record_width(part.top)])
                start += width
            scored[part.uid] = part.first, records.tobytes()
        ending = [its.uid for its in self.pooled if its.is_last]
        width = (len(numbers) - start) // max(len(ending), 1)
        vectors = [array("i", numbers[at : at + width]).tobytes() for at in range(start, len(numbers), width or 1)]
        return drawn, scored, dict(zip(ending, vectors, strict=True))


class Pools:
    """The sum so far of the states that go into each slot's embedding, on the device; used in the order of steps."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    def add(self, part: Pooled, states: Tensor) -> Tensor | None:
        """Take in states [length, hidden]; the embedding [hidden] float32, of length 1, when it is whole."""
        total = states.sum(0, dtype=torch.float32)
        if part.num_before:
            total += self._sums[part.slot]
        if part.is_last:
            self._sums.pop(part.slot, None)
            return torch.nn.functional.normalize(total, dim=0)
        self._sums[part.slot] = total
        return None


class WishBook:
    """Which slots' requests ask for more than ids. Used where steps are launched, in their order."""

    def __init__(self) -> None:
        self._drawn: dict[int, int] = {}
        self._prompts: dict[int, tuple[array[int], int]] = {}
        self._poolings: dict[int, Pooling] = {}

    def open(self, openings: Sequence[SlotOpening]) -> None:
        """Requests take slots. A prompt that was computed before a retraction is not scored again."""
        for opening in openings:
            params, slot = opening.params, opening.slot
            self._drawn.pop(slot, None)
            self._prompts.pop(slot, None)
            self._poolings.pop(slot, None)
            if params.pooling is not None:
                self._poolings[slot] = params.pooling
            if params.logprobs is not None:
                self._drawn[slot] = params.logprobs
            if params.prompt_logprobs is not None:
                prompt = array("i", opening.history)
                if len(prompt) == opening.prompt_len:
                    self._prompts[slot] = prompt, params.prompt_logprobs

    def look_up(self, rows: Sequence[Row]) -> Wanted | None:
        """What these rows must give; None: nothing but ids."""
        if not self._drawn and not self._prompts and not self._poolings:
            return None
        drawn, scored, pooled, num_drawn, start = [], [], [], 0, 0
        for row in rows:
            if row.is_sampled and row.slot in self._drawn:
                drawn.append(Drawn(row.uid, num_drawn, self._drawn[row.slot]))
            if row.slot in self._prompts:
                prompt, top = self._prompts[row.slot]
                if targets := prompt[row.start + 1 : row.start + row.length + 1]:
                    scored.append(Scored(row.uid, row.start + 1, targets, start, top))
                if row.start + row.length >= len(prompt):
                    del self._prompts[row.slot]
            if pooling := self._poolings.get(row.slot):
                if pooling == "mean":
                    pooled.append(Pooled(row.uid, row.slot, start, row.length, row.start, row.is_sampled))
                elif row.is_sampled:
                    pooled.append(Pooled(row.uid, row.slot, start + row.length - 1, 1, 0, True))
                if row.is_sampled:
                    del self._poolings[row.slot]
            num_drawn += row.is_sampled
            start += row.length
        return Wanted(num_drawn, drawn, scored, pooled) if drawn or scored or pooled else None
