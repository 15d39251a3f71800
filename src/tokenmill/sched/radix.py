"""The prefix tree: which pages hold the K/V of which token prefix. Called only by ``sched.cache``.

Keys are token ids as int32 bytes, cut at page borders, so that comparing is a memory compare. A node's lock count
is the number of requests and pins whose prefix runs through it; an ancestor of a locked node is locked too. Eviction
takes unlocked leaves, from the end of the leaf, in the order of a key function over nodes.

The idea is SGLang's RadixAttention (Zheng et al. 2023, arXiv:2312.07104).
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

from tokenmill.config import Eviction

TOKEN_BYTES = 4
TRIM_PAGES = 128
NONE = array("i")  # arrays of windows are replaced, never changed


class Node:
    """An edge of the tree with its pages; `key` has page_size tokens a page. `pins` are those of the locks that pin.

    `uses` is the number of requests that used the pages, `priority` the highest of theirs, and `last_used` the time
    when the last of them ended. `window`, `window_locks` and `is_window_queued` are those of ``sched.window_tree``.
    """

    __slots__ = (
        "children", "is_queued", "is_window_queued", "key", "last_used", "locks", "pages", "parent", "pins", "priority",
        "uses", "window", "window_locks",
    )  # fmt: skip

    def __init__(self, parent: Node | None, key: bytes, pages: array[int], priority: int) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.priority = priority
        self.locks = 0
        self.pins = 0
        self.uses = 0
        self.last_used = 0
        self.is_queued = False
        self.is_window_queued = False
        self.window = NONE
        self.window_locks = 0
        self.children: dict[bytes, Node] | None = None


class Root(Node):
    """Above the nodes of one salt. It has no pages, and is there as long as a child or a lock is."""

    __slots__ = ("salt",)

    def __init__(self, salt: str) -> None:
        super().__init__(None, b"", array("i"), 0)
        self.salt = salt


def least_recent(node: Node) -> tuple[int, ...]:
    """The pages used last are evicted last. No two leaves are equal: every end of a request has a time of its own."""
    return (node.last_used,)


def least_frequent(node: Node) -> tuple[int, ...]:
    """Pages that fewer requests used are evicted first, and of them the least recent."""
    return node.uses, node.last_used


def least_important(node: Node) -> tuple[int, ...]:
    """Pages that only requests of lower priority used are evicted first, and of them the least recent."""
    return node.priority, node.last_used


# A node's key must never fall: the heap's entries may be older than the node's key, and are put back when they are.
EVICTION_KEYS: dict[Eviction, Callable[[Node], tuple[int, ...]]] = {
    "lru": least_recent,
    "lfu": least_frequent,
    "priority": least_important,
}


class RadixTree:
    """A tree of page-aligned prefixes for each salt. Time is the number of calls of `unlock`."""

    def __init__(self, page_size: int, eviction: Eviction = "lru") -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._eviction_key = EVICTION_KEYS[eviction]
        self._leaves: list[tuple[tuple[int, ...], int, Node]] = []
        self._pushes = 0
        self.roots: dict[str, Root] = {}
        self.clock = 0
        self.num_pages = 0
        self.num_evictable = 0
        self.num_pinned = 0

    def walk(self, token_ids: bytes, end: int, salt: str) -> list[tuple[Node, int]]:
        """Nodes along the first `end` bytes, and how many of each one's pages match. Changes nothing.

        Only the last may match in part.
        """
        root = self.roots.get(salt)
        return self._walk(root, token_ids, 0, end) if root else []

    def lock(self, token_ids: bytes, end: int, salt: str, priority: int) -> tuple[Node, list[int]]:
        """Protect the known prefix of the first `end` bytes for a request.

        Returns:
            the prefix's last node, which stays its end whatever is split or inserted later, and its pages.
        """
        root = self.roots.get(salt)
        if root is None:
            root = self.roots[salt] = Root(salt)
        root.locks += 1
        return self.advance(root, token_ids, 0, end, (), priority)

    def advance(
        self, node: Node, token_ids: bytes, at: int, end: int, pages: Sequence[int], priority: int
    ) -> tuple[Node, list[int]]:
        """Move a lock from `node` down: bytes `at` to `end` are the prefix's next, and `pages` theirs.

        The tree takes the pages past what it knew; with none, nothing is added.

        Returns:
            the locked prefix's last node, and the pages known before; the caller keeps its own duplicates of them.
        """
        known: list[int] = []
        for child, count in self._walk(node, token_ids, at, end):
            node = self._hold(child, count)
            node.uses += 1
            node.priority = max(node.priority, priority)
            known.extend(node.pages)
        if len(pages) > len(known):
            rest = token_ids[at + len(known) * self._page_bytes : end]
            node = self._append(node, rest, array("i", pages[len(known) :]), priority)
        return node, known

    def unlock(self, node: Node) -> None:
        """Give back what `lock`, or `advance` after it, returned: a request ends here."""
        self.clock += 1
        for step in path(node):
            step.last_used = self.clock
            self._release(step)

    def pin(self, token_ids: bytes, end: int, salt: str) -> Node | None:
        """Protect the known prefix of the first `end` bytes; returns its last node, None where nothing is known."""
        node: Node | None = None
        for child, count in self.walk(token_ids, end, salt):
            node = self._hold(child, count)
            self.num_pinned += 0 if node.pins else len(node.pages)
            node.pins += 1
        if node is not None:
            self.roots[salt].locks += 1
            self.roots[salt].pins += 1
        return node

    def unpin(self, node: Node) -> None:
        """Undo one `pin` that returned `node`."""
        for step in path(node):
            step.pins -= 1
            self.num_pinned -= 0 if step.pins else len(step.pages)
            self._release(step)

    def evict(self, count: int) -> list[int]:
        """Forget up to `count` pages that are not locked; the caller owns them now."""
        freed: list[int] = []
        while len(freed) < count and self._leaves:
            key, _, leaf = self._leaves[0]
            if leaf.locks or leaf.children:
                heapq.heappop(self._leaves)
                leaf.is_queued = False
                continue
            if key != self._eviction_key(leaf):
                heapq.heapreplace(self._leaves, self._entry(leaf))
                continue
            keep = len(leaf.pages) - (count - len(freed))
            if keep <= 0:
                freed.extend(leaf.pages)
                heapq.heappop(self._leaves)
                self._remove(leaf)
            elif len(leaf.pages) > TRIM_PAGES:  # page by page, cutting the end off a long key would copy it each time
                self._split(leaf, len(leaf.pages) // 2)
            else:
                freed.extend(leaf.pages[keep:])
                self._shorten(leaf, keep)
        self.num_pages -= len(freed)
        self.num_evictable -= len(freed)
        return freed

    def flush(self, salt: str | None) -> list[int]:
        """Forget all that is not locked, of one salt or of all; the caller owns the pages now."""
        freed: list[int] = []
        roots = [root for root in self.roots.values() if salt in (None, root.salt)]
        for node in reversed([node for root in roots for node in descendants(root)]):
            if not node.locks and not node.children:
                freed.extend(node.pages)
                self._remove(node)
        self._leaves = [entry for entry in self._leaves if entry[2].parent is not None]
        heapq.heapify(self._leaves)
        self.num_pages -= len(freed)
        self.num_evictable -= len(freed)
        return freed

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, each after its parent."""
        return (node for root in self.roots.values() for node in descendants(root))

    def check(self, ends: Iterable[Node | None], pins: Iterable[Node]) -> None:
        """Assert that counts, locks and pins are right; requests' prefixes end at `ends`, pinned ones at `pins`."""
        locked: dict[Node, int] = {}
        pinned: dict[Node, int] = {}
        for count, its in ((locked, ends), (pinned, pins)):
            for end in its:
                for node in path(end):
                    count[node] = count.get(node, 0) + 1
        for node in self.nodes():
            assert len(node.key) == len(node.pages) * self._page_bytes > 0
            assert node.pins == pinned.get(node, 0)
            assert node.locks == locked.get(node, 0) + node.pins
            assert node.is_queued or node.locks or node.children, "a leaf that cannot be evicted"
        for root in self.roots.values():
            assert root.locks == locked.get(root, 0) + pinned.get(root, 0)
            assert root.locks or root.children
        assert sum(len(node.pages) for node in self.nodes() if not node.locks) == self.num_evictable
        assert sum(len(node.pages) for node in self.nodes() if node.pins) == self.num_pinned

    def _walk(self, node: Node, token_ids: bytes, at: int, end: int) -> list[tuple[Node, int]]:
        found: list[tuple[Node, int]] = []
        width = self._page_bytes
        while at < end and node.children:
            child = node.children.get(token_ids[at : at + width])
            if child is None:
                break
            node = child
            if token_ids.startswith(node.key, at, end):
                found.append((node, len(node.pages)))
                at += len(node.key)
            else:
                found.append((node, self._common_pages(node.key, token_ids, at, end)))
                break
        return found

    def _common_pages(self, key: bytes, token_ids: bytes, at: int, end: int) -> int:
        """Pages of `key` that token_ids[at:end] begins with; the first is known to match, the whole key not to."""
        width = self._page_bytes
        low, high = 1, min(len(key), end - at) // width + 1
        while high - low > 1:
            middle = (low + high) // 2
            if token_ids.startswith(key[low * width : middle * width], at + low * width):
                low = middle
            else:
                high = middle
        return low

    def _hold(self, node: Node, count: int) -> Node:
        """Lock the first `count` pages of `node`, cut off from the rest."""
        if count < len(node.pages):
            node = self._split(node, count)
        if not node.locks:
            self.num_evictable -= len(node.pages)
        node.locks += 1
        return node

    def _release(self, node: Node) -> None:
        """Take one lock off a node or root."""
        node.locks -= 1
        if not node.locks:
            self.num_evictable += len(node.pages)
            self._settle(node)

    def _append(self, node: Node, key: bytes, pages: array[int], priority: int) -> Node:
        """Add locked pages below `node`, or to `node` itself when nobody else has ever used it."""
        self.num_pages += len(pages)
        if node.uses == 1 and not node.pins and not node.window:
            node.key += key
            node.pages.extend(pages)
            return node
        leaf = Node(node, key, pages, priority)
        leaf.locks = leaf.uses = 1
        if node.children is None:
            node.children = {}
        node.children[key[: self._page_bytes]] = leaf
        return leaf

    def _split(self, node: Node, count: int) -> Node:
        """Cut `node` after `count` pages; the new upper part is returned, `node` stays the end of its prefix."""
        parent, cut = node.parent, count * self._page_bytes
        assert parent is not None
        assert parent.children is not None
        upper = Node(parent, node.key[:cut], node.pages[:count], node.priority)
        upper.locks, upper.pins, upper.uses, upper.last_used = node.locks, node.pins, node.uses, node.last_used
        parent.children[upper.key[: self._page_bytes]] = upper
        node.parent, node.key, node.pages = upper, node.key[cut:], node.pages[count:]
        upper.children = {node.key[: self._page_bytes]: node}
        return upper

    def _shorten(self, leaf: Node, keep: int) -> None:
        """Cut the leaf's pages off behind the first `keep`."""
        del leaf.pages[keep:]
        leaf.key = leaf.key[: keep * self._page_bytes]

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        assert parent.children is not None
        del parent.children[leaf.key[: self._page_bytes]]
        leaf.parent = None
        self._settle(parent)

    def _settle(self, node: Node) -> None:
        """Note a node that lost its last lock or child as a leaf to evict; a root that has neither is gone."""
        if node.locks or node.children:
            return
        if isinstance(node, Root):
            del self.roots[node.salt]
        elif not node.is_queued:
            node.is_queued = True
            heapq.heappush(self._leaves, self._entry(node))

    def _entry(self, node: Node) -> tuple[tuple[int, ...], int, Node]:
        self._pushes += 1
        return self._eviction_key(node), self._pushes, node


def path(node: Node | None) -> Iterator[Node]:
    """`node`, the nodes above it, and their root."""
    while node is not None:
        yield node
        node = node.parent


def salt_of(node: Node) -> str:
    """The salt of the root above `node`."""
    *_, root = path(node)
    assert isinstance(root, Root)
    return root.salt


def descendants(node: Node) -> Iterator[Node]:
    """The nodes below `node`, each after its parent."""
    stack: list[Iterable[Node]] = [node.children.values()] if node.children else []
    while stack:
        for child in stack.pop():
            yield child
            if child.children:
                stack.append(child.children.values())
