"""The prefix tree of models that have layers with a window: its nodes hold pages of these too, until they are evicted.

A node's `window` are the window pages of its last pages: those before them were left behind by the request that
computed them, or evicted. A prefix can be used where the last pages before its end, as many as the next token
attends to, have their window pages. A running request locks those that it still attends to, and no more. Others are
evicted while their node is in use, each node's first pages first, nodes in the order of the eviction policy.
"""

from __future__ import annotations

import heapq
from array import array

from tokenmill.config import Eviction
from tokenmill.sched.radix import Node, RadixTree

SPARE_ENTRIES = 64  # of the queue, beside two a page


class WindowTree(RadixTree):
    """A `RadixTree` for a window of so many tokens. `lost` are window pages that fell out of it: the caller's."""

    def __init__(self, page_size: int, eviction: Eviction, window: int) -> None:
        super().__init__(page_size, eviction)
        self.num_needed = -(-(window - 1) // page_size)  # pages that a token behind a page border attends to
        self.num_window_pages = 0
        self.num_window_evictable = 0
        self.lost: list[int] = []
        self._window_queue: list[tuple[tuple[int, ...], int, Node]] = []

    def walk(self, token_ids: bytes, end: int, salt: str) -> list[tuple[Node, int]]:
        """See `RadixTree.walk`; up to where the prefix can be used."""
        found, best, stop, first = super().walk(token_ids, end, salt), 0, 0, 0
        for number, (node, count) in enumerate(found, 1):
            if len(node.window) < len(node.pages):
                first = stop + len(node.pages) - len(node.window)  # from where on pages have window pages
            stop += count
            if not first or not self.num_needed or stop - first >= self.num_needed:
                best = number
        return found[:best]

    def lock(self, token_ids: bytes, end: int, salt: str, priority: int) -> tuple[Node, list[int]]:
        """See `RadixTree.lock`; of what can be used."""
        end = self._page_bytes * sum(count for _, count in self.walk(token_ids, end, salt))
        return super().lock(token_ids, end, salt, priority)

    def hold(self, node: Node, count: int) -> list[int]:
        """Lock the window pages of the last `count` pages of the prefix that ends at `node`, and return them."""
        pages: list[int] = []
        while count:
            if count < len(node.pages):
                self._split(node, len(node.pages) - count)
            if not node.window_locks:
                self.num_window_evictable -= len(node.window)
            node.window_locks += 1
            pages[:0] = node.window
            count -= len(node.pages)
            node = _parent(node)
        return pages

    def let_go(self, node: Node, count: int) -> None:
        """Undo a `hold`. Whatever was split since then, nodes begin where it began."""
        while count:
            node.window_locks -= 1
            if not node.window_locks:
                self.num_window_evictable += len(node.window)
                self._queue_window(node)
            count -= len(node.pages)
            node = _parent(node)

    def give(self, node: Node, window: list[int], low: int, end: int) -> list[int]:
        """Take a request's own window pages low .. end - 1 where the tree has none.

        `node` ends the prefix of `end` pages. In `window`, the tree's pages take the place of those that it had, which
        are returned: they stay the caller's.
        """
        duplicates: list[int] = []
        while end > low:
            first, held = max(end - len(node.pages), low), end - len(node.window)
            if first < held:
                self._set_window(node, array("i", window[first:held]) + node.window)
            else:
                held = first
            duplicates += window[held:end]
            window[held:end] = node.window[len(node.window) - (end - held) :]
            end -= len(node.pages)
            node = _parent(node)
        return duplicates

    def evict_windows(self, count: int) -> None:
        """Lose up to `count` window pages that are not locked."""
        queue = self._window_queue
        while count > 0 and queue:
            key, _, node = queue[0]
            if node.window_locks or not node.window:
                heapq.heappop(queue)
                node.is_window_queued = False
            elif key != self._eviction_key(node):
                heapq.heapreplace(queue, self._window_entry(node))
            else:
                lost = min(count, len(node.window))
                self._lose(node, 0, lost)
                count -= lost

    def _split(self, node: Node, count: int) -> Node:
        upper = super()._split(node, count)
        cut = max(0, len(node.window) - len(node.pages))
        upper.window, node.window = node.window[:cut], node.window[cut:]
        upper.window_locks = node.window_locks
        self._queue_window(upper)
        return upper

    def _shorten(self, leaf: Node, keep: int) -> None:
        lost = min(len(leaf.window), len(leaf.pages) - keep)
        self._lose(leaf, len(leaf.window) - lost, len(leaf.window))
        super()._shorten(leaf, keep)

    def _remove(self, leaf: Node) -> None:
        self._lose(leaf, 0, len(leaf.window))
        super()._remove(leaf)

    def _lose(self, node: Node, start: int, stop: int) -> None:
        self.lost += node.window[start:stop]
        self._set_window(node, node.window[:start] + node.window[stop:])

    def _set_window(self, node: Node, window: array[int]) -> None:
        more = len(window) - len(node.window)
        node.window = window
        self.num_window_pages += more
        if not node.window_locks:
            self.num_window_evictable += more
            self._queue_window(node)

    def _queue_window(self, node: Node) -> None:
        if node.window and not node.window_locks and not node.is_window_queued:
            node.is_window_queued = True
            heapq.heappush(self._window_queue, self._window_entry(node))
            if len(self._window_queue) > 2 * self.num_window_pages + SPARE_ENTRIES:
                self._clean_window_queue()

    def _clean_window_queue(self) -> None:
        """Forget nodes that were removed or locked since: nothing else does while window pages are free."""
        for _, _, node in self._window_queue:
            node.is_window_queued = bool(node.window) and not node.window_locks
        self._window_queue = [entry for entry in self._window_queue if entry[2].is_window_queued]
        heapq.heapify(self._window_queue)

    def _window_entry(self, node: Node) -> tuple[tuple[int, ...], int, Node]:
        self._pushes += 1
        return self._eviction_key(node), -self._pushes, node  # of a path that a request left, the root's end first


def _parent(node: Node) -> Node:
    assert node.parent is not None
    return node.parent
