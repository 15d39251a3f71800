from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.oracle import Oracle
from tests.support.harness import Harness
from tests.support.tiny_models import make_tiny_llama
from tokenmill.attention.select import make_backends
from tokenmill.models.load import load_model
from tokenmill.parallel.group import Group
from tokenmill.weights.checkpoint import open_checkpoint

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ROPES: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.5},
    "old-linear": {"type": "linear", "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn-attention": {**YARN, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-exact": {**YARN, "truncate": False},
}


def harness_of(folder: Path, **options: Any) -> Harness:
    checkpoint = open_checkpoint(folder)
    backend = make_backends("reference", checkpoint.spec)
    model = load_model(checkpoint, dtype=torch.float32, group=Group.solo(), attention=backend)
    return Harness(model, backend, **options)


def assert_parity(folder: Path, prompt: list[int], count: int) -> None:
    oracle, harness = Oracle(folder), harness_of(folder)
    torch.testing.assert_close(
        harness.logits([(0, 0, prompt)], of_all_tokens=True), oracle.logits(prompt), atol=2e-4, rtol=1e-4
    )
    assert oracle.is_greedy(prompt, harness.greedy(prompt, count, slot=1))


@pytest.mark.parametrize("tie", [True, False])
def test_qwen3(tmp_path: Path, tie: bool) -> None:
    folder = make_tiny_llama(
        tmp_path, architecture="Qwen3ForCausalLM", num_heads=4, num_kv_heads=2, head_dim=32, tie=tie, rope_theta=1e6
    )
    assert_parity(folder, [(7 * i) % 251 + 4 for i in range(40)], 24)


@pytest.mark.parametrize("rope_form", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ROPES)
def test_rope_kinds_past_the_original_length(tmp_path: Path, kind: str, rope_form: str) -> None:
    folder = make_tiny_llama(tmp_path, rope=ROPES[kind], rope_form=rope_form, rope_theta=500.0, max_position=128)
    assert_parity(folder, [(7 * i) % 251 + 4 for i in range(100)], 24)


@pytest.mark.parametrize(
    "shape",
    [
        {"tie": True},
        {"attention_bias": True, "mlp_bias": True},
        {"num_heads": 6, "num_kv_heads": 1, "hidden_size": 48, "head_dim": 20},
        {"num_heads": 4, "num_kv_heads": 4, "sharded": True},
        {"num_layers": 1, "vocab_size": 301, "intermediate_size": 50},
    ],
    ids=lambda shape: "-".join(shape),
)
def test_shapes(tmp_path: Path, shape: dict[str, Any]) -> None:
    assert_parity(make_tiny_llama(tmp_path, **shape), [10, 200, 30, 4, 99, 258], 12)


def test_logits_are_the_same_in_chunks_and_beside_others(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    prompt = [(11 * i) % 251 + 4 for i in range(40)]
    others = [[(5 * i + j) % 251 + 4 for i in range(length)] for j, length in enumerate((3, 70, 18))]
    whole = harness_of(folder).logits([(0, 0, prompt)])
    harness = harness_of(folder)
    harness.logits([(1, 0, others[0][:1]), (0, 0, prompt[:7])])
    harness.logits([(2, 0, others[1]), (0, 7, prompt[7:39]), (1, 1, others[0][1:])])
    mixed = harness.logits([(3, 0, others[2]), (0, 39, prompt[39:]), (2, 70, [5])])
    torch.testing.assert_close(mixed[1:2], whole, atol=1e-4, rtol=1e-4)


def test_logits_are_of_the_last_tokens(tmp_path: Path) -> None:
    harness = harness_of(make_tiny_llama(tmp_path))
    assert harness.logits([(0, 0, [5, 6, 7]), (1, 0, [8])]).shape == (2, 260)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path))
    backend = make_backends("reference", checkpoint.spec)
    prompt = [(3 * i) % 251 + 4 for i in range(20)]
    found = []
    for kind in (dtype, torch.float32):
        model = load_model(checkpoint, dtype=kind, group=Group.solo(), attention=backend)
        found.append(Harness(model, backend, dtype=kind).logits([(0, 0, prompt)]))
    difference = (found[0] - found[1]).abs().max()
    assert 0 < difference < 0.1 * found[1].std()
