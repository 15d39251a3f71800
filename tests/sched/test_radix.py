"""The prefix tree against a naive twin: a dictionary from whole prefixes to pages."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from tokenmill.sched.radix import RadixTree
from tokenmill.wire.messages import pack_ids

SALTS = ("", "a")
PREFIXES = st.lists(st.integers(0, 1), min_size=1, max_size=6)


class RadixMachine(RuleBasedStateMachine):
    """`known` maps (salt, prefix in pages) to its page; `held` counts locks of every such prefix."""

    locks = Bundle("locks")

    @initialize(page_size=st.integers(1, 3))
    def start(self, page_size):
        self.page_size = page_size
        self.tree = RadixTree(page_size)
        self.known: dict[tuple[str, tuple[int, ...]], int] = {}
        self.held: dict[tuple[str, tuple[int, ...]], int] = {}
        self.next_page = 0

    def key(self, prefix):
        return pack_ids(token for token in prefix for _ in range(self.page_size))

    def prefixes(self, salt, prefix):
        """The known prefixes of `prefix`, shortest first."""
        found = []
        for end in range(1, len(prefix) + 1):
            name = (salt, tuple(prefix[:end]))
            if name not in self.known:
                break
            found.append(name)
        return found

    @rule(salt=st.sampled_from(SALTS), prefix=PREFIXES)
    def insert(self, salt, prefix):
        pages = list(range(self.next_page, self.next_page + len(prefix)))
        self.next_page += len(prefix)
        before = self.prefixes(salt, prefix)
        assert self.tree.insert(self.key(prefix), salt, pages) == [self.known[name] for name in before]
        for end in range(len(before) + 1, len(prefix) + 1):
            self.known[salt, tuple(prefix[:end])] = pages[end - 1]

    @rule(target=locks, salt=st.sampled_from(SALTS), prefix=PREFIXES)
    def lock(self, salt, prefix):
        names = self.prefixes(salt, prefix)
        for name in names:
            self.held[name] = self.held.get(name, 0) + 1
        node = self.tree.lock(self.key(prefix), salt)
        assert (node is None) == (not names)
        return node, names

    @rule(lock=consumes(locks))
    def unlock(self, lock):
        node, names = lock
        self.tree.unlock(node)
        for name in names:
            self.held[name] -= 1

    @rule(salt=st.sampled_from(SALTS), prefix=PREFIXES)
    def match(self, salt, prefix):
        names = self.prefixes(salt, prefix)
        assert self.tree.match(self.key(prefix), salt) == [self.known[name] for name in names]
        unlocked = [name for name in names if not self.held.get(name)]
        assert self.tree.num_unlocked(self.key(prefix), salt) == len(unlocked)

    @rule(count=st.integers(0, 8))
    def evict(self, count):
        free = [name for name in self.known if not self.held.get(name)]
        evicted = set(self.tree.evict(count))
        assert len(evicted) == min(count, len(free))
        gone = {name for name, page in self.known.items() if page in evicted}
        assert len(gone) == len(evicted)
        assert gone <= set(free)
        for name in gone:
            del self.known[name]

    @invariant()
    def counts_are_right(self):
        if not hasattr(self, "tree"):
            return
        assert self.tree.num_pages == len(self.known)
        assert self.tree.num_evictable == sum(not self.held.get(name) for name in self.known)
        assert sorted(page for _, node in self.tree.nodes() for page in node.pages) == sorted(self.known.values())
        for salt, prefix in self.known:
            assert len(prefix) == 1 or (salt, prefix[:-1]) in self.known, "a page is known without the one before"


RadixMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRadix = RadixMachine.TestCase


def test_nothing_is_kept_of_salts_and_leaves_that_are_gone():
    tree = RadixTree(1)
    for index in range(2000):
        tree.insert(pack_ids([index, 1, 2]), str(index), [0, 1, 2])
        node = tree.lock(pack_ids([index, 1]), str(index))
        tree.unlock(node)
        tree.evict(3)
    assert tree.num_pages == 0
    assert not tree._roots
    assert len(tree._leaves) <= 64


def test_the_heap_of_leaves_stays_in_step_with_the_tree():
    tree = RadixTree(1)
    keys = [pack_ids([index, 1, 2]) for index in range(20)]
    for index, key in enumerate(keys):
        tree.insert(key, "", [3 * index, 3 * index + 1, 3 * index + 2])
    for _ in range(100):
        for key in keys:
            tree.unlock(tree.lock(key, ""))
    assert len(tree._leaves) <= 64 + 2 * tree.num_pages
    assert len(tree.evict(100)) == 60


def test_what_was_used_last_is_evicted_last():
    tree = RadixTree(1)
    for index in range(5):
        tree.insert(pack_ids([index]), "", [index])
    for index in (3, 0):
        tree.unlock(tree.lock(pack_ids([index]), ""))
    assert [tree.evict(1) for _ in range(6)] == [[1], [2], [4], [3], [0], []]
