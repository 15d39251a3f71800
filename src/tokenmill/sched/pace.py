"""How fast a server is when it has more to do than it can do at once."""

from __future__ import annotations

LEAST_WINDOW = 500  # milliseconds


class Pace:
    """Counts tokens computed while requests wait. In integers, from times that all ranks are given, so that they agree.

    `rate` is in tokens a second, prompts and outputs together; 0 while it is not known. It is the most of late, and
    sinks slowly, for what it is used to refuse must be sure to come too late.
    """

    def __init__(self) -> None:
        self.rate = 0
        self._since = 0
        self._is_busy = False
        self._window = 0
        self._tokens = 0

    def planned(self, tokens: int, now: int, *, is_busy: bool) -> None:
        """At time `now` a step of so many tokens was planned, while requests wait or not."""
        if self._is_busy:
            self._window += now - self._since
        if self._window >= LEAST_WINDOW:
            self.rate = max(1000 * self._tokens // self._window, self.rate * 15 // 16)
            self._window = self._tokens = 0
        self._since, self._is_busy = now, is_busy
        self._tokens += tokens if is_busy else 0
