"""Mixtures of experts, beside transformers' models of the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.models.oracle import Oracle
from tests.models.test_parity import harness_of
from tests.support.harness import Harness
from tests.support.ranks import run_ranks
from tokenmill.attention.select import make_backends
from tokenmill.models.load import load_model
from tokenmill.parallel.group import Group
from tokenmill.weights.checkpoint import open_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 3,
    "intermediate_size": 96,
}
QWEN3 = {"moe_intermediate_size": 48, "num_experts": 8, "norm_topk_prob": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Moe", QWEN3),
    "weights of all experts": ("Qwen3Moe", {**QWEN3, "norm_topk_prob": False}),
    "every second layer": ("Qwen3Moe", {**QWEN3, "decoder_sparse_step": 2}),
    "listed layers": ("Qwen3Moe", {**QWEN3, "mlp_only_layers": [0, 2]}),
    "stacked": ("Qwen3Moe", QWEN3),
    "mixtral": ("Mixtral", {"num_local_experts": 5}),
    "all experts chosen": ("Mixtral", {"num_local_experts": 3}),
}
PROMPT = [(7 * i) % 251 + 4 for i in range(40)]


def make_model(folder: Path, kind: str) -> Path:
    """Weights are large enough for greedy outputs, and choices of experts, to be far from ties."""
    name, sizes = MODELS[kind]
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SIZES, **sizes))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.1 * noise if "norm" in parameter_name else 1.5 * parameter.shape[-1] ** -0.5 * noise)
    model.save_pretrained(folder, save_original_format=kind != "stacked")
    return folder


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert float((found - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("kind", MODELS)
def test_parity(tmp_path: Path, kind: str) -> None:
    folder = make_model(tmp_path, kind)
    oracle, harness = Oracle(folder), harness_of(folder)
    assert_near(harness.logits([(0, 0, PROMPT)], of_all_tokens=True), oracle.logits(PROMPT))
    output = harness.greedy(PROMPT, 32, slot=1)
    assert oracle.is_greedy(PROMPT, output)
    beside = harness.logits([(2, 0, PROMPT[:7]), (1, len(PROMPT) + 31, output[-1:]), (3, 0, PROMPT[9:])])
    assert_near(beside[1], oracle.logits([*PROMPT, *output])[-1])


@pytest.mark.parametrize("kind", ["every second layer", "mixtral"])
def test_ranks_together_compute_what_one_does(tmp_path: Path, kind: str) -> None:
    folder = make_model(tmp_path, kind)

    def logits(group: Group) -> Tensor:
        checkpoint = open_checkpoint(folder)
        backend = make_backends("reference", checkpoint.spec)
        model = load_model(checkpoint, dtype=torch.float32, group=group, attention=backend)
        return Harness(model, backend).logits([(0, 0, PROMPT)], of_all_tokens=True)

    expected = logits(Group.solo())
    for found in run_ranks(2, logits):
        assert_near(found, expected)
