from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from tests.ops.kernels import DEVICE, DTYPES, GATES, TOLERANCE, random, unaligned

pytest.importorskip("triton")
from tokenmill.ops.api import Hidden, Norm
from tokenmill.ops.reference import ReferenceOps
from tokenmill.ops.triton.norm import rms_norm
from tokenmill.ops.triton.ops import TritonOps
from tokenmill.ops.triton.products import MAX_ROWS, ProductConfig, choose_parts, choose_product, product

LOOP = ProductConfig(16, 32, 32, 4)
CONFIGS = {
    "loop": LOOP,
    "swap": dataclasses.replace(LOOP, swap=True),
    "held": dataclasses.replace(LOOP, held=1),
    "groups": ProductConfig(16, 16, 64, 4, held=1, groups=4),
    "whole": dataclasses.replace(LOOP, held=6),
    "groups whole": ProductConfig(8, 32, 64, 4, held=9, groups=4, swap=True),
}
BF16 = torch.bfloat16


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Measured on the whole: single elements may cancel."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(5, 33, 70), (16, 64, 192), (37, 20, 96)])
def test_product(rows, outputs, inputs, name):
    x, weight = random(rows, inputs, dtype=BF16), random(outputs, inputs, seed=1, dtype=BF16)
    found = product(unaligned(x), unaligned(weight), CONFIGS[name])
    assert error_of(found, x.float() @ weight.float().T) < TOLERANCE[BF16] / 2


@pytest.mark.parametrize("gate", [None, *GATES])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(18, 35, 70), (7, 32, 192)])
def test_product_with_all_that_stands_around_it(rows, outputs, inputs, name, gate):
    config = CONFIGS[name]
    lines = outputs * (1 if gate is None else 2)
    x, weight = random(rows, inputs, dtype=BF16) * 9, random(lines, inputs, seed=1, dtype=BF16)
    bias, residual = random(lines, seed=2, dtype=BF16) * 9, random(rows, outputs, seed=3, dtype=BF16) * 99
    norm = random(inputs, seed=4, dtype=BF16) if config.fuses_norm(inputs) else None
    normed = x.float() if norm is None else F.rms_norm(x.float(), (inputs,), norm.float(), 7.0)
    expected = normed @ weight.float().T + bias.float()
    if gate is not None:
        expected = GATES[gate](expected[:, :outputs]) * expected[:, outputs:]
    expected = expected + residual.float()
    options = {"bias": bias, "norm_weight": norm, "eps": 7.0, "gate": gate}
    assert product(x, weight, config, residual=residual, **options) is residual
    assert error_of(residual, expected) < TOLERANCE[BF16] / 2


@pytest.mark.parametrize("name", ["whole", "groups whole"])
def test_norm_in_the_product_is_as_exact_as_before_it(name):
    x, weight = random(8, 192, dtype=BF16) * 9, random(32, 192, seed=1, dtype=BF16)
    norm = random(192, seed=2, dtype=BF16)
    expected = F.rms_norm(x.double(), (192,), norm.double(), 1e-6) @ weight.double().T
    inside = product(x, weight, CONFIGS[name], norm_weight=norm, eps=1e-6)
    before = product(rms_norm(x, norm, 1e-6), weight, CONFIGS[name])
    assert error_of(inside, expected) < 1.1 * error_of(before, expected)


def test_norm_needs_the_whole_weight():
    with pytest.raises(ValueError, match="cannot normalise rows of 33"):
        product(random(5, 33), random(9, 33), dataclasses.replace(LOOP, held=1), norm_weight=random(33))


def test_gates_far_below_zero_close():
    weight = torch.tensor([[-200.0], [1.0]], dtype=BF16, device=DEVICE).expand(2, 16).contiguous()
    found = product(torch.ones(5, 16, dtype=BF16, device=DEVICE), weight, LOOP, gate="silu")
    assert found.abs().max() < 1e-20


def grid_of(rows: int, lines: int, inputs: int, **options) -> tuple[int, int, int] | None:
    config = choose_product(rows, lines, inputs, **options)
    return None if config is None else (config.block_m, config.block_n, config.block_k)


def test_choices():
    assert grid_of(8, 4096, 1024) == (8, 32, 512)
    assert grid_of(16, 6144, 1024, is_gated=True) == (16, 64, 128)
    assert grid_of(32, 6144, 4096) == (32, 64, 256)
    assert grid_of(32, 1024, 2048) is None  # 16 programs
    assert grid_of(64, 28672, 4096, is_gated=True) == (64, 128, 64)
    assert grid_of(64, 34816, 5120, is_gated=True) is None  # two waves of programs and 8 more
    assert grid_of(64, 151936, 1024) == (64, 128, 64)
    assert grid_of(65, 151936, 1024) is None
    assert grid_of(65, 4096, 1024) == (64, 64, 128)
    assert grid_of(256, 4096, 1024) == (64, 128, 64)
    assert grid_of(128, 6144, 1024, is_gated=True) == (64, 128, 64)
    assert grid_of(256, 6144, 1024, is_gated=True) == (128, 128, 64)
    assert grid_of(257, 6144, 1024, is_gated=True) is None


@pytest.mark.parametrize(("lines", "inputs"), [(4096, 1024), (2048, 3072), (28672, 4096), (151936, 1024), (14, 8)])
def test_every_choice_can_be_computed(lines, inputs):
    choices = [choose_product(rows, lines, inputs, is_gated=True) for rows in range(5, MAX_ROWS + 1)]
    for rows, config in enumerate(choices, 5):
        if config is not None:
            assert config.block_k % (16 * config.groups) == 0
            assert config.groups == 1 or config.groups == config.num_warps
            assert rows <= 64 or config.block_m >= 64
    assert choices[0] is not None


@pytest.mark.parametrize("splits", [2, 4])
@pytest.mark.parametrize("name", ["loop", "swap", "held"])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(18, 35, 128), (40, 32, 384)])
def test_parts_sum_up_to_the_product(rows, outputs, inputs, name, splits):
    x, weight = random(rows, inputs, dtype=BF16), random(outputs, inputs, seed=1, dtype=BF16)
    config = dataclasses.replace(CONFIGS[name], splits=splits)
    parts = product(unaligned(x), unaligned(weight), config)
    assert parts.shape == (splits, rows, outputs)
    wide = [(part.float(), its.float()) for part, its in zip(x.chunk(splits, 1), weight.chunk(splits, 1), strict=True)]
    assert error_of(parts, torch.stack([part @ its.T for part, its in wide])) < 1e-5


def test_nothing_else_is_done_to_parts():
    config = dataclasses.replace(LOOP, splits=2)
    with pytest.raises(ValueError, match="parts of a product"):
        product(random(5, 64, dtype=BF16), random(9, 64, dtype=BF16), config, bias=random(9, dtype=BF16))


def test_choices_of_parts():
    assert choose_parts(16, 1024, 2048) is None  # held weights are faster
    for rows, lines, inputs, splits in (
        (17, 1024, 2048, 4),
        (64, 1024, 3072, 8),
        (65, 1024, 2048, 4),
        (256, 1024, 3072, 4),
    ):
        assert choose_parts(rows, lines, inputs).splits == splits
    assert choose_parts(32, 4096, 4096).splits == 2
    assert choose_parts(33, 4096, 4096) is None
    assert choose_parts(64, 4096, 14336).splits == 4
    assert choose_parts(65, 4096, 14336) is None
    assert choose_parts(257, 1024, 2048) is None
    assert choose_parts(64, 576, 576) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 2, 6, 40, 257])
def test_ops_equal_the_reference(rows, has_bias, dtype):
    x, weight = random(rows, 24, dtype=dtype), random(10, 24, seed=1, dtype=dtype)
    bias = random(10, seed=2, dtype=dtype) if has_bias else None
    norm = Norm(random(24, seed=4, dtype=dtype), 1e-5)
    ours, twin = TritonOps(), ReferenceOps()
    assert_equal(ours.linear(x, weight, bias), twin.linear(x, weight, bias))
    for name in ("normed_linear", "gated_linear"):
        found, expected = (getattr(ops, name)(Hidden(x), weight, bias, norm=norm) for ops in (ours, twin))
        assert_equal(found, expected)
    added = [Hidden(random(rows, 10, seed=3, dtype=dtype)) for _ in (ours, twin)]
    for ops, hidden in zip((ours, twin), added, strict=True):
        ops.add_linear(hidden, x, weight, bias)
    assert_equal(ours.settle(added[0]), twin.settle(added[1]))


@pytest.mark.parametrize("reader", ["normed_linear", "gated_linear", "settle", "add_linear"])
@pytest.mark.parametrize("rows", [3, 12, 17, 70])
def test_parts_are_added_by_whoever_reads_the_hidden_state_next(rows, reader):
    x, weight, norm = (
        random(rows, 2048, dtype=BF16),
        random(64, 2048, seed=1, dtype=BF16) / 45,
        random(64, seed=2, dtype=BF16),
    )
    after, ours, twin = random(64, 64, seed=4, dtype=BF16) / 8, TritonOps(), ReferenceOps()
    config = dataclasses.replace(LOOP, splits=4)
    found, expected = (Hidden(random(rows, 64, seed=3, dtype=BF16)) for _ in range(2))
    twin.add_linear(expected, x, weight)
    found.parts = product(x, weight, config)
    if reader in ("normed_linear", "gated_linear"):
        results = [
            getattr(ops, reader)(hidden, after, norm=Norm(norm, 1e-6))
            for ops, hidden in ((ours, found), (twin, expected))
        ]
        assert_equal(*results)
    elif reader == "add_linear":
        for ops, hidden in ((ours, found), (twin, expected)):
            ops.add_linear(hidden, x, weight)
    assert_equal(ours.settle(found), twin.settle(expected))
    assert found.parts is None


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    if found.numel():
        assert error_of(found, expected) < TOLERANCE[found.dtype]


def test_a_product_of_few_outputs_is_added_in_parts():
    x, weight = random(20, 512, dtype=BF16), random(1024, 512, seed=1, dtype=BF16)
    found, expected = (Hidden(random(20, 1024, seed=3, dtype=BF16)) for _ in range(2))
    TritonOps().add_linear(found, x, weight)
    assert found.parts.shape[0] == choose_parts(20, 1024, 512).splits
    ReferenceOps().add_linear(expected, x, weight)
    assert_equal(TritonOps().settle(found), expected.value)
