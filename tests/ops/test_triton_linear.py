from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.ops.kernels import DEVICE, DTYPES, TOLERANCE, poisoned, random, unaligned

pytest.importorskip("triton")
from tokenmill.ops.api import Norm
from tokenmill.ops.reference import ReferenceOps
from tokenmill.ops.triton.linear import LinearConfig, LinearScratch, choose, dot, gemv
from tokenmill.ops.triton.ops import TritonOps


def assert_product(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the rounding of the result, measured on the whole: single elements may cancel."""
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < TOLERANCE[found.dtype] / 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize(("outputs", "inputs"), [(5, 20), (16, 64), (9, 700)])
def test_gemv(rows, outputs, inputs, dtype):
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, seed=1, dtype=dtype)
    out = poisoned(rows, outputs, dtype=dtype)
    assert gemv(unaligned(x), unaligned(weight), LinearConfig("gemv", 4, 64, 4), out=out) is out
    assert_product(out, x.float() @ weight.float().T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "block_k"), [(1, 48, 64), (3, 160, 32), (2, 1100, 32)])
def test_gemv_with_all_that_stands_around_it(rows, inputs, block_k, is_gated, dtype):
    outputs = 7
    x, weight = random(rows, inputs, dtype=dtype) * 9, random(outputs * (1 + is_gated), inputs, seed=1, dtype=dtype)
    norm, residual = random(inputs, seed=2, dtype=dtype), random(rows, outputs, seed=3, dtype=dtype)
    bias = None if is_gated else random(outputs, seed=4, dtype=dtype)
    expected = F.rms_norm(x.float(), (inputs,), norm.float(), 0.5) @ weight.float().T
    if is_gated:
        expected = F.silu(expected[:, :outputs]) * expected[:, outputs:]
    else:
        expected = expected + bias.float()
    expected = expected + residual.float()
    config = LinearConfig("gemv", 2, block_k, 4)
    out = gemv(
        x,
        weight,
        config,
        out=residual,
        bias=bias,
        norm_weight=norm,
        eps=0.5,
        residual=residual,
        is_gated=is_gated,
    )
    assert out is residual
    assert_product(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("split", [1, 4])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(5, 33, 70), (16, 64, 256), (40, 20, 128)])
def test_dot(rows, outputs, inputs, split, swap, dtype):
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, seed=1, dtype=dtype)
    bias, residual = random(outputs, seed=2, dtype=dtype), random(rows, outputs, seed=3, dtype=dtype)
    scratch = LinearScratch(DEVICE)
    scratch.partials.fill_(float("nan"))
    config = LinearConfig("dot", 32, 32, 4, 2, swap, split)
    expected = x.float() @ weight.float().T
    out = poisoned(rows, outputs, dtype=dtype)
    assert dot(unaligned(x), weight, config, scratch, out=out) is out
    assert_product(out, expected)
    assert dot(x, weight, config, scratch, out=residual, bias=bias, residual=residual.clone()) is residual
    assert_product(residual, expected + bias.float() + random(rows, outputs, seed=3, dtype=dtype).float())
    assert not scratch.counters.any()


def test_too_many_rows_are_refused():
    with pytest.raises(ValueError, match="4 rows"):
        gemv(random(5, 8), random(2, 8), LinearConfig("gemv", 4, 64, 4))
    with pytest.raises(ValueError, match="64 rows"):
        dot(random(65, 8), random(2, 8), LinearConfig("dot", 32, 32, 4), LinearScratch(DEVICE))
    with pytest.raises(ValueError, match="too many to split"):
        dot(random(5, 8), random(9000, 8), LinearConfig("dot", 32, 32, 4, split=4), LinearScratch(DEVICE))


def test_every_choice_fits_its_scratch():
    shapes = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024), (2047, 65536), (34816, 5120)]
    scratch = LinearScratch(torch.device("meta"))
    for rows in range(1, 65):
        for outputs, inputs in shapes:
            config = choose(rows, outputs, inputs)
            if config is not None and config.split > 1:
                assert -(-outputs // config.block_n) <= scratch.counters.numel()
                assert config.split * rows * outputs <= scratch.partials.numel()
            assert config is None or config.kind == ("gemv" if rows <= 4 else "dot")
    assert choose(65, 1024, 1024) is None


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 2, 6, 70])
def test_ops_equal_the_reference(rows, has_bias, has_residual, has_norm):
    x, weight = random(rows, 24), random(10, 24, seed=1)
    bias = random(10, seed=2) if has_bias else None
    residual = random(rows, 10, seed=3) if has_residual else None
    norm = Norm(random(24, seed=4), 1e-5)
    ours, twin = TritonOps(DEVICE), ReferenceOps()
    options = {"norm": norm if has_norm else None, "residual": residual}
    expected = twin.linear(x, weight, bias, **options)
    torch.testing.assert_close(ours.linear(x, weight, bias, **options), expected, rtol=1e-4, atol=1e-4)
    if not has_residual:
        gated = twin.gated_linear(x, weight, bias, norm=norm)
        torch.testing.assert_close(ours.gated_linear(x, weight, bias, norm=norm), gated, rtol=1e-4, atol=1e-4)
