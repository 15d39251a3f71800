from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from tests.ops.kernels import DEVICE, DTYPES, TOLERANCE, poisoned, random, unaligned

pytest.importorskip("triton")
from tokenmill.ops.api import Norm
from tokenmill.ops.reference import ReferenceOps
from tokenmill.ops.triton.norm import rms_norm
from tokenmill.ops.triton.ops import TritonOps
from tokenmill.ops.triton.products import ProductConfig, ProductScratch, choose_product, product

LOOP = ProductConfig(16, 32, 32, 4)
CONFIGS = {
    "loop": LOOP,
    "swap": dataclasses.replace(LOOP, swap=True),
    "held": dataclasses.replace(LOOP, held=2),
    "held whole": dataclasses.replace(LOOP, held=9, swap=True),
    "groups": ProductConfig(16, 16, 64, 4, held=1, groups=4),
    "groups swap": ProductConfig(8, 32, 64, 4, held=9, groups=4, swap=True),
    "split": dataclasses.replace(LOOP, split=3, held=1),
    "split groups": ProductConfig(32, 16, 32, 2, groups=2, split=2),
}


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Measured on the whole: single elements may cancel."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.fixture
def scratch() -> ProductScratch:
    made = ProductScratch(DEVICE)
    made.partials.fill_(float("nan"))
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(5, 33, 70), (16, 64, 192), (37, 20, 96)])
def test_product(rows, outputs, inputs, name, dtype, scratch):
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, seed=1, dtype=dtype)
    out = poisoned(rows, outputs, dtype=dtype)
    assert product(unaligned(x), unaligned(weight), CONFIGS[name], scratch, out=out) is out
    assert error_of(out, x.float() @ weight.float().T) < TOLERANCE[dtype] / 2
    assert not scratch.counters.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(18, 35, 70), (7, 32, 192)])
def test_product_with_all_that_stands_around_it(rows, outputs, inputs, name, is_gated, dtype, scratch):
    config = CONFIGS[name]
    lines = outputs * (1 + is_gated)
    x, weight = random(rows, inputs, dtype=dtype) * 9, random(lines, inputs, seed=1, dtype=dtype)
    bias, residual = random(lines, seed=2, dtype=dtype) * 9, random(rows, outputs, seed=3, dtype=dtype) * 99
    norm = random(inputs, seed=4, dtype=dtype) if config.split == 1 else None
    normed = x.float() if norm is None else F.rms_norm(x.float(), (inputs,), norm.float(), 7.0)
    expected = normed @ weight.float().T + bias.float()
    if is_gated:
        expected = F.silu(expected[:, :outputs]) * expected[:, outputs:]
    expected = expected + residual.float()
    options = {"bias": bias, "norm_weight": norm, "eps": 7.0, "is_gated": is_gated}
    assert product(x, weight, config, scratch, out=residual, residual=residual, **options) is residual
    assert error_of(residual, expected) < TOLERANCE[dtype] / 2


@pytest.mark.parametrize("name", ["loop", "held", "groups swap"])
def test_norm_in_the_product_is_as_exact_as_before_it(name, scratch):
    x, weight = random(8, 192, dtype=torch.bfloat16) * 9, random(32, 192, seed=1, dtype=torch.bfloat16)
    norm = random(192, seed=2, dtype=torch.bfloat16)
    expected = F.rms_norm(x.double(), (192,), norm.double(), 1e-6) @ weight.double().T
    inside = product(x, weight, CONFIGS[name], scratch, norm_weight=norm, eps=1e-6)
    before = product(rms_norm(x, norm, 1e-6), weight, CONFIGS[name], scratch)
    assert error_of(inside, expected) < 1.1 * error_of(before, expected)


def test_gates_far_below_zero_close(scratch):
    weight = torch.tensor([[-200.0], [1.0]], device=DEVICE).expand(2, 16).contiguous()
    found = product(torch.ones(5, 16, device=DEVICE), weight, CONFIGS["loop"], scratch, is_gated=True)
    assert found.abs().max() < 1e-20


def test_splits_without_room_are_refused(scratch):
    config = dataclasses.replace(LOOP, split=4)
    with pytest.raises(ValueError, match="cannot split"):
        product(random(5, 64), random(9, 64), config, scratch, norm_weight=random(64))
    with pytest.raises(ValueError, match="cannot split"):
        product(random(5, 64), random(40000, 64), config, scratch)
    with pytest.raises(ValueError, match="cannot split"):
        product(random(200, 64), random(4000, 64), config, scratch)


SHAPES = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024), (2047, 65536), (5120, 17408), (7, 8)]


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("is_gated", [False, True])
def test_every_choice_can_be_computed(outputs, inputs, is_gated, monkeypatch):
    monkeypatch.setattr("tokenmill.ops.triton.products._product_kernel", {})
    scratch = ProductScratch(torch.device("meta"))
    for rows in range(5, 257):
        config = choose_product(rows, outputs, inputs, is_gated=is_gated)
        if config is None:
            continue
        assert config.block_k % config.groups == 0
        assert not (config.fuses_norm and config.split > 1)
        assert config.block_m == -(-rows // 8) * 8 or config.block_m in (16, 32, 64, 128)
        x = torch.empty(rows, inputs, device="meta")
        weight = torch.empty(outputs * (1 + is_gated), inputs, device="meta")
        with pytest.raises(KeyError):  # refused by nothing before the launch
            product(x, weight, config, scratch, is_gated=is_gated)
    assert choose_product(257, outputs, inputs) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 2, 6, 40, 257])
def test_ops_equal_the_reference(rows, has_bias, has_residual, has_norm, dtype):
    x, weight = random(rows, 24, dtype=dtype), random(10, 24, seed=1, dtype=dtype)
    bias = random(10, seed=2, dtype=dtype) if has_bias else None
    residual = random(rows, 10, seed=3, dtype=dtype) if has_residual else None
    norm = Norm(random(24, seed=4, dtype=dtype), 1e-5)
    ours, twin = TritonOps(DEVICE), ReferenceOps()
    options = {"norm": norm if has_norm else None, "residual": residual}
    assert_equal(ours.linear(x, weight, bias, **options), twin.linear(x, weight, bias, **options))
    if not has_residual:
        assert_equal(ours.gated_linear(x, weight, bias, norm=norm), twin.gated_linear(x, weight, bias, norm=norm))


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    if found.numel():
        assert error_of(found, expected) < TOLERANCE[found.dtype]
