from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.ops.kernels import DTYPES, GATES, TOLERANCE, poisoned, random, unaligned

pytest.importorskip("triton")
from tokenmill.ops.triton.gemv import GemvConfig, gemv


def assert_product(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the rounding of the result, measured on the whole: single elements may cancel."""
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < TOLERANCE[found.dtype] / 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize(("outputs", "inputs"), [(5, 20), (16, 512), (9, 700)])
def test_gemv(rows, outputs, inputs, dtype):
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, seed=1, dtype=dtype)
    out = poisoned(rows, outputs, dtype=dtype)
    assert gemv(unaligned(x), unaligned(weight), GemvConfig(4, 1, 2), out=out) is out
    assert_product(out, x.float() @ weight.float().T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", [None, *GATES])
@pytest.mark.parametrize(("rows", "outputs", "inputs", "ahead"), [(1, 8, 2048, 3), (3, 7, 1100, 1), (2, 1, 48, 4)])
def test_gemv_with_all_that_stands_around_it(rows, outputs, inputs, ahead, gate, dtype):
    lines = outputs * (1 if gate is None else 2)
    x, weight = random(rows, inputs, dtype=dtype) * 9, random(lines, inputs, seed=1, dtype=dtype)
    norm, residual = random(inputs, seed=2, dtype=dtype), random(rows, outputs, seed=3, dtype=dtype)
    bias = random(lines, seed=4, dtype=dtype)
    expected = F.linear(F.rms_norm(x.float(), (inputs,), norm.float(), 0.5), weight.float(), bias.float())
    if gate is not None:
        expected = GATES[gate](expected[:, :outputs]) * expected[:, outputs:]
    expected = expected + residual.float()
    out = gemv(
        x,
        weight,
        GemvConfig(4, 2, ahead),
        out=residual,
        bias=bias,
        norm_weight=norm,
        eps=0.5,
        residual=residual,
        gate=gate,
    )
    assert out is residual
    assert_product(out, expected)


def test_too_many_rows_are_refused():
    with pytest.raises(ValueError, match="4 rows"):
        gemv(random(5, 8), random(2, 8), GemvConfig(4, 1, 1))
