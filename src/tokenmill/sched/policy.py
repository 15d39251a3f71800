"""How requests are ordered, and how a step's prompt tokens are shared out: pure functions over read-only views."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

SMOOTH_PROMPT_TOKENS = 1024

Key = float | tuple[float, ...]


class RequestView(Protocol):
    """What a policy may read of a request."""

    @property
    def uid(self) -> int:
        """Its id."""

    @property
    def arrival(self) -> int:
        """How many requests had come when it came: a number of its own."""

    @property
    def prompt_len(self) -> int:
        """Tokens of its prompt."""

    @property
    def total_len(self) -> int:
        """Prompt and generated tokens known so far."""

    @property
    def computed_len(self) -> int:
        """Tokens whose K/V is computed; 0 while it waits."""

    @property
    def max_len(self) -> int:
        """Prompt and the most that it may generate."""

    @property
    def hit_len(self) -> int:
        """Tokens that the prefix cache holds of it, as last looked up while it waits, or held when it was admitted."""

    @property
    def num_remaining(self) -> int:
        """Tokens that it may still draw."""

    @property
    def priority(self) -> int:
        """Larger is more important."""

    @property
    def deadline(self) -> int | None:
        """When it must have ended, in milliseconds on the clock of QueueView.now."""

    @property
    def tenant(self) -> str:
        """Whose request it is; empty if nobody's."""


class QueueView(Protocol):
    """What a policy may read beside a request."""

    @property
    def now(self) -> int:
        """The time of this plan, in milliseconds."""

    def served(self, tenant: str) -> int:
        """Tokens computed for a tenant, those that its running requests are expected to take included."""


Order = Callable[[RequestView, QueueView], Key]


def first_come(request: RequestView, queue: QueueView) -> Key:
    """All keys are equal: requests run in the order in which they came."""
    return 0


def longest_prefix(request: RequestView, queue: QueueView) -> Key:
    """The request with the longest hit first, so that what is cached is used before it is forgotten."""
    return -request.hit_len


def highest_priority(request: RequestView, queue: QueueView) -> Key:
    """The highest priority first."""
    return -request.priority


def earliest_deadline(request: RequestView, queue: QueueView) -> Key:
    """The earliest deadline first; requests without one come last."""
    return math.inf if request.deadline is None else request.deadline


def shortest_remaining(request: RequestView, queue: QueueView) -> Key:
    """The request with the fewest tokens left to compute first, its whole output counted."""
    return request.max_len - request.computed_len


def fair_share(request: RequestView, queue: QueueView) -> Key:
    """The tenant that was served the fewest tokens first (Sheng et al. 2024, arXiv:2401.00588)."""
    return queue.served(request.tenant)


@dataclass(frozen=True, slots=True)
class Policy:
    """Two orders: smaller keys go first, equal ones by arrival.

    `order` is that of waiting requests. It is asked once, when a request enters the queue, if `is_static`; otherwise
    whenever one can be admitted, of the queue's first few (see ``sched.queue``), or `by_tenant` of each tenant's first.

    `keep` is the order in which running requests keep their pages and are given prompt tokens: the last in it is the
    first to be retracted. It is asked once, when a request comes. For if it could change, two requests might retract
    each other for ever; so the first of those that run always moves on.
    """

    order: Order
    keep: Order = first_come
    is_static: bool = False
    by_tenant: bool = False


POLICIES: Mapping[str, Policy] = {
    "fcfs": Policy(first_come, is_static=True),
    "longest-prefix": Policy(longest_prefix),
    "priority": Policy(highest_priority, highest_priority, is_static=True),
    "deadline": Policy(earliest_deadline, earliest_deadline, is_static=True),
    "shortest": Policy(shortest_remaining, shortest_remaining, is_static=True),
    "fair": Policy(fair_share, by_tenant=True),
}


def prompt_budget(most: int, outstanding: int) -> int:
    """Prompt tokens that a step may compute beside decode rows, of `outstanding` that wait, at most `most`.

    Many at once serve a deep queue best; few leave the time between a request's tokens even.
    """
    return min(most, max(SMOOTH_PROMPT_TOKENS, outstanding // 4))


def chunk_length(left: int, budget: int, needed: int, *, is_contended: bool) -> int:
    """Prompt tokens for the next prompt of a step, of `left` that are left of the step's `budget`.

    While others wait, a prompt that outlasts a whole step takes half of what is left, so that short ones pass it.
    """
    return min(needed, left - left // 2 if is_contended and needed > budget else left)


def shared_gain(page_size: int, prompt_budget: int) -> int:
    """Prompt tokens, in whole pages, that another request must be about to compute to be worth waiting for.

    The wait is a step or two, so this is what a step's fixed costs could have computed. The budget is chosen by the
    device's speed, and its 32nd part is about as much.
    """
    return -(-max(page_size, prompt_budget // 32) // page_size) * page_size
