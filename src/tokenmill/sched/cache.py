"""Pages of running requests and of the prefix tree: the only caller of ``sched.pages`` and ``sched.radix``.

Each page has exactly one owner: the free list, the tree, one lease's private tail, or the fence. Of a lease's pages

    [0, shared)      belong to the tree and are locked by the lease
    [shared, ...)    belong to the lease

and `share` moves the border: with `known` pages of the prefix already in the tree,

    [shared, known)  were private duplicates: the tree's pages take their place, the duplicates go behind the fence
    [known, full)    were private: they belong to the tree now, locked by the lease
    [full, ...)      stay private (the page that is not full, and what is not computed)
"""

from __future__ import annotations

from collections import deque

from tokenmill.sched.pages import PagePool
from tokenmill.sched.radix import TOKEN_BYTES, Node, RadixTree


class Lease:
    """The pages of one running request, in order of position. Written only by PrefixCache."""

    __slots__ = ("node", "pages", "salt", "shared")

    def __init__(self, salt: str) -> None:
        self.salt = salt
        self.pages: list[int] = []
        self.shared = 0
        self.node: Node | None = None


class PrefixCache:
    """Hands out pages, finds and keeps shared prefixes. Lengths are in tokens; token ids are int32 bytes."""

    def __init__(self, num_pages: int, page_size: int, *, is_enabled: bool = True) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.is_enabled = is_enabled
        self._pool = PagePool(num_pages)
        self._tree = RadixTree(page_size)
        self._fence: deque[tuple[int, list[int]]] = deque()
        self._leases: dict[int, Lease] = {}

    @property
    def num_free(self) -> int:
        """Pages in the free list."""
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        """Pages that the tree owns."""
        return self._tree.num_pages

    @property
    def num_available(self) -> int:
        """Pages that can be had now: free, or in the tree and used by nobody."""
        return self._pool.num_free + self._tree.num_evictable

    def num_pages_for(self, length: int) -> int:
        """Pages that `length` tokens take."""
        return -(-length // self.page_size)

    def hit(self, token_ids: bytes, salt: str) -> tuple[int, int]:
        """What a request with these tokens would find: (tokens, pages of them that count as available now).

        The last token is never part of a hit: its logits are needed.
        """
        key = self._key(token_ids, len(token_ids) // TOKEN_BYTES - 1)
        if not self.is_enabled or not key:
            return 0, 0
        return len(self._tree.match(key, salt)) * self.page_size, self._tree.num_unlocked(key, salt)

    def open(self, uid: int, token_ids: bytes, salt: str) -> Lease:
        """Start a request: its hit is locked and forms the first pages of the lease."""
        lease = Lease(salt)
        if self.is_enabled:
            key = self._key(token_ids, len(token_ids) // TOKEN_BYTES - 1)
            lease.node = self._tree.lock(key, salt)
            lease.pages = self._tree.match(key, salt)
            lease.shared = len(lease.pages)
        self._leases[uid] = lease
        return lease

    def extend(self, lease: Lease, length: int) -> list[int] | None:
        """Give the lease pages for `length` tokens in all, evicting if need be.

        Returns:
            the new pages, or None, and nothing changed, when they cannot be had.
        """
        missing = self.num_pages_for(length) - len(lease.pages)
        if missing <= 0:
            return []
        if missing > self.num_available:
            return None
        short = missing - self._pool.num_free
        if short > 0:
            self._pool.release(self._tree.evict(short))
        pages = self._pool.allocate(missing)
        lease.pages.extend(pages)
        return pages

    def share(self, lease: Lease, token_ids: bytes, length: int, last_step: int) -> tuple[int, list[int]] | None:
        """Let other requests find the first `length` tokens, whose K/V is computed.

        `last_step` is the last step planned so far: steps up to it may still use the lease's old pages.

        Returns:
            (index, pages) where the lease's pages changed, or None where they did not.
        """
        first = lease.shared
        duplicates = self._hand_over(lease, token_ids, length)
        if not duplicates:
            return None
        self._fence.append((last_step, duplicates))
        return first, lease.pages[first : first + len(duplicates)]

    def close(self, uid: int, token_ids: bytes, length: int) -> None:
        """End a request; the K/V of its first `length` tokens is computed. No step in flight may name it."""
        lease = self._leases.pop(uid)
        self._pool.release(self._hand_over(lease, token_ids, length))
        self._tree.unlock(lease.node)
        self._pool.release(lease.pages[lease.shared :])

    def retire(self, step: int) -> None:
        """Steps up to `step` are done: what was fenced for them is free."""
        while self._fence and self._fence[0][0] <= step:
            self._pool.release(self._fence.popleft()[1])

    def flush(self) -> int:
        """Forget every prefix that no request uses; returns the number of pages freed."""
        pages = self._tree.evict(self._tree.num_pages)
        self._pool.release(pages)
        return len(pages)

    def free_pages(self) -> tuple[int, ...]:
        """The pages in the free list, for checks."""
        return self._pool.free_pages()

    def check(self) -> None:
        """Assert that every page has exactly one owner and that the tree's counts and locks are right."""
        owned: list[int] = [*self._pool.free_pages()]
        for _, pages in self._fence:
            owned.extend(pages)
        locks: dict[Node, int] = {}
        for lease in self._leases.values():
            owned.extend(lease.pages[lease.shared :])
            node = lease.node
            while node is not None and node.parent is not None:
                locks[node] = locks.get(node, 0) + 1
                node = node.parent
        evictable = 0
        for _, node in self._tree.nodes():
            owned.extend(node.pages)
            assert len(node.key) == len(node.pages) * self.page_size * TOKEN_BYTES
            assert node.locks == locks.get(node, 0)
            evictable += 0 if node.locks else len(node.pages)
        assert evictable == self._tree.num_evictable
        assert sorted(owned) == list(range(self.num_pages)), "a page has no owner, or two"

    def _hand_over(self, lease: Lease, token_ids: bytes, length: int) -> list[int]:
        """Move the border of `lease` up to `length`; returns the private duplicates that lost their place."""
        full = length // self.page_size
        if not self.is_enabled or full <= lease.shared:
            return []
        key = self._key(token_ids, length)
        known = self._tree.insert(key, lease.salt, lease.pages[:full])
        duplicates = lease.pages[lease.shared : len(known)]
        lease.pages[: len(known)] = known
        node = self._tree.lock(key, lease.salt)
        self._tree.unlock(lease.node)
        lease.node, lease.shared = node, full
        return duplicates

    def _key(self, token_ids: bytes, length: int) -> bytes:
        """The whole pages of the first `length` tokens."""
        return token_ids[: length // self.page_size * self.page_size * TOKEN_BYTES]
