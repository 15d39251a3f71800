"""How much requests will draw, and how many pages those that run will take at once. Integers, so that ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tokenmill.sched.request import Request
from tokenmill.sched.windows import Lease

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
        self.shares = [start if self.is_whole else min(start, start * MAX_START_OUTPUT >> bits) for bits in range(33)]

    def remaining(self, request: Request) -> int:
        """Tokens that a request is expected to draw still: one at least, as long as it may."""
        most = request.num_remaining
        return most * self.shares[_size(request)] >> 16 or min(1, most)

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
        self.shares[size] += share - self.shares[size] >> shift


class Forecast:
    """Pages that running requests will take beside those they hold, and one that waits. For one step."""

    def __init__(self, page_size: int, estimate: OutputEstimate, num_released: Callable[[Lease], int]) -> None:
        self._page_size = page_size
        self._estimate = estimate
        self._num_released = num_released
        self._growth = 0
        self._new: list[tuple[int, int, Lease]] = []
        self._ends: list[End] = []

    def add(self, requests: Iterable[Request]) -> None:
        """Requests that run."""
        size, shares, growth = self._page_size, self._estimate.shares, self._growth
        for request in requests:
            known = len(request.token_ids) + request.num_pending
            most = request.max_len - known
            drawn = most * shares[(request.max_len - request.prompt_len).bit_length()] >> 16 or min(1, most)
            uncovered = known - len(request.lease.pages) * size
            growth -= -(drawn + uncovered) // size
            self._new.append((drawn, uncovered, request.lease))
        self._growth = growth

    def has_room(self, request: Request, hit: int, from_available: int, available: int) -> bool:
        """Whether a request with a hit of `hit` tokens, in `from_available` of the `available` pages, finds room."""
        drawn, uncovered = self._estimate.remaining(request), request.total_len - hit
        available -= from_available
        if self._growth - -(drawn + uncovered) // self._page_size <= available:
            return True  # even if none of them ended before all had drawn their last
        if self._estimate.is_whole:
            return False
        self._ends += [(drawn, uncovered, self._num_released(lease)) for drawn, uncovered, lease in self._new]
        self._ends.sort(reverse=True)
        self._new.clear()
        return peak_fits([*self._ends, (drawn, uncovered, from_available)], self._page_size, available)


def _size(request: Request) -> int:
    return (request.max_len - request.prompt_len).bit_length()


def peak_fits(ends: Iterable[End], page_size: int, available: int) -> bool:
    """Whether `available` pages suffice for requests that draw in step and end one after another.

    With their remaining outputs sorted from the longest, the first k are those that still run when the k-th ends. Their
    growth until then, less what the others' ends made available, is one cumulative sum, whose maximum is the peak (Gong
    et al. 2025, arXiv:2507.10150).
    """
    ordered = sorted(ends, reverse=True)
    available += sum([released for _, _, released in ordered])
    tokens = 0
    for count, (drawn, uncovered, released) in enumerate(ordered, 1):
        tokens += uncovered
        available -= released
        if (tokens + count * (drawn + page_size - 1)) // page_size > available:
            return False
    return True
