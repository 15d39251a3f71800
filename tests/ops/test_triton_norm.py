from __future__ import annotations

import pytest
import torch

from tests.ops.kernels import DTYPES, GATES, assert_near, random, unaligned
from tokenmill.ops.api import Hidden, Norm
from tokenmill.ops.reference import ReferenceOps

pytest.importorskip("triton")
from tokenmill.ops.triton.activation import activate_and_mul
from tokenmill.ops.triton.norm import MAX_DIM, rms_norm

REFERENCE = ReferenceOps()


def gated(x: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return GATES[activation](gate) * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "dim"), [(1, 1), (3, 100), (2, 1024), (1, 5120)])
def test_rms_norm(tokens, dim, dtype):
    x, weight = random(tokens, dim, dtype=dtype) * 30, random(dim, seed=1, dtype=dtype)
    assert_near(rms_norm(unaligned(x), weight, 0.3), REFERENCE.rms_norm(x, Norm(weight, 0.3)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_is_added_to_a_residual(dtype):
    x, weight, residual = (random(3, 100, dtype=dtype) * 9, random(100, seed=1, dtype=dtype), random(3, 100, seed=2))
    residual = residual.to(dtype)
    expected = Hidden(residual.clone())
    REFERENCE.add_normed(expected, x, Norm(weight, 0.3))
    assert rms_norm(x, weight, 0.3, residual=residual) is residual
    assert_near(residual, expected.value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_are_added_before(dtype):
    x, weight, parts = random(3, 100, dtype=dtype), random(100, seed=1, dtype=dtype), random(4, 3, 100, seed=2)
    total = (x.float() + parts.sum(0)).to(dtype)
    assert_near(rms_norm(x, weight, 0.3, parts=parts), REFERENCE.rms_norm(total, Norm(weight, 0.3)))
    assert_near(x, total)


def test_rows_of_a_wider_tensor():
    wide, weight = random(3, 90), random(40, seed=1)
    assert_near(rms_norm(wide[:, 7:47], weight, 1e-6), REFERENCE.rms_norm(wide[:, 7:47], Norm(weight, 1e-6)))
    assert_near(activate_and_mul(wide[:, 7:47], "silu"), gated(wide[:, 7:47]))


def test_no_rows():
    assert rms_norm(random(0, 8), random(8), 1e-6).shape == (0, 8)
    assert activate_and_mul(random(0, 8), "silu").shape == (0, 4)


def test_too_long_rows_are_refused():
    with pytest.raises(ValueError, match="too long"):
        rms_norm(random(1, MAX_DIM + 1), random(MAX_DIM + 1), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize(("tokens", "dim"), [(1, 1), (3, 65), (2, 3000)])
def test_activate_and_mul(tokens, dim, dtype, activation):
    x = random(tokens, 2 * dim, dtype=dtype) * 5
    assert_near(activate_and_mul(unaligned(x), activation), gated(x, activation))


@pytest.mark.parametrize("activation", GATES)
def test_activations_of_great_numbers_are_finite(activation):
    x = torch.tensor([[-200.0, 200.0, 2.0, 3.0]], device=random(1).device)
    assert_near(activate_and_mul(x, activation), torch.tensor([[0.0, 600.0]], device=x.device))
