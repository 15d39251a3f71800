"""How much requests will draw, and how many pages those that run will take at once. Integers, so that ranks agree."""

from __future__ import annotations

from collections.abc import Iterable

from tokenmill.sched.request import Request

ONE = 1 << 16
MAX_START_OUTPUT = 4096
LEARNING_SHIFT = 5
RETRACTION_SHIFT = 3

End = tuple[int, int, int]
"""(tokens that a request will still draw, known tokens less those its pages hold, pages its end makes available)"""


class OutputEstimate:
    """Which share of max_tokens requests draw, learned from those that ended, for each power of two of max_tokens.

    It starts at `share`, of MAX_START_OUTPUT tokens at most. A request that ends moves it by 1/32 of the difference; a
    retraction, which says that it was too low, by 1/8 towards all. A `share` of 1 stays: then no request is ever
    retracted.
    """

    def __init__(self, share: float) -> None:
        self.is_whole = share >= 1
        start = int(share * ONE)
        self._shares = [start if self.is_whole else min(start, start * MAX_START_OUTPUT >> bits) for bits in range(33)]

    def remaining(self, request: Request) -> int:
        """Tokens that a request is expected to draw still: one at least, as long as it may."""
        most = request.num_remaining
        return min(most, max(1, most * self._shares[_size(request)] >> 16))

    def learn(self, request: Request) -> None:
        """A request ended."""
        drawn = request.total_len - request.prompt_len
        if drawn and not self.is_whole:
            share = drawn * ONE // (request.max_len - request.prompt_len)
            self._move(request, share, LEARNING_SHIFT)

    def learn_from_retraction(self, request: Request) -> None:
        """A request gave its pages back to others that drew more than was expected."""
        self._move(request, ONE, RETRACTION_SHIFT)

    def _move(self, request: Request, share: int, shift: int) -> None:
        size = _size(request)
        self._shares[size] += share - self._shares[size] >> shift


class Forecast:
    """The most pages that running requests will take at one time: they draw in step, and end one after another.

    With their remaining outputs sorted from the longest, the first k are those that still run when the k-th ends. Their
    growth until then, less what the others' ends made available, is one cumulative sum; its maximum is the peak (Gong
    et al. 2025, arXiv:2507.10150).
    """

    def __init__(self, page_size: int, *, may_count_on_ends: bool) -> None:
        self._page_size = page_size
        self._may_count_on_ends = may_count_on_ends
        self._ends: list[End] = []
        self._growth = 0
        self._released = 0

    def add(self, ends: Iterable[End]) -> None:
        """Requests that run."""
        for end in ends:
            self._ends.append(end)
            self._growth += self._pages(end[0] + end[1])
            self._released += end[2]

    def has_room(self, end: End, available: int) -> bool:
        """Whether one more request fits `available` pages, beside those that run."""
        if self._growth + self._pages(end[0] + end[1]) <= available:
            return True
        if not self._may_count_on_ends:
            return False
        tokens = 0
        available += self._released + end[2]
        for count, (drawn, uncovered, released) in enumerate(sorted((*self._ends, end), reverse=True), 1):
            tokens += uncovered
            available -= released
            if (tokens + count * (drawn + self._page_size - 1)) // self._page_size > available:
                return False
        return True

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_size)


def _size(request: Request) -> int:
    return (request.max_len - request.prompt_len).bit_length()
