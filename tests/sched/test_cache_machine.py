"""The prefix cache under random requests, pins, flushes and steps in flight, against naive searches of its content."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokenmill.errors import InvalidRequest
from tokenmill.sched.cache import PrefixCache
from tokenmill.sched.dump import Probe, as_text
from tokenmill.sched.radix import path, salt_of
from tokenmill.sched.windows import Lease
from tokenmill.wire.messages import pack_ids, unpack_ids

SALTS = st.sampled_from(["", "a"])
STREAMS = ([0] * 12, [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1] * 3, [1] * 12)
TOKENS = st.builds(lambda stream, end: stream[:end], st.sampled_from(STREAMS), st.integers(1, 12) | st.just(12))


class CacheMachine(RuleBasedStateMachine):
    """`written` tells which prefix's K/V each page holds, `written_window` which each window page does; `wanted_pins`
    when the pin of a prefix ends."""

    @initialize(
        page_size=st.integers(1, 3),
        num_pages=st.integers(4, 12),
        eviction=st.sampled_from(["lru", "lfu", "priority"]),
        window=st.sampled_from([0, 0, 1, 2, 4, 7]),
        num_window_pages=st.integers(4, 12),
    )
    def start(self, page_size, num_pages, eviction, window, num_window_pages):
        options = {"eviction": eviction, "window": window, "num_window_pages": num_window_pages}
        self.cache = PrefixCache(num_pages, page_size, **options)
        self.window, self.needed = window, -(-(window - 1) // page_size) if window else 0
        self.size = page_size
        self.leases: dict[int, tuple[Lease, str, list[int]]] = {}
        self.computed: dict[int, int] = {}
        self.written: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.written_window: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.flights: dict[int, dict[int, set[int]]] = {}
        self.wanted_pins: dict[tuple[str, tuple[int, ...]], int] = {}
        self.steps = self.uids = self.now = 0

    def contents(self):
        """Every prefix that the tree holds, with its page."""
        return self._contents("pages")

    def _contents(self, kind):
        found = {}
        for node in self.cache._tree.nodes():
            salt, ids = self.name_of(node)
            for index, page in enumerate(reversed(getattr(node, kind))):
                found[salt, ids[: len(ids) - index * self.size]] = page
        return found

    def name_of(self, node):
        """The salt and the ids of the prefix that ends at `node`."""
        return salt_of(node), tuple(unpack_ids(b"".join(step.key for step in reversed(list(path(node))))))

    def prefixes(self, salt, tokens):
        """The prefixes of `tokens` in whole pages, shortest first, as far as the tree holds them: a naive search."""
        contents, found = self.contents(), []
        for end in range(self.size, len(tokens) + 1, self.size):
            if (salt, tuple(tokens[:end])) not in contents:
                break
            found.append((salt, tuple(tokens[:end])))
        return found

    def usable(self, salt, tokens):
        """Those of `prefixes` that can be used: up to the last before which the window is held."""
        names, held = self.prefixes(salt, tokens), self._contents("window")
        if self.window:
            while names and not all(name in held for name in names[max(0, len(names) - self.needed) :]):
                names.pop()
        return names

    def held(self):
        """The prefixes that open requests use."""
        ends = [(salt, tokens, lease.shared) for lease, salt, tokens in self.leases.values()]
        return {(salt, tuple(tokens[: n * self.size])) for salt, tokens, end in ends for n in range(1, end + 1)}

    def pinned(self):
        return {(salt, ids[:n]) for salt, ids in self.wanted_pins for n in range(self.size, len(ids) + 1, self.size)}

    @precondition(lambda self: len(self.leases) < 3)
    @rule(salt=SALTS, tokens=TOKENS, priority=st.integers(-1, 1))
    def open(self, salt, tokens, priority):
        tokens = tokens[: self.cache.num_pages * self.size]
        names, contents = self.usable(salt, tokens[:-1]), self.contents()
        hit, available = self.cache.hit(pack_ids(tokens), salt)
        assert hit == len(names) * self.size
        protected = self.held() | self.pinned() if self.leases else set()
        assert available == sum(name not in protected for name in names)
        self.uids += 1
        lease = self.cache.open(self.uids, pack_ids(tokens), salt, priority)
        assert lease.pages == [contents[name] for name in names]
        self.leases[self.uids] = lease, salt, tokens
        self.computed[self.uids] = hit

    @precondition(lambda self: self.leases and len(self.flights) < 2)
    @rule(data=st.data())
    def compute(self, data, uid=None):
        """A step with a chunk of one request."""
        is_whole = uid is not None
        if uid is None:
            uid = data.draw(st.sampled_from(sorted(self.leases)))
        lease, salt, tokens = self.leases[uid]
        start = self.computed[uid]
        end = len(tokens) if is_whole else data.draw(st.integers(start, len(tokens)) | st.just(len(tokens)))
        missing = max(0, self.cache.num_pages_for(end) - len(lease.pages))
        protected = self.held() | (self.pinned() if len(self.leases) > 1 else set())
        room = self.cache.num_free + sum(name not in protected for name in self.contents())
        before = self.cache.dump(), self.cache.free_pages()
        pages, windows = self.cache.extend(lease, end, start, self.steps - 1), self.cache.windows
        if pages is None:
            assert missing > room or missing > windows.num_available
            assert windows or (self.cache.dump(), self.cache.free_pages()) == before
            return
        assert missing == len(pages) <= room
        still = {self.name_of(node) for node in self.cache._pins}
        lost = [name for name in self.wanted_pins if name not in still]
        if lost:
            assert len(self.leases) == 1, "a pin gave way to one of several requests"
            needs = len(pages) > room - len(self.pinned() - self.held())
            assert needs or windows, "a pin gave way without need"
            left = [until for name, until in self.wanted_pins.items() if name in still and name not in self.held()]
            assert windows or max(self.wanted_pins[name] for name in lost) <= min(left, default=10**9)
        for name in lost:
            del self.wanted_pins[name]
        self.computed[uid] = end
        for index in range(start // self.size, len(lease.pages)):
            self.written[lease.pages[index]] = (salt, tuple(tokens[: min(end, (index + 1) * self.size)]))
        if windows:
            for index in range(start // self.size, len(lease.window)):
                self.written_window[lease.window[index]] = (salt, tuple(tokens[: min(end, (index + 1) * self.size)]))
            for index in range(max(0, start + 1 - self.window) // self.size, len(lease.window)):
                name = salt, tuple(tokens[: min(end, (index + 1) * self.size)])
                assert self.written_window[lease.window[index]] == name, "a step attends to other K/V"
        self.flights[self.steps] = {uid: set(lease.pages)}
        self.steps += 1

    @precondition(lambda self: self.flights)
    @rule(is_shared=st.booleans())
    def commit(self, is_shared):
        step = min(self.flights)
        for uid in self.flights.pop(step):
            lease, _, tokens = self.leases[uid]
            done = self.computed[uid]
            if is_shared and not any(uid in flight for flight in self.flights.values()):
                self.cache.share(lease, pack_ids(tokens), done, self.steps - 1)
                assert lease.shared == done // self.size
        self.cache.retire(step)

    @precondition(lambda self: len(self.leases) < 3)
    @rule(salt=SALTS, tokens=TOKENS, priority=st.integers(-1, 1), data=st.data())
    def come_and_go(self, salt, tokens, priority, data):
        """A request that is computed at once, if there is room, and ends."""
        self.open(salt, tokens, priority)
        while self.flights:
            self.commit(True)
        self.compute(data, self.uids)
        self.close(data, self.uids)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def close(self, data, uid=None):
        while self.flights:
            self.commit(True)
        if uid is None:
            uid = data.draw(st.sampled_from(sorted(self.leases)))
        lease, salt, tokens = self.leases.pop(uid)
        first = len(lease.window) and lease.first
        self.cache.close(uid, pack_ids(tokens), self.computed[uid])
        assert len(self.prefixes(salt, tokens)) >= self.computed[uid] // self.size
        whole = self.computed[uid] // self.size
        assert whole - first < min(whole, self.needed) or len(self.usable(salt, tokens)) >= whole

    @precondition(lambda self: self.cache.num_cached)
    @rule(data=st.data(), time=st.integers(0, 30))
    def pin(self, data, time):
        salt, tokens = data.draw(st.sampled_from(sorted(self.contents())))
        tokens += data.draw(st.sampled_from([(), (0,) * self.size, (1,)]))
        names = self.usable(salt, tokens)
        try:
            count = self.cache.pin(pack_ids(tokens), salt, self.now + time)
        except InvalidRequest:
            most = self.cache.windows and self.cache.windows.num_pages // 2 // max(1, self.needed)
            is_full = self.cache.windows and len(self.wanted_pins) >= most
            assert is_full or len(self.pinned().union(names)) > self.cache.num_pages // 2
            return
        assert count == len(names) * self.size
        if names:
            self.wanted_pins[names[-1]] = max(self.wanted_pins.get(names[-1], 0), self.now + time)

    @precondition(lambda self: self.wanted_pins)
    @rule(data=st.data())
    def unpin(self, data):
        salt, tokens = data.draw(st.sampled_from(sorted(self.contents())))
        mine = [name for name in self.prefixes(salt, tokens) if name in self.wanted_pins]
        assert self.cache.unpin(pack_ids(tokens), salt) == (len(mine[-1][1]) if mine else 0)
        if mine:
            del self.wanted_pins[mine[-1]]

    @precondition(lambda self: self.wanted_pins)
    @rule(time=st.integers(0, 10))
    def expire(self, time):
        self.now += time
        self.cache.expire(self.now)
        self.wanted_pins = {name: until for name, until in self.wanted_pins.items() if until > self.now}

    @precondition(lambda self: self.cache.num_free < 2)
    @rule(salt=st.sampled_from([None, "", "a"]), with_pins=st.booleans())
    def flush(self, salt, with_pins):
        if with_pins:
            self.wanted_pins = {name: until for name, until in self.wanted_pins.items() if salt not in (None, name[0])}
        before, keep = self.contents(), self.held() | self.pinned()
        gone = [name for name in before if salt in (None, name[0]) and name not in keep]
        assert self.cache.flush(salt, with_pins=with_pins) == len(gone)
        assert self.contents().keys() == before.keys() - set(gone)

    @rule(salt=SALTS, tokens=TOKENS)
    def probe(self, salt, tokens):
        names = self.usable(salt, tokens)
        before = self.cache.dump()
        assert self.cache.probe(pack_ids(tokens), salt) == Probe(
            known=self.size * len(names),
            hit=self.cache.hit(pack_ids(tokens), salt)[0],
            pinned=self.size * sum(name in self.pinned() for name in names),
            in_use=self.size * sum(name in self.held() for name in names),
        )
        assert self.cache.dump() == before

    @rule(max_nodes=st.integers(0, 12), max_depth=st.integers(0, 4))
    def dump(self, max_nodes, max_depth):
        dump = self.cache.dump(max_nodes=max_nodes, max_depth=max_depth)
        assert as_text(dump).count("\n") <= 1 + 2 * max_nodes + 1
        nodes, level, depth = [], dump["roots"], 0
        while level:
            assert depth <= max_depth
            nodes += level
            level, depth = [child for node in level for child in node["children"]], depth + 1
        assert len(nodes) <= max_nodes
        if not dump["omitted"] and not any(node["omitted"] for node in nodes):
            tokens = [node["tokens"] for node in nodes if "tokens" in node]
            assert sum(tokens) == dump["tree"] * self.size
            assert sum(node["pinned_until"] is not None for node in nodes if "tokens" in node) == dump["pins"]

    @invariant()
    def pages_are_right(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        owners = self.cache.pages_by_owner()
        assert sum(owners[name] for name in ("free", "tree", "private", "fence")) == self.cache.num_pages
        contents = self.contents()
        assert all(self.written[page] == name for name, page in contents.items()), "a prefix leads to other K/V"
        window = self._contents("window")
        assert all(self.written_window[page] == name for name, page in window.items()), "a prefix has another's window"
        assert self.held() <= contents.keys()
        assert self.pinned() <= contents.keys(), "a pinned prefix is gone"
        assert {self.name_of(node): until for node, until in self.cache._pins.items()} == self.wanted_pins
        assert len(self.pinned()) == owners["pinned"]
        free = set(self.cache.free_pages())
        assert all(pages.isdisjoint(free) for flight in self.flights.values() for pages in flight.values())


CacheMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestCache = CacheMachine.TestCase
