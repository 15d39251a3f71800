"""What the scheduler hands to the engine and takes back: plain ints and tuples, complete when built."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from tokenmill.errors import InvalidRequest
from tokenmill.types import FinishReason, SamplingParams


class Row(msgspec.Struct, frozen=True, gc=False):
    """One request's part of a step: positions start .. start + length - 1.

    `token_ids` has `length` ids, or is None when the single input is the token that the step before samples
    for this slot ("last sampled"): the engine takes it from its last-token table. `is_sampled` is True when the
    row reaches the request's end, so that its last position draws a token.
    """

    uid: int
    slot: int
    start: int
    length: int
    token_ids: Sequence[int] | None
    is_sampled: bool


@dataclass(frozen=True, slots=True)
class SlotOpening:
    """A request takes a slot: the engine loads its sampling parameters into the slot's columns.

    `blocked_ids` may not be drawn while fewer than `params.min_tokens` tokens are generated;
    `prompt_len` tells how many tokens that is from a position. Where `params.needs_history`, `history` are its tokens
    so far, the prompt's and those drawn before it was retracted, as int32 bytes; else it is empty.
    """

    slot: int
    uid: int
    params: SamplingParams
    prompt_len: int
    blocked_ids: tuple[int, ...]
    history: bytes = b""


@dataclass(frozen=True, slots=True)
class PageUpdate:
    """Entries first .. first + len(pages) - 1 of a slot's row in a kind's page table become `pages`."""

    slot: int
    first: int
    pages: tuple[int, ...]
    kind: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass. The engine applies openings, then page updates, then computes the rows.

    Slots that no row names keep their state; a slot is closed by being opened again. With `is_decode` each row has one
    token and draws one.
    """

    step: int
    rows: tuple[Row, ...]
    openings: tuple[SlotOpening, ...] = ()
    page_updates: tuple[PageUpdate, ...] = ()
    is_decode: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return len(self.rows) if self.is_decode else sum(row.length for row in self.rows)

    def digest(self) -> str:
        """A short hash of everything that decides the step; equal on every rank."""
        numbers = array("q", (self.step, len(self.rows)))
        for row in self.rows:
            numbers.extend((row.uid, row.slot, row.start, row.length, row.is_sampled))
            numbers.extend((-1,) if row.token_ids is None else iter(row.token_ids))
        for opening in self.openings:
            numbers.extend((-2, opening.slot, opening.uid, opening.prompt_len, *opening.blocked_ids))
        for update in self.page_updates:
            numbers.extend((-3, update.kind, update.slot, update.first, *update.pages))
        params = msgspec.msgpack.encode([(opening.params, opening.history) for opening in self.openings])
        return hashlib.blake2b(numbers.tobytes() + params, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Ids drawn in a step, one for each row with `is_sampled`, in the plan's order; and what was asked for, by uid.

    An id is -1 where none could be drawn; `endings` tells for the uid why, or None: its output is complete.
    `logprobs` are those of drawn ids, `prompt_logprobs` those of prompts from a position on, as TokenBatch has them;
    so are `embeddings`.
    """

    step: int
    token_ids: tuple[int, ...]
    logprobs: Mapping[int, bytes] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, tuple[int, bytes]] = field(default_factory=dict)
    embeddings: Mapping[int, bytes] = field(default_factory=dict)
    endings: Mapping[int, InvalidRequest | None] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """What a step brought: (uid, token) drawn, (uid, cached tokens) first admitted, and requests that ended."""

    tokens: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[tuple[int, int]] = field(default_factory=list)
    finished: list[Ending] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a request ended; `token` is the id that stopped it, if one did, and `is_end_id` if it was the model's own.

    With FinishReason.ERROR, `error` tells what was wrong with the request.
    """

    uid: int
    reason: FinishReason
    token: int | None = None
    is_end_id: bool = False
    error: InvalidRequest | None = None


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    retractions: int = 0
