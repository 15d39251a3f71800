"""Pages of layers with a window, beside a lease's `pages` and at the same places. Called by ``sched.cache``.

Of a lease's `window`, with what its next step attends to from `first` on,

    [0, first)                  is gone: freed, or the tree's alone
    [first, shared)             belongs to the tree; the lease locks shared - held (at or before first) to shared
    [max(first, shared), ...)   belongs to the lease

What is left behind is freed when the lease grows, once the steps in flight are done; locks move up in a few strides.
"""

from __future__ import annotations

from tokenmill.sched.pages import PagePool
from tokenmill.sched.radix import Node
from tokenmill.sched.window_tree import WindowTree

STRIDES = 4  # in which locks move over a window


class Lease:
    """The pages of one running request, in order of position. Written only by PrefixCache and Windows."""

    __slots__ = ("first", "held", "left", "node", "pages", "priority", "salt", "shared", "window")

    def __init__(self, salt: str, priority: int = 0) -> None:
        self.salt = salt
        self.priority = priority
        self.pages: list[int] = []
        self.shared = 0
        self.node: Node | None = None
        self.window: list[int] = []
        self.first = 0
        self.held = 0
        self.left = (-1, 0)

    @property
    def num_window_pages(self) -> int:
        """Window pages that the lease owns or locks."""
        return self.held + len(self.window) - max(self.first, self.shared)


class Windows:
    """Window pages of leases and of a tree."""

    def __init__(self, tree: WindowTree, num_pages: int, page_size: int, window: int) -> None:
        self.num_pages = num_pages
        self.window = window
        self.tree = tree
        self.pool = PagePool(num_pages)
        self._page_size = page_size

    @property
    def num_available(self) -> int:
        """Pages that are free or can be evicted."""
        return self.pool.num_free + self.tree.num_window_evictable

    def growth(self, held: int, end: int, row: int) -> int:
        """Pages that a request of `end` tokens, `row` of them in a step, may take beside the `held` that it has now."""
        needed, in_steps = self.tree.num_needed, 2 * (2 - -row // self._page_size)  # those left behind too, in flight
        most = needed + needed // STRIDES + 2 + in_steps
        return max(0, min(-(-end // self._page_size), most) - held)

    def open(self, lease: Lease) -> None:
        """A request begins with the tree's pages of its hit."""
        assert lease.node is not None
        lease.held = min(len(lease.pages), self.tree.num_needed)
        lease.first = len(lease.pages) - lease.held
        lease.window = [-1] * lease.first + self.tree.hold(lease.node, lease.held)

    def leave_behind(self, lease: Lease, start: int, missing: int, last_step: int, retired: int) -> list[int] | None:
        """A step from position `start` on is planned, for which `missing` pages are needed.

        Steps up to `last_step` are planned, and those up to `retired` are done.

        Returns:
            pages that no later step attends to, to be free when those planned are done; None: nothing is left behind.
        """
        step, safe = lease.left  # steps behind this one attend to no page before that one
        left: list[int] | None = None
        first = max(0, start + 1 - self.window) // self._page_size
        if first > lease.first:
            left = lease.window[max(lease.first, lease.shared) : first]
            lease.first, lease.left = first, (last_step, first)
            if last_step <= retired:
                step, safe = lease.left
        behind = min(safe, lease.shared) - lease.shared + lease.held
        if behind > 0 and step <= retired:
            is_short = missing > self.num_available
            if behind * STRIDES >= self.tree.num_needed or behind == lease.held or is_short:
                self._lock(lease, lease.held - behind)
        return left

    def extend(self, lease: Lease, count: int) -> None:
        """Give a lease `count` pages more, which must be available."""
        self.take_lost()
        self.tree.evict_windows(count - self.pool.num_free)
        self.take_lost()
        lease.window += self.pool.allocate(count)

    def before_sharing(self, lease: Lease) -> None:
        """The lease is to share more pages with the tree: `after_sharing` must follow."""
        assert lease.node is not None
        self.tree.let_go(lease.node, lease.held)
        lease.held = 0

    def after_sharing(self, lease: Lease, shared: int) -> list[int]:
        """The lease shares its pages from `shared` on too: the tree takes what it lacks, duplicates are returned."""
        assert lease.node is not None
        duplicates = self.tree.give(lease.node, lease.window, max(lease.first, shared), lease.shared)
        self._lock(lease, max(0, lease.shared - lease.first))
        return duplicates

    def close(self, lease: Lease) -> None:
        """A request ended: its pages are free, or the tree's alone."""
        self._lock(lease, 0)
        self.pool.release(lease.window[max(lease.first, lease.shared) :])

    def pin(self, node: Node) -> None:
        """Lock the pages that the next token behind the prefix of `node` attends to."""
        self.tree.hold(node, min(self.tree.num_needed, depth(node)))

    def unpin(self, node: Node) -> None:
        """Undo `pin`."""
        self.tree.let_go(node, min(self.tree.num_needed, depth(node)))

    def take_lost(self) -> None:
        """What fell out of the tree is free."""
        self.pool.release(self.tree.lost)
        self.tree.lost.clear()

    def _lock(self, lease: Lease, count: int) -> None:
        """Let the lease lock the last `count` pages that it shares."""
        assert lease.node is not None
        self.tree.let_go(lease.node, lease.held)
        self.tree.hold(lease.node, count)
        lease.held = count

    def check(self, leases: list[Lease], fenced: list[int], pins: list[Node]) -> None:
        """Assert that every page has exactly one owner, and that counts and locks of the tree are right."""
        tree, owned, locks, evictable = self.tree, [*self.pool.free_pages(), *fenced], dict[Node, int](), 0
        for lease in leases:
            owned += lease.window[max(lease.first, lease.shared) :]
            assert len(lease.window) == len(lease.pages)
            assert lease.shared - lease.held <= lease.first or not lease.held
            _count_locks(locks, lease.node, lease.held)
        for pin in pins:
            _count_locks(locks, pin, min(tree.num_needed, depth(pin)))
        for node in tree.nodes():
            owned += node.window
            assert node.window_locks == locks.get(node, 0) <= node.locks
            assert len(node.window) == len(node.pages) or (not node.window_locks and len(node.window) < len(node.pages))
            assert node.is_window_queued or node.window_locks or not node.window, "pages that cannot be evicted"
            evictable += 0 if node.window_locks else len(node.window)
        assert not tree.lost
        assert evictable == tree.num_window_evictable
        assert sum(len(node.window) for node in tree.nodes()) == tree.num_window_pages
        assert sorted(owned) == list(range(self.num_pages)), "a window page has no owner, or two"


def depth(node: Node | None) -> int:
    """Pages of the prefix that ends at `node`."""
    count = 0
    while node is not None:
        count, node = count + len(node.pages), node.parent
    return count


def _count_locks(locks: dict[Node, int], node: Node | None, count: int) -> None:
    while count > 0:
        assert node is not None
        locks[node] = locks.get(node, 0) + 1
        count, node = count - len(node.pages), node.parent
    assert count == 0, "a lock ends inside a node"
