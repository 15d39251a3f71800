"""The engine on a GPU: the CPU's ids whatever the path, graphs captured behind live traffic, no waiting on the way."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from tests.support.families import FAMILIES, make_family
from tests.support.harness import Harness
from tests.support.tiny_models import make_tiny_llama, write_byte_tokenizer
from tokenmill import LLM, SamplingParams
from tokenmill.attention.select import make_backends
from tokenmill.engine.device import CudaDevice
from tokenmill.engine.graphs import batch_sizes
from tokenmill.models.load import load_model
from tokenmill.ops.select import make_ops
from tokenmill.parallel.group import Group
from tokenmill.weights.checkpoint import open_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ARCHITECTURES = ["LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "mistral", "gemma3"]
PATIENCE = 120  # seconds for kernels that are compiled beside
NUMBERS = 1 << 24  # of a tensor that has a segment of its own
OPTIONS = {"device": "cuda", "dtype": "float32", "num_pages": 4096, "max_running": 32, "graph_max_batch": 24}
PROMPTS = [[5 + (7 * i + j * j) % 250 for j in range(1 + 5 * i % 97)] for i in range(40)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=6 + 2 * (i % 9), ignore_eos=True)
    if i % 4
    else SamplingParams(temperature=0.8, seed=i, max_tokens=20, ignore_eos=True, top_p=0.9 if i % 8 else 1.0)
    for i in range(40)
]

# What differs between the two, weights of heads' norms, needs no test of each path.
one_architecture = pytest.mark.parametrize("tiny", ARCHITECTURES[1:2], indirect=True)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def tiny(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param not in FAMILIES:
        return make_tiny_llama(folder, architecture=request.param, head_dim=64)
    write_byte_tokenizer(make_family(folder, request.param))
    return folder


@pytest.fixture(scope="module")
def truth(tiny):
    """Each request alone on the CPU."""
    with LLM(tiny, device="cpu", dtype="float32", loop="serial", max_running=1, prefix_cache=False) as llm:
        return generate(llm)


@pytest.fixture(scope="module")
def ready(tiny):
    """All kernels are there, and the graphs of plain draws."""
    with LLM(tiny, capture_first=True, prefix_cache=False, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def device():
    device = CudaDevice()
    yield device
    device.close()


def generate(llm, params=PARAMS):
    return [output.choices[0].token_ids for output in llm.generate(PROMPTS, params, progress=False)]


def wait_for_kernels(llm):
    """Until they are there nothing is captured."""
    warm_up = llm._engine._may_capture.__self__
    assert warm_up.is_done() or warm_up._all.wait(PATIENCE)


def num_captured(llm):
    """Graphs of decode steps, and of steps with prompts."""
    return [graphs._budget.count for graphs in (llm._engine._graphs, llm._engine._mixed)]


def captured(device, work):
    """`work` as it would be done again."""
    found = []
    device.submit(lambda: found.append(device.capture(work))).wait()
    return found[0]


@contextmanager
def no_waiting():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is a prototype, says torch
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@one_architecture
@pytest.mark.parametrize(("loop", "attention"), [("serial", "triton"), ("overlap", "reference")])
def test_mixed_requests_get_the_ids_that_each_gets_alone_on_the_cpu(tiny, truth, loop, attention):
    with LLM(tiny, loop=loop, attention=attention, **OPTIONS | {"graph_max_batch": 0}) as llm:
        wait_for_kernels(llm)  # beside, many are compiled at a time
        assert generate(llm) == truth


@one_architecture
@pytest.mark.parametrize("loop", ["serial", "overlap"])
def test_graphs_are_captured_behind_live_traffic_and_in_idle_moments_and_change_no_id(tiny, truth, loop):
    with LLM(tiny, loop=loop, **OPTIONS) as llm:
        wait_for_kernels(llm)
        assert num_captured(llm) == [0, 0]
        assert generate(llm) == truth
        decode, mixed = num_captured(llm)
        assert decode > 0
        assert mixed > 0
        while llm._engine.prepare():
            pass
        assert num_captured(llm)[0] > decode, "nobody asked for all sizes"
        assert sorted(next(iter(llm._engine._graphs._graphs.values()))) == batch_sizes(24)
        assert generate(llm) == truth


def test_no_kernel_is_compiled_after_the_start_and_graphs_from_the_start_change_no_id(ready, truth):
    from triton import knobs

    compiled = []
    knobs.compilation.listener = lambda **told: None if told["cache_hit"] else compiled.append(told["src"].name)
    try:
        assert generate(ready) == truth
    finally:
        knobs.compilation.listener = None
    assert compiled == []


def test_launching_a_steady_step_waits_for_nothing(ready):
    """What waits is `Handle.wait`, for an event, which torch does not count."""
    steady = SamplingParams(temperature=0.8, seed=1, max_tokens=40, ignore_eos=True)
    expected = generate(ready, steady)  # every graph that it asks for is known
    while ready._engine.prepare():
        pass
    with no_waiting():
        assert generate(ready, steady) == expected


def test_logprobs_and_penalties_are_the_cpus_and_launching_waits_for_neither(tiny, ready):
    options = {
        "temperature": 0,
        "max_tokens": 20,
        "ignore_eos": True,
        "logprobs": 3,
        "allowed_token_ids": [*range(4, 250)],
    }
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
    params = SamplingParams(bad_words=[[9, 9], [8]], prompt_logprobs=2, **options, **penalties)
    with LLM(tiny, device="cpu", dtype="float32") as llm:
        expected = llm.generate(PROMPTS, params, progress=False)
    found = ready.generate(PROMPTS, params, progress=False)
    while ready._engine.prepare():
        pass
    with no_waiting():
        assert ready.generate(PROMPTS, params, progress=False)[0].choices[0].token_ids == found[0].choices[0].token_ids
    for ours, theirs in zip(found, expected, strict=True):
        (choice,), (truth,) = ours.choices, theirs.choices
        assert choice.token_ids == truth.token_ids
        for entries, true in ((choice.logprobs, truth.logprobs), (ours.prompt_logprobs, theirs.prompt_logprobs)):
            assert len(entries) == len(true)
            assert logprobs_of(entries) == pytest.approx(logprobs_of(true), abs=1e-3)


def logprobs_of(entries):
    return [its.logprob for entry in entries for its in (entry.token, *entry.top) if its.logprob is not None]


NEAR = [("LlamaForCausalLM", 1), ("Qwen3ForCausalLM", 16), ("gemma2", 1), ("gemma3", 16), ("olmo2", 16), ("olmo3", 4)]


@pytest.mark.parametrize(("tiny", "page_size"), NEAR, indirect=["tiny"])
def test_bfloat16_logits_are_near_those_of_float32(tiny, page_size):
    found = {}
    for name, ops_name, dtype in (("cpu", "reference", torch.float32), ("cuda", "triton", torch.bfloat16)):
        device, checkpoint = torch.device(name), open_checkpoint(tiny)
        ops = make_ops(ops_name, device)
        attention = make_backends(ops_name, checkpoint.spec, dtype, device)
        with torch.inference_mode(), device:
            model = load_model(checkpoint, dtype=dtype, group=Group.solo(), attention=attention, ops=ops, device=device)
            harness = Harness(model, attention, dtype=dtype, page_size=page_size)
            prompts = harness.logits([(slot, 0, PROMPTS[20 + slot]) for slot in range(4)])
            decode = harness.logits([(slot, len(PROMPTS[20 + slot]), [7]) for slot in range(4)])
        found[name] = torch.cat([prompts, decode]).cpu()
    assert (found["cuda"] - found["cpu"]).norm() <= 3e-2 * found["cpu"].norm()


def test_a_graph_may_follow_one_that_is_forgotten_and_takes_its_memory(device):
    numbers, reserved = torch.ones(NUMBERS, device="cuda"), []
    torch.cuda.synchronize()
    for factor in (2, 3, 4):
        graph = captured(device, partial(torch.mul, numbers, factor))
        device.submit(graph.replay).wait()
        assert torch.equal(graph.output, numbers * factor)
        del graph
        reserved.append(torch.cuda.memory_reserved())
    assert len(set(reserved)) == 1


def test_a_graph_may_follow_one_for_which_there_was_no_memory(device):
    numbers = torch.ones(8, device="cuda")
    torch.cuda.synchronize()

    def work():
        doubled = 2 * numbers
        if torch.cuda.is_current_stream_capturing():
            torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
        return doubled

    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            captured(device, work)
        graph = captured(device, lambda: 3 * numbers)
        device.submit(graph.replay).wait()
        assert graph.output.tolist() == [3] * 8
        del graph
