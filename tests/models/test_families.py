"""Every family against transformers, from the files that transformers writes."""

from pathlib import Path

import pytest
import torch

from tests.models.oracle import Oracle
from tests.support.families import FAMILIES, make_family
from tests.support.harness import Harness
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_byte_tokenizer
from tokenmill import LLM, SamplingParams
from tokenmill.attention.select import make_backends
from tokenmill.models.load import load_model
from tokenmill.parallel.group import Group
from tokenmill.weights.checkpoint import open_checkpoint

PROMPT = [(7 * i) % 251 + 4 for i in range(100)]
STEPS = 32


def harness_of(folder: Path, group: Group | None = None) -> Harness:
    checkpoint = open_checkpoint(folder)
    backends = make_backends("reference", checkpoint.spec)
    model = load_model(checkpoint, dtype=torch.float32, group=group or Group.solo(), attention=backends)
    return Harness(model, backends)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_gives_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    folder = make_family(tmp_path, name)
    oracle, harness = Oracle(folder), harness_of(folder)
    found = [harness.logits([(0, 0, PROMPT)], of_all_tokens=True)]
    ids = list(PROMPT)
    for _ in range(STEPS):
        ids.append(int(found[-1][-1].argmax()))
        found.append(harness.logits([(0, len(ids) - 1, ids[-1:])]))
    assert oracle.is_greedy(PROMPT, ids[len(PROMPT) :])
    expected = oracle.logits(ids)
    assert_near(torch.cat(found), expected)
    harness.logits([(1, 0, ids[:7]), (0, 0, ids[:3])])
    chunks = [harness.logits([(2, 0, ids[:9]), (1, a, ids[a:b])]) for a, b in ((7, 60), (60, 61), (61, 132))]
    assert_near(torch.stack([chunk[1] for chunk in chunks]), expected[[59, 60, 131]])


@pytest.mark.parametrize("name", ["phi3", "olmo2", "gemma2", "qwen2"])
def test_ranks_together_compute_what_one_does(tmp_path: Path, name: str) -> None:
    folder = make_family(tmp_path, name)

    def logits(group: Group) -> torch.Tensor:
        return harness_of(folder, group).logits([(0, 0, PROMPT)], of_all_tokens=True)

    expected = logits(Group.solo())
    for size in (2, 4):
        for found in run_ranks(size, logits):
            assert_near(found, expected)


WINDOWED = ("mistral", "gemma3")


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_are_freed_and_prefixes_found_with_them(tmp_path: Path, name: str) -> None:
    """Requests that share a prefix, in pools that hold little more than their windows."""
    folder = make_family(tmp_path, name)
    write_byte_tokenizer(folder)
    oracle = Oracle(folder)
    prompts = [PROMPT, [*PROMPT[:70], *PROMPT[10:40]], PROMPT[:90], [*PROMPT, *PROMPT[:60]]]
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    spec = open_checkpoint(folder).spec
    is_hybrid = len(spec.kv_kinds) > 1
    sizes = {"num_pages": 150, "num_window_pages": 40} if is_hybrid else {"num_pages": 40}
    options = {"page_size": 2, "prefill_budget": 32, "max_running": 2, "debug_checks": True, "dtype": "float32"}
    with LLM(folder, device="cpu", **options, **sizes) as llm:
        for results in (llm.generate(prompts, params), llm.generate(prompts[:1], params)):
            for prompt, result in zip(prompts, results, strict=False):
                assert oracle.is_greedy(prompt, result.choices[0].token_ids)
        assert results[0].usage.cached_tokens > 0
