"""The free list of K/V pages. Called only by ``sched.cache``."""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class PagePool:
    """Pages 0 .. num_pages - 1; the page freed last is handed out first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = array("i", range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages; the caller owns them. There must be as many."""
        if count > len(self._free):
            raise AssertionError(f"{count} pages asked for, {len(self._free)} free")
        at = len(self._free) - count
        taken = self._free[at:].tolist()
        del self._free[at:]
        taken.reverse()
        return taken

    def release(self, pages: Iterable[int]) -> None:
        """Give pages back; the caller owned them."""
        self._free.extend(pages)

    def free_pages(self) -> tuple[int, ...]:
        """The free pages, for checks."""
        return tuple(self._free)
