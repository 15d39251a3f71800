"""Graphs change no id: steps replayed with padding, in another order, or run eagerly for want of a graph."""

from __future__ import annotations

import gc
import weakref
from array import array

import pytest
import torch

from tests.sched.support import make_config
from tests.support.graphs import CapturableAttention, RerunDevice
from tokenmill.engine.device import CpuDevice
from tokenmill.engine.engine import ModelEngine
from tokenmill.models.load import random_model
from tokenmill.ops.select import make_ops
from tokenmill.parallel.group import Group
from tokenmill.sched.plan import PageUpdate, Row, StepPlan
from tokenmill.sched.scheduler import Scheduler
from tokenmill.spec import ModelSpec
from tokenmill.text.grammar import Matchers, Vocabulary
from tokenmill.types import SamplingParams, StructuredOutputs
from tokenmill.wire.channel import MemoryChannel
from tokenmill.wire.messages import GenerateJob, TextOptions, pack_ids, unpack_ids
from tokenmill.worker.core import Core
from tokenmill.worker.loop import make_loop

SPEC = ModelSpec("llama", 97, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_position=256)
PARAMS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.9, seed=1),
    SamplingParams(temperature=0.9, seed=2, top_p=0.8, top_k=20),
    SamplingParams(temperature=0, logit_bias={5: 8.0}, min_tokens=3),
    SamplingParams(temperature=0, repetition_penalty=1.5, presence_penalty=0.7),
    SamplingParams(temperature=0.9, seed=3, frequency_penalty=1.5, bad_words=[[5, 5], [7], [8, 9, 10]]),
    SamplingParams(temperature=0.9, seed=4, top_p=0.8, allowed_token_ids=[*range(20, 60)]),
    SamplingParams(temperature=0.9, seed=5, structured_outputs=StructuredOutputs(regex="([a-z] ?){3,9}!")),
)
LETTERS = Vocabulary([bytes([32 + i]) for i in range(SPEC.vocab_size)] + [b"<end>"], [3, SPEC.vocab_size], [3])


def open_engine(config, device, **hooks):
    attention = [CapturableAttention(scale=SPEC.head_dim**-0.5, token_elements=SPEC.num_kv_heads * SPEC.head_dim)]
    ops = make_ops("reference")
    with torch.inference_mode():
        model = random_model(SPEC, dtype=torch.float32, group=Group.solo(), attention=attention, ops=ops)
    return ModelEngine(model, ops, attention, config, device, matchers=Matchers(lambda: LETTERS), **hooks)


def generate(config, device, prompts, params, records=None):
    """Drive the real loop; ids by request, and records of logprobs. Requests join while others decode."""
    engine = open_engine(config, device)
    inbox, out = MemoryChannel(), MemoryChannel()
    scheduler = Scheduler(config)
    loop = make_loop(Core(scheduler, inbox, out, MemoryChannel()), engine)
    tokens = {uid: [] for uid in range(len(prompts))}
    waiting = list(enumerate(prompts))
    while waiting or scheduler.has_work:
        for uid, prompt in waiting[:2]:
            job = GenerateJob(
                uid=uid, token_ids=pack_ids(prompt), params=params[uid % len(params)], max_tokens=6 + uid % 5,
                end_ids=[3], text=TextOptions(),
            )  # fmt: skip
            inbox.send(job)
        del waiting[:2]
        assert loop.turn()
        for message in out.receive():
            ids = iter(unpack_ids(getattr(message, "token_ids", b"")))
            for uid, count in zip(getattr(message, "uids", ()), getattr(message, "counts", ()), strict=True):
                tokens[uid].extend(next(ids) for _ in range(count))
            for uid, record in getattr(message, "logprobs", {}).items():
                records[uid] = records.get(uid, b"") + record
            for uid, (first, record) in getattr(message, "prompt_logprobs", {}).items():
                records[uid, first] = record
    engine.close()
    return tokens


PROMPTS = [[(7 * uid + 3 * place) % 97 for place in range(1 + uid * 5 % 23)] for uid in range(12)]


@pytest.mark.parametrize("loop", ["serial", "overlap"])
@pytest.mark.parametrize(
    "params", [PARAMS[:1], PARAMS[:2], PARAMS[:3], PARAMS], ids=["greedy", "plain", "filtered", "adjusted"]
)
def test_replayed_steps_give_the_ids_of_eager_ones(loop, params):
    options = {"loop": loop, "num_pages": 256, "max_running": 8, "max_model_len": 64}
    expected = generate(make_config(**options), CpuDevice(1), PROMPTS, params)
    for most in (1, 6, 8):
        device = RerunDevice()
        assert generate(make_config(**options, graph_max_batch=most), device, PROMPTS, params) == expected
        assert device.num_replays > 0


@pytest.mark.parametrize("loop", ["serial", "overlap"])
def test_logprobs_of_replayed_steps_are_those_of_eager_ones(loop):
    params = (
        SamplingParams(temperature=0, logprobs=2),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.9, seed=1, logprobs=0, presence_penalty=1.0),
        SamplingParams(temperature=0, logprobs=4, prompt_logprobs=1),
        SamplingParams(temperature=0, prompt_logprobs=3),
    )
    options = {"loop": loop, "num_pages": 256, "max_running": 8, "max_model_len": 64, "prefill_budget": 9}
    expected, found, device = {}, {}, RerunDevice()
    ids = generate(make_config(**options), CpuDevice(1), PROMPTS, params, expected)
    assert generate(make_config(**options, graph_max_batch=8), device, PROMPTS, params, found) == ids
    assert device.num_replays > 0
    assert expected.keys() >= {uid for uid in range(12) if uid % 5 not in (1, 4)}
    assert {uid for uid, _ in filter(lambda key: isinstance(key, tuple), expected)} == {3, 4, 8, 9}
    for uid in range(12):
        if (top := params[uid % 5].logprobs) is not None:
            assert len(expected[uid]) == 4 * (2 + 2 * top) * len(ids[uid])
    assert joined(found) == pytest.approx(joined(expected), abs=1e-4)


def joined(records):
    """Numbers by request and place: prompts are computed in other chunks when steps have other rows."""
    drawn = {uid: record for uid, record in records.items() if isinstance(uid, int)}
    prompts = {}
    for uid, first in sorted(key for key in records if isinstance(key, tuple)):
        prompts[uid] = prompts.get(uid, b"") + records[uid, first]
    return [number for record in (*drawn.values(), *prompts.values()) for number in array("f", record)]


@pytest.mark.parametrize("room", [0, 1, 2])
def test_steps_for_which_memory_lacks_graphs_are_run_eagerly_or_by_larger_ones(room):
    options = {"loop": "overlap", "num_pages": 256, "max_running": 8, "max_model_len": 64}
    expected = generate(make_config(**options), CpuDevice(1), PROMPTS, PARAMS)
    device = RerunDevice(room)
    assert generate(make_config(**options, graph_max_batch=8), device, PROMPTS, PARAMS) == expected
    assert device.num_captures == room


def test_nothing_is_captured_for_steps_with_rows_that_no_graph_takes(monkeypatch):
    monkeypatch.setattr(CapturableAttention, "longest_row", 7)
    device, captured = RerunDevice(), []
    engine = open_engine(make_config(graph_max_batch=8, num_pages=64), device)
    engine._mixed._budget._clock = lambda: 1e9  # captures are due
    for length in (8, 7):
        row = Row(0, 0, 0, length, (5,) * length, True)
        engine.launch(StepPlan(0, (row,), page_updates=(PageUpdate(0, 0, (1, 2)),))).wait()
        captured.append(device.num_captures)
    assert captured == [0, 1]
    engine.close()


def test_every_graph_is_captured_when_there_is_nothing_else_to_do():
    device = RerunDevice()
    engine = open_engine(make_config(graph_max_batch=8), device)
    assert [engine.prepare() for _ in range(6)] == [True] * 4 + [False] * 2
    assert device.num_captures == 4
    engine.close()


def test_nothing_is_captured_before_it_may_be():
    device, may_capture = RerunDevice(), False
    engine = open_engine(make_config(graph_max_batch=8), device, may_capture=lambda: may_capture)
    plan = StepPlan(0, (Row(0, 0, 0, 1, (5,), True),), is_decode=True)
    engine.launch(plan).wait()
    assert engine.prepare()  # asks to be called again
    assert device.num_captures == 0
    may_capture = True
    assert engine.prepare()
    assert device.num_captures == 1
    engine.close()


def test_closing_ends_what_goes_on_behind():
    closed = []
    open_engine(make_config(), CpuDevice(1), at_close=lambda: closed.append(True)).close()
    assert closed == [True]


@pytest.mark.parametrize("most", [0, 8])
def test_a_closed_engine_needs_no_garbage_collection(most):
    engine = open_engine(make_config(graph_max_batch=most), RerunDevice())
    engine.prepare()
    alive = weakref.ref(engine)
    engine.close()
    gc.disable()
    try:
        del engine
        assert alive() is None
    finally:
        gc.enable()
