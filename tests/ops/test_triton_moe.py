from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.ops.kernels import DEVICE, DTYPES, TOLERANCE, random

pytest.importorskip("triton")
from tokenmill.ops.api import Experts, Hidden
from tokenmill.ops.reference import ReferenceOps, choose_experts
from tokenmill.ops.triton.moe import TileConfig, choose_tiles, experts_parts, route
from tokenmill.ops.triton.ops import TritonOps

BF16 = torch.bfloat16
LOOP = TileConfig(16, 32, 32, 4, 2)
CONFIGS = {
    "loop": LOOP,
    "swap": dataclasses.replace(LOOP, block_m=8, swap=True),
    "high": dataclasses.replace(LOOP, block_m=64, block_n=64, block_k=16),
    "few programs": dataclasses.replace(LOOP, block_n=16, per_processor=1),
}

CASES = [(1, 4, 2), (7, 5, 3), (40, 6, 6), (33, 128, 8), (9, 1, 1)]


def make_experts(num_experts, hidden, inner, chosen, *, is_renormalised=True, dtype=torch.float32) -> Experts:
    gate_up = random(num_experts, 2 * inner, hidden, seed=1) / hidden**0.5
    down = random(num_experts, hidden, inner, seed=2) / inner**0.5
    counters = torch.zeros(num_experts + 1, dtype=torch.int32, device=DEVICE)
    return Experts(gate_up.to(dtype), down.to(dtype), counters, chosen, is_renormalised)


def expected_of(x, scores, experts) -> torch.Tensor:
    """Every expert computes every token, in float64."""
    weights, chosen = choose_experts(scores, experts)
    gate, up = torch.einsum("th,eih->tei", x.double(), experts.gate_up.double()).chunk(2, -1)
    outputs = torch.einsum("tei,ehi->teh", gate.sigmoid() * gate * up, experts.down.double())
    picked = outputs.gather(1, chosen[:, :, None].expand(-1, -1, x.shape[1]))
    return (picked * weights[:, :, None]).transpose(0, 1)  # [chosen, tokens, hidden]


def error_of(found, expected) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("is_renormalised", [False, True])
@pytest.mark.parametrize(("tokens", "num_experts", "chosen"), CASES)
def test_every_token_goes_to_its_experts_once(tokens, num_experts, chosen, is_renormalised):
    scores = random(2, tokens, num_experts)
    experts = make_experts(num_experts, 8, 4, chosen, is_renormalised=is_renormalised)
    routing = route(scores, experts, 8)
    weights, numbers = choose_experts(scores.sum(0), experts)
    torch.testing.assert_close(routing.weights, weights, rtol=1e-5, atol=1e-6)
    assert experts.counters.sum() == 0
    found = []
    tiles = routing.tiles[1 : 1 + int(routing.tiles[0, 0])].tolist()
    for expert, first, count, _ in tiles:
        rows = routing.order[expert, first : min(first + 8, count)].tolist()
        assert 0 < len(rows) <= 8
        found += [(pair // chosen, pair % chosen, expert) for pair in rows]
    expected = [(token, i, expert) for token, its in enumerate(numbers.tolist()) for i, expert in enumerate(its)]
    assert sorted(found) == expected


def test_scores_that_are_not_finite_harm_no_other_token():
    scores = random(1, 6, 5)
    scores[0, 2], scores[0, 4] = float("nan"), float("-inf")
    experts = make_experts(5, 8, 4, 3)
    routing = route(scores, experts, 8)
    sound = [0, 1, 3, 5]
    weights, _ = choose_experts(scores[0], experts)
    torch.testing.assert_close(routing.weights[sound], weights[sound], rtol=1e-5, atol=1e-6)
    counts = torch.zeros(5)
    for expert, _, count, _ in routing.tiles[1 : 1 + int(routing.tiles[0, 0])].tolist():
        counts[expert] = count
    assert counts.sum() == 18
    assert counts.max() <= 6


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "num_experts", "hidden", "inner", "chosen"),
    [(1, 8, 32, 16, 2), (13, 3, 40, 24, 2), (70, 5, 64, 33, 3)],
)
def test_experts(tokens, num_experts, hidden, inner, chosen, dtype, name):
    experts = make_experts(num_experts, hidden, inner, chosen, dtype=dtype)
    x, scores = random(tokens, hidden, dtype=dtype), random(1, tokens, num_experts, seed=3)
    found = experts_parts(x, scores, experts, (CONFIGS[name], CONFIGS[name]))
    assert found.dtype == dtype
    assert error_of(found, expected_of(x, scores[0], experts)) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", CONFIGS)
def test_one_expert_has_all_tokens(name):
    experts = make_experts(4, 32, 16, 1)
    x, scores = random(50, 32), torch.full((1, 50, 4), -9.0, device=DEVICE)
    scores[:, :, 2] = 9.0
    found = experts_parts(x, scores, experts, (CONFIGS[name], CONFIGS[name]))
    assert error_of(found, expected_of(x, scores[0], experts)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
def test_ops_equal_the_reference(tokens, dtype):
    experts = make_experts(8, 256, 48, 3, dtype=dtype)
    x, router = random(tokens, 256, dtype=dtype), random(8, 256, seed=5, dtype=dtype) / 8
    found, expected = (Hidden(random(tokens, 256, seed=4, dtype=dtype)) for _ in range(2))
    ours = TritonOps()
    for ops, hidden in ((ours, found), (ReferenceOps(), expected)):
        ops.add_experts(hidden, x, router, experts)
    assert ours.settle(found).shape == (tokens, 256)
    if tokens:
        assert error_of(found.value, expected.value) < TOLERANCE[dtype]


def test_many_tokens_equal_the_reference():
    test_ops_equal_the_reference(260, BF16)


def test_parts_that_are_there_are_kept():
    experts = make_experts(4, 32, 16, 2)
    x, router = random(6, 32), random(4, 32, seed=5)
    found, expected = Hidden(random(6, 32, seed=4), random(3, 6, 32, seed=6)), Hidden(random(6, 32, seed=4))
    expected.value += found.parts.sum(0)
    for ops, hidden in ((TritonOps(), found), (ReferenceOps(), expected)):
        ops.add_experts(hidden, x, router, experts)
    assert error_of(TritonOps().settle(found), expected.value) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("num_experts", [8, 60, 128])
def test_choices(num_experts):
    heights = [choose_tiles(rows, num_experts, 2)[0].block_m for rows in range(1, 128 * num_experts, num_experts)]
    assert heights[0] == 8
    assert heights == sorted(heights)
    assert heights[-1] == 128
    for rows in range(1, 128 * num_experts, num_experts):
        first, second = choose_tiles(rows, num_experts, 2)
        assert first.block_m == second.block_m
