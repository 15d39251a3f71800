"""Pages of running requests and of the prefix tree: the only caller of ``sched.pages`` and ``sched.radix``.

Each page has exactly one owner: the free list, the tree, one lease's private tail, or the fence. Of a lease's pages

    [0, shared)      belong to the tree and are locked by the lease
    [shared, ...)    belong to the lease

and `share` moves the border: with `known` pages of the prefix already in the tree,

    [shared, known)  were private duplicates: the tree's pages take their place, the duplicates go behind the fence
    [known, full)    were private: they belong to the tree now, locked by the lease
    [full, ...)      stay private (the page that is not full, and what is not computed)

A pin owns no page: it is one more lock on pages of the tree, with a time at which it ends. When pages are short,

    first            prefixes that nobody uses or has pinned are evicted, in the order of the eviction policy
    then             `extend` and `num_available` say that there are no more, so that requests wait or are retracted
    last             pins end, the one with the least time left first, for a request that is open alone

so that pins never keep a request waiting that fits the pool.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from tokenmill.config import Eviction
from tokenmill.errors import InvalidRequest
from tokenmill.sched.dump import CacheCounters, Probe, tree_as_dict
from tokenmill.sched.pages import PagePool
from tokenmill.sched.radix import TOKEN_BYTES, Node, RadixTree, path, salt_of
from tokenmill.sched.window_tree import WindowTree
from tokenmill.sched.windows import Lease, Windows

MAX_PINS = 1024
MAX_PINNED_SHARE = 0.5


class PrefixCache:
    """Hands out pages, finds and keeps shared prefixes. Lengths are in tokens; token ids are int32 bytes.

    With a `window`, leases and tree have pages of a second kind, for layers whose tokens attend to so many.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        is_enabled: bool = True,
        eviction: Eviction = "lru",
        window: int = 0,
        num_window_pages: int = 0,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.is_enabled = is_enabled
        self.counters = CacheCounters()
        self._pool = PagePool(num_pages)
        self.windows: Windows | None = None
        self._max_pins = MAX_PINS
        if window:
            self._tree: RadixTree = (tree := WindowTree(page_size, eviction, window))
            self.windows = Windows(tree, num_window_pages, page_size, window)
            self._max_pins = min(MAX_PINS, int(num_window_pages * MAX_PINNED_SHARE) // max(1, tree.num_needed))
        else:
            self._tree = RadixTree(page_size, eviction)
        self._fence: deque[tuple[int, list[int], list[int]]] = deque()
        self._retired = -1
        self._leases: dict[int, Lease] = {}
        self._pins: dict[Node, int] = {}
        self._next_expiry: float = math.inf

    @property
    def num_free(self) -> int:
        """Pages in the free list."""
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        """Pages that the tree owns."""
        return self._tree.num_pages

    @property
    def num_pins(self) -> int:
        """Prefixes that are pinned."""
        return len(self._pins)

    @property
    def num_available(self) -> int:
        """Pages that a new request can have: free, or in the tree and neither in use nor pinned.

        Pinned pages count while no request is open.
        """
        return self._pool.num_free + self._tree.num_evictable + (0 if self._leases else self._tree.num_pinned)

    @property
    def room(self) -> int:
        """Pages of all kinds that can be had: more of them may let another request begin."""
        return self.num_available + (0 if self.windows is None else self.windows.num_available)

    @property
    def usage(self) -> dict[str, int]:
        """Pages of the kind of which the smaller share is available: free, in the tree, all, and available."""
        full = self.num_free, self.num_cached, self.num_pages, self.num_available
        kinds = [full]
        if (its := self.windows) is not None:
            kinds.append((its.pool.num_free, its.tree.num_window_pages, its.num_pages, its.num_available))
        counts = min(kinds, key=lambda its: its[3] / its[2])
        return dict(zip(("free_pages", "cached_pages", "num_pages", "available_pages"), counts, strict=True))

    @property
    def has_fenced(self) -> bool:
        """Whether pages become free when the steps in flight are done."""
        return bool(self._fence)

    def num_pages_for(self, length: int) -> int:
        """Pages that `length` tokens take."""
        return -(-length // self.page_size)

    def hit(self, token_ids: bytes, salt: str) -> tuple[int, int]:
        """What a request with these tokens would find: (tokens, pages of them that count as available now).

        The last token is never part of a hit: its logits are needed.
        """
        found = self._tree.walk(token_ids, self._key_end(len(token_ids) // TOKEN_BYTES - 1), salt)
        available = sum([count for node, count in found if not (node.locks and self._leases)])
        return sum([count for _, count in found]) * self.page_size, available

    def open(self, uid: int, token_ids: bytes, salt: str, priority: int = 0) -> Lease:
        """Start a request: its hit is locked and forms the first pages of the lease."""
        lease = self._leases[uid] = Lease(salt, priority)
        length = len(token_ids) // TOKEN_BYTES
        lease.node, lease.pages = self._tree.lock(token_ids, self._key_end(length - 1), salt, priority)
        lease.shared = len(lease.pages)
        if self.windows is not None:
            self.windows.open(lease)
        counters = self.counters
        counters.lookups += 1
        counters.hits += lease.shared > 0
        counters.misses += not lease.shared
        counters.lookup_tokens += length
        counters.hit_tokens += lease.shared * self.page_size
        return lease

    def extend(self, lease: Lease, length: int, start: int = 0, last_step: int = -1) -> list[int] | None:
        """Give the lease pages for `length` tokens in all, evicting if need be, for a step from position `start` on.

        `last_step` is the last step planned so far: steps up to it may still use what is left behind the window.

        Returns:
            the new pages, or None, and nothing changed for the worse, when they cannot be had.
        """
        missing = self.num_pages_for(length) - len(lease.pages)
        if missing <= 0:
            return []
        windows = self.windows
        if windows is not None:
            left = windows.leave_behind(lease, start, missing, last_step, self._retired)
            if left is not None:
                self._fence_off(last_step, [], left)
        free = self._pool.num_free
        is_short = missing > free + self._tree.num_evictable or (windows is not None and not self._has(missing))
        if is_short and not self._yield_pins(lease, missing):
            return None
        short = missing - free
        if short > 0:
            self._pool.release(self._tree.evict(short))
            self.counters.evicted_pages += short
        if windows is not None:
            windows.extend(lease, missing)
        pages = self._pool.allocate(missing)
        lease.pages.extend(pages)
        return pages

    def num_released(self, lease: Lease) -> int:
        """Pages that can be had once the lease is closed: its own, and those of the tree that nobody else locks."""
        released, node = len(lease.pages) - lease.shared, lease.node
        while node is not None:
            if node.locks == 1:
                released += len(node.pages)
            node = node.parent
        return released

    def share(self, lease: Lease, token_ids: bytes, length: int, last_step: int) -> tuple[int, int] | None:
        """Let other requests find the first `length` tokens, whose K/V is computed.

        `last_step` is the last step planned so far: steps up to it may still use the lease's old pages.

        Returns:
            (start, stop) of the lease's pages that may have changed, or None where they did not.
        """
        first = lease.shared
        pages, window = self._hand_over(lease, token_ids, length)
        if not pages and not window:
            return None
        self._fence_off(last_step, pages, window)
        return first, first + len(pages) if self.windows is None else lease.shared

    def close(self, uid: int, token_ids: bytes, length: int) -> None:
        """End a request; the K/V of its first `length` tokens is computed. No step in flight may name it."""
        lease = self._leases.pop(uid)
        assert lease.node is not None
        self._release(*self._hand_over(lease, token_ids, length))
        if self.windows is not None:
            self.windows.close(lease)
        self._tree.unlock(lease.node)
        self._pool.release(lease.pages[lease.shared :])

    def retire(self, step: int) -> None:
        """Steps up to `step` are done: what was fenced for them is free."""
        self._retired = step
        while self._fence and self._fence[0][0] <= step:
            self._release(*self._fence.popleft()[1:])

    def pin(self, token_ids: bytes, salt: str, until: int) -> int:
        """Keep what is known of these tokens, in whole pages, from eviction until the time `until` in milliseconds.

        Of two times for the same prefix the later one counts. A pin may end before, when a request needs its pages to
        run at all.

        Returns:
            the tokens pinned.

        Raises:
            InvalidRequest: pins would take more of the pool than they may, or there are too many.
        """
        size, tree, pins = self.page_size, self._tree, self._pins
        node = tree.pin(token_ids, self._key_end(len(token_ids) // TOKEN_BYTES), salt)
        if node is None:
            return 0
        most, wanted = int(self.num_pages * MAX_PINNED_SHARE), tree.num_pinned
        if self.windows is not None:
            self.windows.pin(node)
        if wanted > most or (node not in pins and len(pins) >= self._max_pins):
            self._unlock_pin(node)
            raise InvalidRequest(
                f"with this one, {wanted * size} tokens in {len(pins) + 1} prefixes would be pinned; at most "
                f"{most * size} of the K/V pool's {self.num_pages * size} tokens may be, in at most {self._max_pins} "
                "prefixes: unpin another, wait until one expires, or start the server with more --num-pages"
            )
        if node in pins:
            self._unlock_pin(node)
        pins[node] = max(until, pins.get(node, until))
        self._next_expiry = min(self._next_expiry, until)
        return sum(len(step.pages) for step in path(node)) * size

    def unpin(self, token_ids: bytes, salt: str) -> int:
        """End the pin of the longest pinned prefix of these tokens; returns its length in tokens, or 0."""
        length = pinned = 0
        last: Node | None = None
        for node, count in self._tree.walk(token_ids, self._key_end(len(token_ids) // TOKEN_BYTES), salt):
            length += count
            if node in self._pins and count == len(node.pages):
                last, pinned = node, length
        if last is not None:
            self._end_pin(last)
        return pinned * self.page_size

    def expire(self, now: int) -> None:
        """End the pins whose time has come; `now` is in milliseconds, on the clock of `pin`."""
        if now < self._next_expiry:
            return
        for node in [node for node, until in self._pins.items() if until <= now]:
            self._end_pin(node)
        self._next_expiry = min(self._pins.values(), default=math.inf)

    def probe(self, token_ids: bytes, salt: str) -> Probe:
        """What would be found of these tokens, and how it is protected. Changes nothing."""
        length, size = len(token_ids) // TOKEN_BYTES, self.page_size
        found = self._tree.walk(token_ids, self._key_end(length), salt)
        known = size * sum(count for _, count in found)
        return Probe(
            known=known,
            hit=self.hit(token_ids, salt)[0],
            pinned=size * sum(count for node, count in found if node.pins),
            in_use=size * sum(count for node, count in found if node.locks > node.pins),
        )

    def flush(self, salt: str | None = None, *, with_pins: bool = False) -> int:
        """Forget what no request uses, of one salt or of all, pinned prefixes only if asked; returns pages freed."""
        if with_pins:
            for node in [node for node in self._pins if salt in (None, salt_of(node))]:
                self._end_pin(node)
        pages = self._tree.flush(salt)
        self._release(pages)
        return len(pages)

    def pages_by_owner(self) -> dict[str, int]:
        """Pages of each owner, `free`, `tree`, `private` and `fence`; and of the tree's, `evictable` and `pinned`.

        Where there are layers with a window, their pages that are free and in the tree too.
        """
        fence = sum(len(pages) for _, pages, _ in self._fence)
        free, tree = self._pool.num_free, self._tree
        owners = {"free": free, "tree": tree.num_pages, "private": self.num_pages - free - tree.num_pages - fence}
        if (its := self.windows) is not None:
            owners |= {"window_free": its.pool.num_free, "window_tree": its.tree.num_window_pages}
        return owners | {"fence": fence, "evictable": tree.num_evictable, "pinned": tree.num_pinned}

    def dump(self, *, max_nodes: int = 1000, max_depth: int = 32, has_salts: bool = False) -> dict[str, object]:
        """The tree as JSON-able data (see ``sched.dump``)."""
        tree = self._tree
        top = {"page_size": self.page_size, "time": tree.clock, "pins": self.num_pins, **self.pages_by_owner()}
        return top | tree_as_dict(tree.roots, self._pins, max_nodes, max_depth, has_salts=has_salts)

    def free_pages(self) -> tuple[int, ...]:
        """The pages in the free list, for checks."""
        return self._pool.free_pages()

    def check(self) -> None:
        """Assert that every page has exactly one owner and that the tree's counts, locks and pins are right."""
        leases = list(self._leases.values())
        owned: list[int] = [*self._pool.free_pages()]
        for _, pages, _ in self._fence:
            owned.extend(pages)
        for lease in leases:
            owned.extend(lease.pages[lease.shared :])
        for node in self._tree.nodes():
            owned.extend(node.pages)
        self._tree.check([lease.node for lease in leases], self._pins)
        assert sorted(owned) == list(range(self.num_pages)), "a page has no owner, or two"
        if self.windows is not None:
            fenced = [page for _, _, window in self._fence for page in window]
            self.windows.check(leases, fenced, list(self._pins))

    def _has(self, count: int) -> bool:
        """Whether `count` pages of each kind can be had."""
        windows = self.windows
        if windows is not None and count > windows.num_available:
            return False
        return count <= self._pool.num_free + self._tree.num_evictable

    def _fence_off(self, step: int, pages: list[int], window: list[int]) -> None:
        """Free pages when the steps up to `step` are done."""
        self._fence.append((step, pages, window))
        if step <= self._retired:
            self.retire(self._retired)

    def _release(self, pages: list[int], window: Sequence[int] = ()) -> None:
        """Free pages of both kinds, and what fell out of the tree with them."""
        self._pool.release(pages)
        if self.windows is not None:
            self.windows.pool.release(window)
            self.windows.take_lost()

    def _hand_over(self, lease: Lease, token_ids: bytes, length: int) -> tuple[list[int], list[int]]:
        """Move the border of `lease` up to `length`; returns the private duplicates, by kind, that lost their place."""
        first, end = lease.shared, self._key_end(length)
        at, full = self._key_end(first * self.page_size), length // self.page_size
        if end <= at:
            return [], []
        assert lease.node is not None
        windows = self.windows
        if windows is not None:
            windows.before_sharing(lease)
        lease.node, known = self._tree.advance(lease.node, token_ids, at, end, lease.pages[first:full], lease.priority)
        duplicates = lease.pages[first : first + len(known)]
        lease.pages[first : first + len(known)] = known
        lease.shared = full
        return duplicates, [] if windows is None else windows.after_sharing(lease, first)

    def _yield_pins(self, lease: Lease, missing: int) -> bool:
        """End pins until `missing` pages can be had, if `lease` is the only one and that is enough."""
        if len(self._leases) > 1:
            return False
        in_use = sum(len(node.pages) for node in path(lease.node) if node.pins)
        free, tree, windows = self._pool.num_free, self._tree, self.windows
        if missing > free + tree.num_evictable + tree.num_pinned - in_use:
            return False
        if windows is not None:
            fenced = sum(len(window) for _, _, window in self._fence)
            if missing > windows.num_pages - lease.num_window_pages - fenced:
                return False
        for node in sorted(self._pins, key=self._pins.__getitem__):
            if self._has(missing):
                break
            if node.locks == node.pins or (windows is not None and missing > windows.num_available):
                self._end_pin(node)
                self.counters.yielded_pins += 1
        return True

    def _end_pin(self, node: Node) -> None:
        del self._pins[node]
        self._unlock_pin(node)

    def _unlock_pin(self, node: Node) -> None:
        if self.windows is not None:
            self.windows.unpin(node)
        self._tree.unpin(node)

    def _key_end(self, length: int) -> int:
        """Bytes of the whole pages of the first `length` tokens, none when nothing is to be found or kept."""
        return max(length, 0) // self.page_size * self.page_size * TOKEN_BYTES if self.is_enabled else 0
