"""The prefix tree: which pages hold the K/V of which token prefix. Called only by ``sched.cache``.

Keys are token ids as int32 bytes, cut at page borders, so that comparing is a memory compare. A node's lock count
is the number of requests whose prefix runs through it; an ancestor of a locked node is locked too. Eviction takes
unlocked leaves, least recently used first, from the end of the leaf.

The idea is SGLang's RadixAttention (Zheng et al. 2023, arXiv:2312.07104).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

TOKEN_BYTES = 4


class Node:
    """An edge of the tree with its pages; `key` has page_size tokens a page."""

    __slots__ = ("children", "key", "last_used", "locks", "pages", "parent")

    def __init__(self, parent: Node | None, key: bytes, pages: list[int], locks: int, last_used: int) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.locks = locks
        self.last_used = last_used
        self.children: dict[bytes, Node] = {}


class RadixTree:
    """A tree of page-aligned prefixes for each salt. Time is the number of calls that used the tree."""

    def __init__(self, page_size: int) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[str, Node] = {}
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []
        self._pushes = 0
        self.num_pages = 0
        self.num_evictable = 0

    def match(self, key: bytes, salt: str) -> list[int]:
        """Pages of the longest known prefix of `key`. Changes nothing."""
        pages: list[int] = []
        for node, count in self._walk(key, salt):
            pages.extend(node.pages[:count])
        return pages

    def num_unlocked(self, key: bytes, salt: str) -> int:
        """How many pages of the longest known prefix could be evicted now. Changes nothing."""
        return sum(count for node, count in self._walk(key, salt) if not node.locks)

    def insert(self, key: bytes, salt: str, pages: list[int]) -> list[int]:
        """Make `key` known. `pages` are its pages; the tree takes those past the prefix it knew.

        Returns:
            the pages of the prefix that was known before; the caller keeps its own duplicates of them.
        """
        self._clock += 1
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = Node(None, b"", [], 0, self._clock)
        known: list[int] = []
        for child, count in self._walk(key, salt):
            known.extend(child.pages[:count])
            node = child if count == len(child.pages) else self._split(child, count)
            node.last_used = self._clock
        fresh = pages[len(known) :]
        if fresh:
            rest = key[len(known) * self._page_bytes :]
            leaf = Node(node, rest, fresh, 0, self._clock)
            node.children[rest[: self._page_bytes]] = leaf
            self.num_pages += len(fresh)
            self.num_evictable += len(fresh)
            self._push(leaf)
        return known

    def lock(self, key: bytes, salt: str) -> Node | None:
        """Protect the known prefix of `key` from eviction; None when nothing is known of it.

        The node returned stays the end of exactly this prefix, whatever is split or inserted later.
        """
        self._clock += 1
        last: Node | None = None
        for child, count in self._walk(key, salt):
            last = child if count == len(child.pages) else self._split(child, count)
            if not last.locks:
                self.num_evictable -= len(last.pages)
            last.locks += 1
            last.last_used = self._clock
        return last

    def unlock(self, node: Node | None) -> None:
        """Undo one `lock` that returned `node`."""
        while node is not None and node.parent is not None:
            node.locks -= 1
            if not node.locks:
                self.num_evictable += len(node.pages)
                self._push(node)
            node = node.parent

    def evict(self, count: int) -> list[int]:
        """Forget up to `count` pages that no request uses; the caller owns them now."""
        freed: list[int] = []
        while len(freed) < count and self._leaves:
            last_used, _, leaf = heapq.heappop(self._leaves)
            if leaf.parent is None or leaf.locks or leaf.children:
                continue
            if leaf.last_used != last_used:
                self._push(leaf)
                continue
            keep = max(0, len(leaf.pages) - (count - len(freed)))
            freed.extend(leaf.pages[keep:])
            if keep:
                del leaf.pages[keep:]
                leaf.key = leaf.key[: keep * self._page_bytes]
                self._push(leaf)
            else:
                self._remove(leaf)
        self.num_pages -= len(freed)
        self.num_evictable -= len(freed)
        return freed

    def nodes(self) -> Iterator[tuple[str, Node]]:
        """All nodes but the roots with their salts, for checks and dumps."""
        stack = [(salt, child) for salt, root in self._roots.items() for child in root.children.values()]
        while stack:
            salt, node = stack.pop()
            yield salt, node
            stack.extend((salt, child) for child in node.children.values())

    def _walk(self, key: bytes, salt: str) -> Iterator[tuple[Node, int]]:
        """Nodes along `key` and how many of each one's pages match; only the last may match in part."""
        node = self._roots.get(salt)
        at, width = 0, self._page_bytes
        while node is not None:
            node = node.children.get(key[at : at + width])
            if node is None:
                return
            count = self._common_pages(node.key, key[at : at + len(node.key)])
            at += count * width
            is_whole = count == len(node.pages)
            yield node, count
            if not is_whole:
                return

    def _common_pages(self, one: bytes, other: bytes) -> int:
        width = self._page_bytes
        low, high = 0, min(len(one), len(other)) // width
        if one[: high * width] == other[: high * width]:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            if one[low * width : middle * width] == other[low * width : middle * width]:
                low = middle
            else:
                high = middle
        return low

    def _split(self, node: Node, count: int) -> Node:
        """Cut `node` after `count` pages; the new upper part is returned, `node` stays the end of its prefix."""
        parent = node.parent
        assert parent is not None
        cut = count * self._page_bytes
        upper = Node(parent, node.key[:cut], node.pages[:count], node.locks, node.last_used)
        parent.children[upper.key[: self._page_bytes]] = upper
        node.parent, node.key, node.pages = upper, node.key[cut:], node.pages[count:]
        upper.children[node.key[: self._page_bytes]] = node
        return upper

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key[: self._page_bytes]]
        leaf.parent = None
        if parent.parent is not None:
            if not parent.children and not parent.locks:
                self._push(parent)
        elif not parent.children:
            self._roots = {salt: root for salt, root in self._roots.items() if root is not parent}

    def _push(self, node: Node) -> None:
        """Note `node` as a leaf to evict; entries that are out of date are passed over by `evict`."""
        if node.locks or node.children or node.parent is None:
            return
        self._pushes += 1
        heapq.heappush(self._leaves, (node.last_used, self._pushes, node))
        if len(self._leaves) > 64 + 2 * self.num_pages:
            newest = {entry[2]: entry for entry in sorted(self._leaves, key=lambda entry: entry[:2])}
            self._leaves = [e for e in newest.values() if e[2].parent and not e[2].locks and not e[2].children]
            heapq.heapify(self._leaves)
