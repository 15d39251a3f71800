import math

import pytest
import torch

from tokenmill.errors import ConfigError
from tokenmill.ops.api import Ops
from tokenmill.ops.select import make_ops

OPS = ["reference"]


@pytest.fixture(params=OPS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return make_ops(request.param)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="reference"):
        make_ops("fastest")


def test_linear(ops: Ops) -> None:
    x, weight, bias = random(3, 5), random(4, 5, seed=1), random(4, seed=2)
    torch.testing.assert_close(ops.linear(x, weight), x @ weight.T)
    torch.testing.assert_close(ops.linear(x, weight, bias), x @ weight.T + bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_sums_wide(ops: Ops, dtype: torch.dtype) -> None:
    x, weight = (random(3, 300) * 100).to(dtype), random(300, seed=1).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 0.5).sqrt() * weight.double()
    found = ops.rms_norm(x, weight, 0.5)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected.to(dtype))


def test_add_rms_norm_returns_both(ops: Ops) -> None:
    x, residual, weight = random(2, 8), random(2, 8, seed=1), random(8, seed=2)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, ops.rms_norm(x + residual, weight, 1e-5))


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_rope_turns_pairs_of_the_halves(ops: Ops, rotary_dim: int) -> None:
    x = random(3, 2, 8)
    angles = random(3, 1, rotary_dim // 2, seed=1)
    cos, sin = angles.cos(), angles.sin()
    found = ops.rope(x, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    half = rotary_dim // 2
    turned = torch.complex(x[..., :half], x[..., half:rotary_dim]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(found, torch.cat((turned.real, turned.imag, x[..., rotary_dim:]), -1))


def test_rope_keeps_half_precision(ops: Ops) -> None:
    x = random(2, 1, 4).bfloat16()
    found = ops.rope(x, torch.full((2, 1, 4), math.cos(0.0)), torch.zeros(2, 1, 4))
    torch.testing.assert_close(found, x)


def test_silu_and_mul(ops: Ops) -> None:
    x = random(3, 10)
    gate, up = x[:, :5], x[:, 5:]
    torch.testing.assert_close(ops.silu_and_mul(x), gate / (1 + (-gate).exp()) * up)


def test_store_kv_writes_the_slots_and_nothing_else(ops: Ops) -> None:
    keys, values = torch.zeros(6, 2, 4), torch.zeros(6, 2, 4)
    key, value = random(2, 3, 4)[:, :2], random(2, 3, 4, seed=1)[:, 1:]  # parts of a wider tensor
    ops.store_kv(key, value, keys, values, torch.tensor([4, 1]))
    torch.testing.assert_close(keys[[4, 1]], key)
    torch.testing.assert_close(values[[4, 1]], value)
    assert not keys[[0, 2, 3, 5]].any()
    assert not values[[0, 2, 3, 5]].any()
