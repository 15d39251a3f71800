"""The prefix tree against a naive twin: a dictionary from whole prefixes to pages, evicted page by page."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from tokenmill.sched.radix import TOKEN_BYTES, RadixTree, path, salt_of
from tokenmill.wire.messages import pack_ids

SALTS = ("", "a")
PREFIXES = st.lists(st.integers(0, 1), min_size=1, max_size=6)
PRIORITIES = st.integers(-1, 2)


@dataclass
class Page:
    """What the naive twin knows of the last page of a prefix."""

    page: int
    priority: int
    uses: int = 1
    last_used: int = 0
    locks: int = 0
    pins: int = 0


class RadixMachine(RuleBasedStateMachine):
    """`known` maps (salt, prefix in pages) to its last page."""

    requests = Bundle("requests")
    pins = Bundle("pins")

    @initialize(page_size=st.integers(1, 3), eviction=st.sampled_from(["lru", "lfu", "priority"]))
    def start(self, page_size, eviction):
        self.page_size = page_size
        self.eviction = eviction
        self.tree = RadixTree(page_size, eviction)
        self.known: dict[tuple[str, tuple[int, ...]], Page] = {}
        self.next_page = 0
        self.clock = 0

    def key(self, prefix):
        """The ids of `prefix` and half a page more, and how many bytes of them are the prefix."""
        ids = [token for token in prefix for _ in range(self.page_size)]
        return pack_ids([*ids, 0]), len(ids) * TOKEN_BYTES

    def prefixes(self, salt, prefix):
        """The known prefixes of `prefix`, shortest first."""
        found = []
        for end in range(1, len(prefix) + 1):
            name = (salt, tuple(prefix[:end]))
            if name not in self.known:
                break
            found.append(name)
        return found

    def pages(self, names):
        return [self.known[name].page for name in names]

    def use(self, names, priority):
        for name in names:
            page = self.known[name]
            page.uses += 1
            page.locks += 1
            page.priority = max(page.priority, priority)

    @rule(target=requests, salt=st.sampled_from(SALTS), prefix=PREFIXES, priority=PRIORITIES)
    def lock(self, salt, prefix, priority):
        names = self.prefixes(salt, prefix)
        self.use(names, priority)
        node, pages = self.tree.lock(*self.key(prefix), salt, priority)
        assert pages == self.pages(names)
        assert salt_of(node) == salt
        return salt, tuple(prefix[: len(names)]), node, priority

    @rule(target=requests, request=consumes(requests), suffix=PREFIXES)
    def advance(self, request, suffix):
        salt, prefix, node, priority = request
        whole = (*prefix, *suffix)
        names = self.prefixes(salt, whole)[len(prefix) :]
        pages = list(range(self.next_page, self.next_page + len(suffix)))
        self.next_page += len(suffix)
        at = len(prefix) * self.page_size * TOKEN_BYTES
        token_ids, end = self.key(whole)
        node, known = self.tree.advance(node, token_ids, at, end, pages, priority)
        assert known == self.pages(names)
        self.use(names, priority)
        for count in range(len(names), len(suffix)):
            self.known[salt, whole[: len(prefix) + count + 1]] = Page(pages[count], priority, locks=1)
        return salt, whole, node, priority

    @rule(request=consumes(requests))
    def unlock(self, request):
        salt, prefix, node, _ = request
        assert sum(len(step.pages) for step in path(node)) == len(prefix), "the end of a lock moved"
        self.tree.unlock(node)
        self.clock += 1
        for name in self.prefixes(salt, prefix):
            self.known[name].locks -= 1
            self.known[name].last_used = self.clock

    @rule(target=pins, salt=st.sampled_from(SALTS), prefix=PREFIXES)
    def pin(self, salt, prefix):
        names = self.prefixes(salt, prefix)
        for name in names:
            self.known[name].pins += 1
        node = self.tree.pin(*self.key(prefix), salt)
        assert (node is None) == (not names)
        return names, node

    @rule(pin=consumes(pins))
    def unpin(self, pin):
        names, node = pin
        if node is not None:
            self.tree.unpin(node)
        for name in names:
            self.known[name].pins -= 1

    @rule(salt=st.sampled_from(SALTS), prefix=PREFIXES)
    def walk(self, salt, prefix):
        found = self.tree.walk(*self.key(prefix), salt)
        pages = [page for node, count in found for page in node.pages[:count]]
        names = self.prefixes(salt, prefix)
        assert pages == self.pages(names)
        for attribute in ("uses", "priority", "pins"):
            wanted = [getattr(self.known[name], attribute) for name in names]
            assert [getattr(node, attribute) for node, count in found for _ in range(count)] == wanted

    def leaves(self):
        parents = {(salt, prefix[:-1]) for salt, prefix in self.known}
        free = [name for name, page in self.known.items() if not page.locks and not page.pins]
        return [name for name in free if name not in parents]

    @rule(count=st.integers(0, 8))
    def evict(self, count):
        wanted = []
        while len(wanted) < count and (leaves := self.leaves()):
            first = {"lru": lambda page: 0, "lfu": lambda page: page.uses, "priority": lambda page: page.priority}
            order = {name: (first[self.eviction](self.known[name]), self.known[name].last_used) for name in leaves}
            assert len(set(order.values())) == len(order), "the order of two leaves is open"
            wanted.append(self.known.pop(min(leaves, key=order.get)).page)
        assert sorted(self.tree.evict(count)) == sorted(wanted)

    @rule(salt=st.sampled_from([None, *SALTS]))
    def flush(self, salt):
        wanted = []
        while leaves := [name for name in self.leaves() if salt in (None, name[0])]:
            wanted += [self.known.pop(name).page for name in leaves]
        assert sorted(self.tree.flush(salt)) == sorted(wanted)

    @invariant()
    def counts_are_right(self):
        if not hasattr(self, "tree"):
            return
        known = self.known.values()
        assert self.tree.num_pages == len(known)
        assert self.tree.num_evictable == sum(not page.locks and not page.pins for page in known)
        assert self.tree.num_pinned == sum(page.pins > 0 for page in known)
        nodes = list(self.tree.nodes())
        assert sorted(page for node in nodes for page in node.pages) == sorted(page.page for page in known)
        assert len(self.tree._leaves) == sum(node.is_queued for node in nodes), "the heap has more than the leaves"
        assert set(self.tree.roots) >= {salt for salt, _ in self.known}


RadixMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestRadix = RadixMachine.TestCase


def add(tree, ids, pages, salt="", priority=0):
    """A request with these ids comes and goes, at one id a page."""
    token_ids = pack_ids(ids)
    node, known = tree.lock(token_ids, len(token_ids), salt, priority)
    rest = pages[len(known) :]
    tree.unlock(tree.advance(node, token_ids, len(known) * TOKEN_BYTES, len(token_ids), rest, priority)[0])


def test_nothing_is_kept_of_salts_and_leaves_that_are_gone():
    tree = RadixTree(1)
    for index in range(2000):
        add(tree, [index, 1, 2], [0, 1, 2], salt=str(index))
        add(tree, [index, 1], [0, 1], salt=str(index))
        assert tree.evict(3) == [2, 0, 1]
        add(tree, [index], [0], salt="other")
        tree.flush("other")
    assert tree.num_pages == 0
    assert not tree.roots
    assert not tree._leaves


def test_the_heap_does_not_grow_with_requests_that_find_what_is_there():
    tree = RadixTree(1)
    for index in range(20):
        add(tree, [index, 1, 2], [3 * index, 3 * index + 1, 3 * index + 2])
    for _ in range(100):
        for index in range(20):
            add(tree, [index, 1, 2], [-1, -1, -1])
    assert len(tree._leaves) == 20
    assert len(tree.evict(100)) == 60


@pytest.mark.parametrize(
    ("eviction", "order"), [("lru", [1, 2, 4, 3, 0]), ("lfu", [1, 4, 3, 2, 0]), ("priority", [3, 0, 1, 2, 4])]
)
def test_the_policy_decides_what_goes_first(eviction, order):
    tree = RadixTree(1, eviction)
    for index, priority in enumerate((-1, 0, 1, -1, 1)):
        add(tree, [index], [index], priority=priority)
    for index in (2, 0, 2, 4, 3, 0):
        add(tree, [index], [index], priority=-5)
    assert [tree.evict(1) for _ in range(6)] == [*([index] for index in order), []]


def test_a_request_that_goes_on_where_it_was_alone_makes_no_node():
    tree = RadixTree(1)
    token_ids = pack_ids(range(100))
    node, _ = tree.lock(token_ids, 0, "", 0)
    for at in range(0, 400, 40):
        node, _ = tree.advance(node, token_ids, at, at + 40, list(range(at // 4, at // 4 + 10)), 0)
    assert [node.pages.tolist() for node in tree.nodes()] == [list(range(100))]


def test_pages_added_to_an_old_prefix_do_not_inherit_its_uses_and_priority():
    tree = RadixTree(1, "priority")
    add(tree, [1], [0], priority=7)
    add(tree, [1, 2], [-1, 1], priority=0)
    assert [(node.uses, node.priority, node.pages.tolist()) for node in tree.nodes()] == [(2, 7, [0]), (1, 0, [1])]


def test_a_long_leaf_is_evicted_page_by_page_from_its_end():
    tree = RadixTree(1)
    add(tree, range(1000), list(range(1000)))
    assert [tree.evict(1) for _ in range(1000)] == [[page] for page in range(999, -1, -1)]
    assert not tree.roots
