"""The engine on a GPU: the CPU's ids whatever the path, graphs captured behind live traffic, no waiting on the way."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from tests.support.harness import Harness
from tests.support.tiny_models import make_tiny_llama
from tokenmill import LLM, SamplingParams
from tokenmill.attention.select import make_backend
from tokenmill.engine.graphs import batch_sizes
from tokenmill.models.load import load_model
from tokenmill.ops.select import make_ops
from tokenmill.parallel.group import Group
from tokenmill.weights.checkpoint import open_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ARCHITECTURES = ["LlamaForCausalLM", "Qwen3ForCausalLM"]
POOL = {"num_pages": 4096, "max_running": 32, "graph_max_batch": 24}
PROMPTS = [[5 + (7 * i + j * j) % 250 for j in range(1 + 5 * i % 97)] for i in range(40)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=6 + 2 * (i % 9), ignore_eos=True)
    if i % 4
    else SamplingParams(temperature=0.8, seed=i, max_tokens=20, ignore_eos=True, top_p=0.9 if i % 8 else 1.0)
    for i in range(40)
]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def tiny(request, tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp(request.param), architecture=request.param, head_dim=64)


@pytest.fixture(scope="module")
def truth(tiny):
    """Each request alone on the CPU."""
    with LLM(tiny, device="cpu", dtype="float32", loop="serial", max_running=1, prefix_cache=False) as llm:
        return generate(llm)


def generate(llm, params=PARAMS):
    return [output.choices[0].token_ids for output in llm.generate(PROMPTS, params, progress=False)]


@contextmanager
def no_waiting():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("loop", "graphs", "attention"),
    [
        ("serial", "none", "triton"),
        ("overlap", "none", "reference"),
        ("serial", "behind", "triton"),
        ("overlap", "first", "triton"),
        ("overlap", "behind", "triton"),
    ],
)
def test_mixed_requests_get_the_ids_that_each_gets_alone_on_the_cpu(tiny, truth, loop, graphs, attention):
    options = POOL | ({"graph_max_batch": 0} if graphs == "none" else {})
    with LLM(
        tiny, device="cuda", dtype="float32", loop=loop, attention=attention, capture_first=graphs == "first", **options
    ) as llm:
        for _ in range(2 if graphs == "behind" else 1):
            assert generate(llm) == truth


def test_graphs_are_captured_behind_live_traffic_and_in_idle_moments(tiny, truth):
    with LLM(tiny, device="cuda", dtype="float32", **POOL) as llm:
        captured = llm._engine._graphs._graphs
        before = sum(map(len, captured.values()))
        assert generate(llm) == truth
        behind = sum(map(len, captured.values()))
        assert behind > before
        while llm._engine.prepare():
            pass
        assert sum(map(len, captured.values())) > behind
        assert sorted(next(iter(captured.values()))) == batch_sizes(24)
        assert generate(llm) == truth


def test_no_kernel_is_compiled_after_the_start(tiny):
    from triton import knobs

    with LLM(tiny, device="cuda", dtype="float32", capture_first=True, **POOL) as llm:
        compiled = []
        knobs.compilation.listener = lambda **told: None if told["cache_hit"] else compiled.append(told["src"].name)
        try:
            generate(llm)
        finally:
            knobs.compilation.listener = None
        assert compiled == []


def test_launching_a_steady_step_waits_for_nothing(tiny):
    """What waits is `Handle.wait`, for an event, which torch does not count."""
    steady = SamplingParams(temperature=0.8, seed=1, max_tokens=40, ignore_eos=True)
    with LLM(tiny, device="cuda", dtype="float32", capture_first=True, prefix_cache=False, **POOL) as llm:
        expected = generate(llm, steady)  # every kernel and library handle is there
        while llm._engine.prepare():
            pass
        with no_waiting():
            assert generate(llm, steady) == expected


@pytest.mark.parametrize("page_size", [1, 16])
def test_bfloat16_logits_are_near_those_of_float32(tiny, page_size):
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        device, checkpoint = torch.device("cuda"), open_checkpoint(tiny)
        ops = make_ops("triton", device)
        attention = make_backend("triton", checkpoint.spec, dtype, device)
        with torch.inference_mode(), device:
            model = load_model(checkpoint, dtype=dtype, group=Group.solo(), attention=attention, ops=ops, device=device)
            harness = Harness(model, attention, dtype=dtype, page_size=page_size)
            prompts = harness.logits([(slot, 0, PROMPTS[20 + slot]) for slot in range(4)])
            decode = harness.logits([(slot, len(PROMPTS[20 + slot]), [7]) for slot in range(4)])
        found[dtype] = torch.cat([prompts, decode])
    error = (found[torch.bfloat16] - found[torch.float32]).norm(dim=1) / found[torch.float32].norm(dim=1)
    assert error.max() <= 3e-2
