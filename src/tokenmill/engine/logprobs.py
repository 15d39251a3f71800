"""Which logprobs a step must give: known on the host when the step is launched, and found again in what comes back."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.sampling.logprobs import record_width
from tokenmill.sched.plan import Row, SlotOpening


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
class Wanted:
    """The logprobs of a step. What comes back: `num_drawn` ids, then records of `drawn`, then of `scored`."""

    num_drawn: int
    drawn: Sequence[Drawn]
    scored: Sequence[Scored]

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

    def split(self, numbers: list[int]) -> tuple[dict[int, bytes], dict[int, tuple[int, bytes]]]:
        """By uid: the record of a drawn token; and first position and records of a prompt's tokens. As int32 bytes."""
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
        return drawn, scored


class LogprobBook:
    """Which slots' requests ask for logprobs. Used where steps are launched, in their order."""

    def __init__(self) -> None:
        self._drawn: dict[int, int] = {}
        self._prompts: dict[int, tuple[array[int], int]] = {}

    def open(self, openings: Sequence[SlotOpening]) -> None:
        """Requests take slots. A prompt that was computed before a retraction is not scored again."""
        for opening in openings:
            params, slot = opening.params, opening.slot
            self._drawn.pop(slot, None)
            self._prompts.pop(slot, None)
            if params.logprobs is not None:
                self._drawn[slot] = params.logprobs
            if params.prompt_logprobs is not None:
                prompt = array("i", opening.history)
                if len(prompt) == opening.prompt_len:
                    self._prompts[slot] = prompt, params.prompt_logprobs

    def look_up(self, rows: Sequence[Row]) -> Wanted | None:
        """What these rows must give; None: nothing but ids."""
        if not self._drawn and not self._prompts:
            return None
        drawn, scored, num_drawn, start = [], [], 0, 0
        for row in rows:
            if row.is_sampled and row.slot in self._drawn:
                drawn.append(Drawn(row.uid, num_drawn, self._drawn[row.slot]))
            if row.slot in self._prompts:
                prompt, top = self._prompts[row.slot]
                if targets := prompt[row.start + 1 : row.start + row.length + 1]:
                    scored.append(Scored(row.uid, row.start + 1, targets, start, top))
                if row.start + row.length >= len(prompt):
                    del self._prompts[row.slot]
            num_drawn += row.is_sampled
            start += row.length
        return Wanted(num_drawn, drawn, scored) if drawn or scored else None
