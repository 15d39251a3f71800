"""One request as the scheduler keeps it. Written only by ``sched.scheduler``."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field
from typing import Any

from tokenmill.sched.windows import Lease
from tokenmill.types import SamplingParams

SCORED_AT_ONCE = 512  # tokens of a prompt


class Status(enum.Enum):
    """Where a request is. RETRACTING waits for its steps in flight before it is WAITING again."""

    WAITING = "waiting"
    RUNNING = "running"
    RETRACTING = "retracting"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and what was generated from it. All lengths are in tokens.

    `cached_len` is what the prefix cache gave at the first admission; `computed_len` counts K/V in the pool once the
    steps in flight are done; `num_in_flight` are steps planned and not committed that name the request, of which
    `num_pending` draw a token. Drawing one of `stop_ids` ends it: the model's `end_ids` and those that its
    parameters add. `deadline` is in milliseconds on the clock of `Scheduler.plan`, `tenant` whose request it is.

    For policies: `place` is its key in the queue, `rank` that among running requests (numbers, or tuples of them), and
    `charged` what its tenant has paid.
    While `leader`, a running request, computes the tokens up to `held_until`, this one waits for them.
    """

    uid: int
    token_ids: array[int]
    prompt_len: int
    max_len: int
    params: SamplingParams
    end_ids: frozenset[int]
    salt: str = ""
    priority: int = 0
    deadline: int | None = None
    tenant: str = ""
    status: Status = Status.WAITING
    arrival: int = 0
    slot: int = -1
    lease: Lease = field(default_factory=lambda: Lease(""))
    cached_len: int = -1
    computed_len: int = 0
    hit_len: int = 0
    num_in_flight: int = 0
    num_pending: int = 0
    place: Any = 0
    rank: Any = 0
    charged: int = 0
    leader: int = -1
    held_until: int = 0
    stop_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.stop_ids = self.end_ids.union(self.params.stop_token_ids)

    @property
    def total_len(self) -> int:
        """Prompt and generated tokens known so far."""
        return len(self.token_ids)

    @property
    def is_scored(self) -> bool:
        """Whether logprobs of the prompt are asked for, and not all computed."""
        return self.params.prompt_logprobs is not None and len(self.token_ids) == self.prompt_len

    @property
    def prefix_ids(self) -> bytes:
        """What a prefix may be found of in the cache: nothing of a prompt that must be computed whole."""
        is_new = self.params.needs_whole_prompt and len(self.token_ids) == self.prompt_len
        return b"" if is_new else self.token_ids.tobytes()

    @property
    def longest_row(self) -> int:
        """Most tokens of it in a step: logprobs of many would keep others' steps and texts waiting."""
        return SCORED_AT_ONCE if self.is_scored else len(self.token_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens that it may still draw."""
        return self.max_len - len(self.token_ids) - self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens, known or being drawn, that need K/V before the next one can be drawn."""
        return len(self.token_ids) + self.num_pending - self.computed_len


def seniority(request: Request) -> tuple[Any, int]:
    """The order of running requests: the last gives its pages back first."""
    return request.rank, request.arrival
