"""The real scheduler with FakeEngine under random arrivals, aborts, budgets and pool sizes."""

from __future__ import annotations

from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.sched.support import make_config
from tokenmill.engine.fake import FakeEngine, FakeHandle, next_token
from tokenmill.sched.plan import StepPlan
from tokenmill.sched.request import Request
from tokenmill.sched.scheduler import Scheduler
from tokenmill.types import FinishReason, SamplingParams

VOCABULARY = 16


class SchedulerMachine(RuleBasedStateMachine):
    """Launches and commits as the overlap loop may: at most two plans out, committed in order."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16]),
        pool=st.integers(12, 80),
        budget=st.sampled_from([1, 3, 7, 64]),
        max_running=st.integers(1, 6),
        policy=st.sampled_from(["mixed", "prefill-first"]),
        prefix_cache=st.booleans(),
        reserve=st.sampled_from([0.0, 0.3, 1.0]),
    )
    def start(self, page_size, pool, budget, max_running, policy, prefix_cache, reserve):
        self.config = make_config(
            page_size=page_size,
            num_pages=max(1, pool // page_size),
            max_running=max_running,
            prefill_budget=budget,
            batch_policy=policy,
            prefix_cache=prefix_cache,
            reserve_ratio=reserve,
        )
        self.scheduler = Scheduler(self.config)
        self.engine = FakeEngine(self.config, VOCABULARY)
        self.flights: list[tuple[StepPlan, FakeHandle]] = []
        self.expected: dict[int, list[int]] = {}
        self.drawn: dict[int, list[int]] = {}
        self.next_uid = 0
        self.page_table: dict[int, dict[int, int]] = {}
        self.named: dict[int, set[int]] = {}

    @rule(length=st.integers(1, 30), output=st.integers(1, 20), fork=st.integers(0, 30), stops=st.booleans())
    def add(self, length, output, fork, stops):
        limit = self.config.max_model_len
        length = min(length, limit - 1)
        output = min(output, limit - length)
        if length < 1 or output < 1:
            return
        prompt = [i % 5 if i < fork else 9 for i in range(length)]
        end_ids = frozenset({3}) if stops else frozenset()
        uid = self.next_uid
        self.next_uid += 1
        tokens = list(prompt)
        for _ in range(output):
            tokens.append(next_token(tokens, VOCABULARY))
            if tokens[-1] in end_ids:
                break
        self.expected[uid] = tokens[length:]
        self.drawn[uid] = []
        self.scheduler.add(Request(uid, array("i", prompt), length, length + output, SamplingParams(), end_ids))

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data):
        uid = data.draw(st.sampled_from(sorted(self.expected)))
        assert self.scheduler.abort(uid)
        assert not self.scheduler.abort(uid)
        del self.expected[uid]

    @precondition(lambda self: len(self.flights) < 2)
    @rule()
    def plan(self):
        plan = self.scheduler.plan()
        if plan is not None:
            assert sum(row.length for row in plan.rows if row.length > 1) <= self.config.prefill_budget
            assert len({row.slot for row in plan.rows}) == len(plan.rows)
            for row in plan.rows:
                request = self.scheduler._requests[row.uid]
                assert row.start + row.length < request.max_len, "the last token needs no K/V"
                assert row.start >= request.lease.shared * self.config.page_size, "a row writes to the tree's pages"
            self.flights.append((plan, self.engine.launch(plan)))
            for update in plan.page_updates:
                table = self.page_table.setdefault(update.slot, {})
                table.update(enumerate(update.pages, update.first))
            last = {row.slot: (row.start + row.length - 1) // self.config.page_size for row in plan.rows}
            self.named[plan.step] = {self.page_table[slot][i] for slot, end in last.items() for i in range(end + 1)}

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

    @rule(depth=st.integers(1, 2))
    def finish_everything(self, depth):
        for _ in range(100_000):
            if not self.scheduler.has_work:
                break
            before = len(self.flights)
            if before < depth:
                self.plan()
            if len(self.flights) in (before, depth):
                assert self.flights, "requests are left but nothing can be planned"
                self.commit()
            self.owners_are_right()
        assert not self.scheduler.has_work
        assert not self.expected
        assert self.scheduler.cache.num_available == self.config.num_pages

    @invariant()
    def owners_are_right(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            assert not self.scheduler.counters.retractions or self.config.reserve_ratio < 1
            for pages in self.named.values():
                assert pages.isdisjoint(self.scheduler.cache.free_pages()), "a page in flight is free"

    def teardown(self):
        if hasattr(self, "scheduler"):
            self.finish_everything(2)


SchedulerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestScheduler = SchedulerMachine.TestCase
