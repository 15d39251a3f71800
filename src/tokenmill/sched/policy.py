"""Queue order and choice of victims, as pure key functions over requests. Smaller keys go first."""

from __future__ import annotations

from tokenmill.sched.request import Request

SMOOTH_PROMPT_TOKENS = 1024


def first_come(request: Request) -> int:
    """Requests run in the order in which they came, also when they were retracted in between."""
    return request.arrival


def newest_first(request: Request) -> int:
    """The request that came last gives its pages back first, so that the oldest always moves on."""
    return -request.arrival


def prompt_budget(most: int, outstanding: int) -> int:
    """Prompt tokens that a step may compute beside decode rows, of `outstanding` that wait, at most `most`.

    Many at once serve a deep queue best; few leave the time between a request's tokens even.
    """
    return min(most, max(SMOOTH_PROMPT_TOKENS, outstanding // 4))
