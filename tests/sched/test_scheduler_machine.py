"""The real scheduler with FakeEngine under random arrivals, aborts, deadlines, pins, policies and pool sizes.

MACHINE_EXAMPLES=50000 in the environment makes the run longer.
"""

from __future__ import annotations

import os
import sys
from array import array
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.sched.support import make_config
from tokenmill.config import SPARE_WINDOW_PAGES
from tokenmill.engine.fake import HASH_FACTOR, FakeEngine, FakeHandle
from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.sched.plan import StepPlan
from tokenmill.sched.policy import POLICIES
from tokenmill.sched.request import Request
from tokenmill.sched.scheduler import Scheduler
from tokenmill.types import FinishReason, SamplingParams
from tokenmill.wire.messages import pack_ids

VOCABULARY = 16
HOSTILE = Path(__file__).with_name("hostile_policy.py")
PARAMS = SamplingParams()
END_IDS = frozenset({3})


def draws(prompt, output, end_ids):
    """What FakeEngine draws after a prompt."""
    state = 17
    for token in prompt:
        state = (state * HASH_FACTOR + token + 1) % 2**61
    drawn = []
    while len(drawn) < output and not (drawn and drawn[-1] in end_ids):
        drawn.append(state % VOCABULARY)
        state = (state * HASH_FACTOR + drawn[-1] + 1) % 2**61
    return drawn


START = {
    "page_size": [1, 2, 16, 64],
    "pool": range(8, 81),
    "max_running": [1, 3, 5, 8],
    "budget": [1, 3, 7, 64],
    "batch": ["mixed", "prefill-first"],
    "policy": [*POLICIES, f"{HOSTILE}:fickle", f"{HOSTILE}:mixed", f"{HOSTILE}:BOTH"],
    "eviction": ["lru", "lfu", "priority"],
    "prefix_cache": [True, True, False],
    "reserve": [0.0, 0.0, 0.3, 1.0],
    "learns": [True, False],
    "limit": [200, 100_000, 100_000],
    "window": [0, 0, 2, 3, 7, 20],
    "kinds": ["both", "window"],
    "window_pool": range(12),
}
ADD = {
    "length": range(1, 31),
    "output": range(1, 31),
    "fork": range(31),
    "stops": [True, False],
    "time": [None, None, None, -1, 0, 1, 20, 100],
    "rate": [0, 0, 1000],
    "whose": range(9),
    "copies": [1, 1, 2, 4],
}
ABORT = {"which": range(50)}
WAIT = {"time": range(1, 31)}
PIN = {"fork": range(31), "time": range(61)}
TURN = {"depth": [1, 2], "times": range(1, 9)}


def drawn(spaces):
    return {name: st.sampled_from(space) for name, space in spaces.items()}


class SchedulerMachine(RuleBasedStateMachine):
    """Launches and commits as the overlap loop may: at most two plans out, committed in order."""

    @initialize(**drawn(START))
    def start(
        self, page_size, pool, max_running, budget, batch, policy, eviction, prefix_cache, reserve, learns, limit,
        window, kinds, window_pool,
    ):  # fmt: skip
        self.scale = scale = max(1, page_size // 8)
        num_pages = max(1, pool * scale // page_size)
        self.window = window = window * scale
        least = min(-(-window // page_size) + SPARE_WINDOW_PAGES, num_pages)
        self.config = make_config(
            page_size=page_size,
            num_pages=num_pages * (1 if kinds == "both" or not window else 1 + max_running),
            max_model_len=num_pages * page_size,
            window=window,
            num_window_pages=least + window_pool if window else 0,
            has_full_kind=kinds == "both" or not window,
            max_running=max_running,
            prefill_budget=budget,
            batch_policy=batch,
            policy=policy,
            eviction=eviction,
            prefix_cache=prefix_cache,
            reserve_ratio=reserve,
            max_waiting_tokens=limit,
        )
        self.scheduler = Scheduler(self.config)
        if not learns:
            self.scheduler._admission.estimate._move = lambda *_: None
        self.engine = FakeEngine(self.config, VOCABULARY)
        self.flights: list[tuple[StepPlan, FakeHandle]] = []
        self.expected: dict[int, list[int]] = {}
        self.drawn: dict[int, list[int]] = {}
        self.deadlines: dict[int, int] = {}
        self.now = self.next_uid = self.num_tokens = 0
        self.was_pinned = False
        self.page_table: dict[tuple[int, int], dict[int, int]] = {}
        self.named: dict[int, tuple[set[int], set[int]]] = {}  # full and window pages of steps in flight

    @rule(**drawn(ADD))
    def add(self, copies, **options):
        for _ in range(copies):
            self.add_one(**options)

    def add_one(self, length, output, fork, stops, time, rate, whose):
        length = min(self.scale * length, self.config.max_model_len - 1)
        output = min(output, self.config.max_model_len - length)
        prompt = [i % 5 if i < self.scale * fork else 9 for i in range(length)]
        end_ids = END_IDS if stops else frozenset()
        uid, self.next_uid = self.next_uid, self.next_uid + 1
        request = Request(uid, array("i", prompt), length, length + output, PARAMS, end_ids)
        request.priority, request.tenant, request.salt = whose % 3 - 1, "ab"[: whose % 2], "s"[: whose // 6]
        request.deadline = None if time is None else self.now + time
        waiting, running = self.scheduler.num_waiting_tokens, self.scheduler.num_running
        is_full = waiting > 0 and waiting + length > self.config.max_waiting_tokens
        refusal = None
        try:
            self.scheduler.add(request, self.now, rate)
        except TokenmillError as error:
            refusal = getattr(error, "reason", "deadline")
        if refusal is not None or is_full:
            assert refusal == ("tokens" if is_full else "deadline")
            assert is_full or time <= 0 or rate
            return
        assert time is None or time > 0
        self.expected[uid], self.drawn[uid] = draws(prompt, output, end_ids), []
        self.num_tokens += length + output
        if request.deadline is not None:
            self.deadlines[uid] = request.deadline
        assert self.scheduler.num_running == running

    @precondition(lambda self: self.expected)
    @rule(**drawn(ABORT))
    def abort(self, which):
        uid = sorted(self.expected)[which % len(self.expected)]
        assert self.scheduler.abort(uid)
        assert not self.scheduler.abort(uid)
        del self.expected[uid]

    @rule(**drawn(WAIT))
    def wait(self, time):
        self.now += time

    @rule(**drawn(PIN))
    def pin(self, fork, time):
        tokens = pack_ids(i % 5 for i in range(self.scale * fork))
        with suppress(InvalidRequest):
            self.was_pinned |= self.scheduler.cache.pin(tokens, "", self.now + time) > 0

    @rule()
    def flush(self):
        self.scheduler.cache.flush()

    @precondition(lambda self: len(self.flights) < 2)
    @rule()
    def plan(self):
        plan = self.scheduler.plan(self.now)
        for ending in self.scheduler.take_ended():
            assert ending.reason is FinishReason.DEADLINE
            assert self.deadlines.pop(ending.uid) <= self.now
            self.expect_no_more(ending.uid)
        assert all(self.deadlines.get(uid, self.now + 1) > self.now for uid in self.expected)
        if plan is None:
            return
        assert sum(row.length for row in plan.rows if row.length > 1) <= self.config.prefill_budget
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        for row in plan.rows:
            request = self.scheduler._requests[row.uid]
            assert row.start + row.length < request.max_len, "the last token needs no K/V"
            assert row.start >= request.lease.shared * self.config.page_size, "a row writes to the tree's pages"
        page_size = self.config.page_size
        self.flights.append((plan, self.engine.launch(plan)))
        for update in plan.page_updates:
            table = self.page_table.setdefault((update.kind + 1 - self.config.has_full_kind, update.slot), {})
            table.update(enumerate(update.pages, update.first))
        self.named[plan.step] = set(), set()
        for row in plan.rows:
            end = (row.start + row.length - 1) // page_size + 1
            kinds = ((0, 0),) if self.config.has_full_kind else ()
            if self.window:
                kinds += ((1, max(0, row.start + 1 - self.window) // page_size),)
            for kind, first in kinds:
                self.named[plan.step][kind].update(self.page_table[kind, row.slot][i] for i in range(first, end))

    def expect_no_more(self, uid):
        """A request was ended in mid-course: what it drew so far is right."""
        tokens = self.expected.pop(uid)
        assert self.drawn[uid] == tokens[: len(self.drawn[uid])]

    @precondition(lambda self: self.flights)
    @rule()
    def commit(self):
        plan, handle = self.flights.pop(0)
        del self.named[plan.step]
        outcome = self.scheduler.commit(plan, handle.wait())
        for uid, token in outcome.tokens:
            self.drawn[uid].append(token)
        for ending in outcome.finished:
            assert self.drawn[ending.uid] == self.expected.pop(ending.uid)
            assert ending.reason in (FinishReason.STOP, FinishReason.LENGTH)

    @rule(**drawn(TURN))
    def turn(self, depth, times):
        for _ in range(times):
            before = len(self.flights)
            if before < depth:
                self.plan()
            if self.flights and len(self.flights) in (before, depth):
                self.commit()
            self.owners_are_right()

    @invariant()
    def owners_are_right(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            assert not self.scheduler.counters.retractions or self.config.reserve_ratio < 1 or self.was_pinned
            windows = self.scheduler.cache.windows
            for pages, window in self.named.values():
                assert pages.isdisjoint(self.scheduler.cache.free_pages()), "a page in flight is free"
                assert not window or window.isdisjoint(windows.pool.free_pages()), "a window page in flight is free"

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        most, depth = 100 + 20 * self.num_tokens, 1 + self.now % 2
        for _ in range(most):
            if not self.scheduler.has_work:
                break
            self.turn(depth, 1)
        assert not self.scheduler.has_work, "requests are left"
        assert not self.expected
        assert self.scheduler.cache.num_available == self.config.num_pages
        if self.window:
            self.scheduler.cache.flush(with_pins=True)
            assert self.scheduler.cache.windows.pool.num_free == self.config.num_window_pages


EXAMPLES = int(os.environ.get("MACHINE_EXAMPLES", "1000"))
PARTS = 8

parts = pytest.mark.parametrize("part", range(PARTS))


@pytest.fixture(autouse=True)
def without_coverage():
    """Coverage would take most of the time here, and other tests reach the same lines."""
    trace = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(trace)


@parts
def test_machine(part):
    each = settings(max_examples=-(-EXAMPLES // PARTS), stateful_step_count=200, deadline=None)
    run_state_machine_as_test(SchedulerMachine, settings=each)


@parts
def test_storms(part):
    """The same with seeds in place of hypothesis, whose examples are often much alike."""
    for seed in range(part, EXAMPLES // 2, PARTS):
        rng = Random(seed)
        machine = SchedulerMachine()

        def pick(spaces, rng=rng):
            return {name: rng.choice(space) for name, space in spaces.items()}

        machine.start(**pick(START))
        for _ in range(200):
            kind = rng.random()
            if kind < 0.2:
                machine.add(**pick(ADD))
            elif kind < 0.23 and machine.expected:
                machine.abort(**pick(ABORT))
            elif kind < 0.26:
                machine.wait(**pick(WAIT))
            elif kind < 0.29:
                machine.pin(**pick(PIN))
            elif kind < 0.3:
                machine.flush()
            elif kind < 0.7:
                machine.turn(rng.choice((1, 2)), 1)
            elif kind < 0.85 and len(machine.flights) < 2:
                machine.plan()
            elif machine.flights:
                machine.commit()
            machine.owners_are_right()
        machine.teardown()
