"""Scheduler and engine under random arrivals, aborts and captures: every request gets the ids that it gets alone."""

from __future__ import annotations

from array import array
from dataclasses import replace
from functools import cache

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.sched.support import make_config
from tests.support.graphs import CapturableAttention, RerunDevice
from tokenmill.config import SPARE_WINDOW_PAGES
from tokenmill.engine.device import CpuDevice
from tokenmill.engine.engine import ModelEngine
from tokenmill.models.load import random_model
from tokenmill.ops.select import make_ops
from tokenmill.parallel.group import Group
from tokenmill.sched.request import Request
from tokenmill.sched.scheduler import Scheduler
from tokenmill.spec import ModelSpec
from tokenmill.types import SamplingParams

SPEC = ModelSpec("llama", 61, 16, 24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, max_position=512)
WINDOW = 9
SPECS = {
    "full": SPEC,
    "window": replace(SPEC, window=WINDOW, window_layers=(0, 1)),
    "both": replace(SPEC, window=WINDOW, window_layers=(0,), attention_cap=2.0),
}
END_IDS = frozenset({3, 7, 11})
PARAMS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, min_tokens=4),
    SamplingParams(temperature=0, logit_bias={5: 4.0, 3: 2.0}),
    SamplingParams(seed=1),
    SamplingParams(seed=2, top_k=7),
    SamplingParams(seed=3, top_p=0.6, min_p=0.01),
    SamplingParams(seed=4, min_p=0.2, min_tokens=2),
    SamplingParams(seed=5, top_p=0.9, logit_bias={9: 3.0}),
    SamplingParams(temperature=0, repetition_penalty=1.6, presence_penalty=0.8),
    SamplingParams(seed=6, frequency_penalty=1.2, bad_words=[[5, 9], [8], [4, 4, 5]], logprobs=2),
    SamplingParams(seed=7, allowed_token_ids=[*range(20)], prompt_logprobs=1, repetition_penalty=0.7),
)


class Tables(CapturableAttention):
    """As on a GPU, rows of one token need room among those that draw."""

    def tables(self, layout, num_tokens, num_rows, spare_slot):
        has_room = layout.lengths.count(1) <= num_rows
        return super().tables(layout, num_tokens, num_rows, spare_slot) if has_room else None


@cache
def parts(kinds):
    spec = SPECS[kinds]
    options = {"scale": 0.5, "token_elements": 8, "cap": spec.attention_cap}
    attention = [Tables(**options, window=kind.window) for kind in spec.kv_kinds]
    ops = make_ops("reference")
    with torch.inference_mode():
        model = random_model(spec, dtype=torch.float64, group=Group.solo(), attention=attention, ops=ops)
    return model, ops, attention


def request_of(uid, prompt, output, params):
    return Request(uid, array("i", prompt), len(prompt), len(prompt) + output, params, END_IDS)


def window_config(kinds, num_window_pages):
    if kinds == "full":
        return {}
    return {"window": WINDOW, "num_window_pages": num_window_pages, "has_full_kind": kinds == "both"}


@cache
def ids_alone(kinds, prompt, output, params_index):
    """What one request draws, computed whole and step by step, without graphs."""
    sizes = {"page_size": 16, "num_pages": 32, **window_config(kinds, 32)}
    config = make_config(dtype="float64", prefill_budget=512, prefix_cache=False, **sizes)
    engine, scheduler, ids = ModelEngine(*parts(kinds), config, CpuDevice(1)), Scheduler(config), []
    scheduler.add(request_of(0, prompt, output, PARAMS[params_index]))
    while scheduler.has_work:
        plan = scheduler.plan()
        ids.extend(token for _, token in scheduler.commit(plan, engine.launch(plan).wait()).tokens)
    engine.close()
    return ids


class EngineMachine(RuleBasedStateMachine):
    """Launches and commits as the overlap loop may: at most two plans out, committed in order."""

    @initialize(data=st.data())
    def start(self, data):
        page_size = data.draw(st.sampled_from([1, 2, 16, 64]))
        max_running = data.draw(st.sampled_from([1, 3, 5, 8, 11]))
        self.kinds = data.draw(st.sampled_from(list(SPECS)))
        num_window_pages = -(-WINDOW // page_size) + SPARE_WINDOW_PAGES + data.draw(st.sampled_from([0, 5, 200]))
        config = make_config(
            device=data.draw(st.sampled_from(["cpu", "cuda"])),  # eager steps of the latter are padded
            dtype="float64",
            page_size=page_size,
            num_pages=-(-data.draw(st.sampled_from([130, 200, 500])) // page_size),
            max_running=max_running,
            prefill_budget=data.draw(st.sampled_from([1, 3, 16, 70, 512])),
            batch_policy=data.draw(st.sampled_from(["mixed", "prefill-first"])),
            prefix_cache=data.draw(st.booleans()),
            reserve_ratio=data.draw(st.sampled_from([0.0, 0.3])),
            graph_max_batch=data.draw(st.integers(1, max_running)),
            **window_config(self.kinds, num_window_pages),
        )
        self.may_capture = True
        device = RerunDevice(data.draw(st.sampled_from([0, 2, 1000])))
        self.engine = ModelEngine(*parts(self.kinds), config, device, may_capture=lambda: self.may_capture)
        budget = self.engine._graphs._budget
        budget._began, budget._clock = -1.0, lambda: 0.0  # steps may wait for captures, which take no time
        self.scheduler = Scheduler(config)
        self.flights, self.expected, self.drawn, self.num_added = [], {}, {}, 0

    @rule(
        fork=st.integers(0, 100),
        more=st.one_of(st.integers(0, 3), st.integers(0, 60)),
        output=st.integers(1, 12),
        params=st.integers(0, len(PARAMS) - 1),
    )
    def add(self, fork, more, output, params):
        uid, self.num_added = self.num_added, self.num_added + 1
        prompt = (*(i * i % 53 for i in range(fork)), *((uid + i) % 59 for i in range(more))) or (1,)
        if len(prompt) + output > self.scheduler.config.max_model_len:
            return
        self.expected[uid], self.drawn[uid] = ids_alone(self.kinds, prompt, output, params), []
        self.scheduler.add(request_of(uid, prompt, output, PARAMS[params]))

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data):
        uid = data.draw(st.sampled_from(sorted(self.expected)))
        assert self.scheduler.abort(uid)
        del self.expected[uid]

    @precondition(lambda self: not self.flights)
    @rule(may_capture=st.booleans())
    def prepare(self, may_capture):
        self.may_capture = True
        self.engine.prepare()
        self.may_capture = may_capture

    @precondition(lambda self: len(self.flights) < 2)
    @rule()
    def launch(self):
        plan = self.scheduler.plan()
        if plan is not None:
            self.flights.append((plan, self.engine.launch(plan)))

    @precondition(lambda self: self.flights)
    @rule()
    def commit(self):
        plan, handle = self.flights.pop(0)
        outcome = self.scheduler.commit(plan, handle.wait())
        self.scheduler.check()
        for uid, token in outcome.tokens:
            self.drawn[uid].append(token)
            if uid in self.expected:
                assert self.drawn[uid] == self.expected[uid][: len(self.drawn[uid])]
        for ending in outcome.finished:
            assert self.drawn[ending.uid] == self.expected.pop(ending.uid)

    @rule(depth=st.integers(1, 2), turns=st.integers(1, 30))
    def serve(self, depth, turns):
        for _ in range(turns):
            before = len(self.flights)
            if before < depth:
                self.launch()
            if self.flights and len(self.flights) in (before, depth):
                self.commit()

    def teardown(self):
        if hasattr(self, "engine"):
            while self.scheduler.has_work:
                self.serve(2, 1)
            assert not self.expected
            self.engine.close()


EngineMachine.TestCase.settings = settings(max_examples=45, stateful_step_count=25, deadline=None)
TestEngine = EngineMachine.TestCase
