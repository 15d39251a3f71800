from __future__ import annotations

from array import array
from typing import Any

from tokenmill.config import ResolvedConfig
from tokenmill.engine.fake import FakeEngine, FakeHandle, next_token
from tokenmill.sched.plan import StepPlan
from tokenmill.sched.request import Request
from tokenmill.sched.scheduler import Scheduler
from tokenmill.types import FinishReason, SamplingParams

VOCABULARY = 50
SCHEDULING = ("salt", "priority", "deadline", "tenant")


def make_config(**changes: Any) -> ResolvedConfig:
    """A small resolved config; max_model_len follows the pool unless given."""
    values: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "kv_dtype": "float32",
        "attention": "reference",
        "threads": 1,
        "page_size": 4,
        "num_pages": 64,
        "max_running": 8,
        "max_waiting": 10_000,
        "max_waiting_tokens": 1 << 30,
        "prefill_budget": 16,
        "policy": "fcfs",
        "batch_policy": "mixed",
        "loop": "serial",
        "prefix_cache": True,
        "eviction": "lru",
        "reserve_ratio": 0.0,
        "graph_max_batch": 0,
        "capture_first": False,
        "debug_checks": True,
    } | changes
    values.setdefault("max_model_len", values["num_pages"] * values["page_size"])
    return ResolvedConfig(**values)


def continuation(prompt, count):
    """What FakeEngine draws after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, VOCABULARY))
    return tokens[len(prompt) :]


def request_for(uid, prompt, output, end_ids=(), **options):
    """A request; `options` are sampling parameters, and what scheduling looks at."""
    ids = array("i", prompt)
    for_queue = {name: options.pop(name) for name in SCHEDULING if name in options}
    return Request(uid, ids, len(ids), len(ids) + output, SamplingParams(**options), frozenset(end_ids), **for_queue)


class Run:
    """A scheduler and a fake engine with up to `depth` plans out. `now` is the time of the next plan."""

    def __init__(self, depth=1, **changes):
        self.depth = depth
        self.config = make_config(**changes)
        self.scheduler = Scheduler(self.config)
        self.engine = FakeEngine(self.config, VOCABULARY)
        self.flights: list[tuple[StepPlan, FakeHandle]] = []
        self.plans: list[StepPlan] = []
        self.tokens: dict[int, list[int]] = {}
        self.endings: list[tuple[int, FinishReason]] = []
        self.admitted: list[tuple[int, int]] = []
        self.now = 0

    def add(self, uid, prompt, output, rate=0, **options):
        request = request_for(uid, prompt, output, **options)
        self.scheduler.add(request, self.now, rate)
        return request

    def plan(self):
        plan = self.scheduler.plan(self.now)
        self.endings += [(ending.uid, ending.reason) for ending in self.scheduler.take_ended()]
        if plan is not None:
            self.plans.append(plan)
            self.flights.append((plan, self.engine.launch(plan)))
        self.scheduler.check()
        return plan

    def commit(self):
        plan, handle = self.flights.pop(0)
        outcome = self.scheduler.commit(plan, handle.wait())
        self.admitted += outcome.admitted
        for uid, token in outcome.tokens:
            self.tokens.setdefault(uid, []).append(token)
        self.endings += [(ending.uid, ending.reason) for ending in outcome.finished]
        self.scheduler.check()

    def turn(self):
        plan = self.plan()
        if self.flights and (plan is None or len(self.flights) == self.depth):
            self.commit()

    def finish(self):
        for _ in range(10_000):
            if not self.scheduler.has_work:
                assert self.scheduler.cache.num_available == self.config.num_pages
                assert not self.scheduler._admission.ledger._present
                return
            self.turn()
        raise AssertionError("requests are left")
