import math

import pytest
import torch

from tokenmill.errors import ConfigError
from tokenmill.ops.api import HeadNorms, Hidden, Norm, Ops, Rotation
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
    found = ops.rms_norm(x, Norm(weight, 0.5))
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected.to(dtype))


def test_products_of_and_to_the_hidden_state(ops: Ops) -> None:
    x, weight, bias, norm = random(3, 4), random(4, 4, seed=1), random(4, seed=2), Norm(random(4, seed=4), 1e-5)
    hidden = Hidden(random(3, 4, seed=3))
    expected = ops.rms_norm(hidden.value, norm) @ weight.T + bias
    torch.testing.assert_close(ops.normed_linear(hidden, weight, bias, norm=norm), expected)
    expected = hidden.value + x @ weight.T + bias
    ops.add_linear(hidden, x, weight, bias)
    torch.testing.assert_close(ops.settle(hidden), expected)


@pytest.mark.parametrize("has_bias", [False, True])
def test_gated_linear(ops: Ops, has_bias: bool) -> None:
    x, weight, norm = random(3, 6), random(10, 6, seed=1), Norm(random(6, seed=2), 1e-5)
    bias = random(10, seed=3) if has_bias else None
    gate, up = ops.normed_linear(Hidden(x), weight, bias, norm=norm).split(5, dim=-1)
    torch.testing.assert_close(ops.gated_linear(Hidden(x), weight, bias, norm=norm), gate / (1 + (-gate).exp()) * up)
    curve = 0.5 * (1 + ((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh())
    found = ops.gated_linear(Hidden(x), weight, bias, norm=norm, activation="gelu_tanh")
    torch.testing.assert_close(found, gate * curve * up)


def test_a_norm_may_be_missing_or_follow(ops: Ops) -> None:
    x, weight, norm = random(3, 4), random(4, 4, seed=1), Norm(random(4, seed=4), 1e-5)
    torch.testing.assert_close(ops.normed_linear(Hidden(x.clone()), weight, norm=None), x @ weight.T)
    hidden = Hidden(random(3, 4, seed=3))
    expected = hidden.value + ops.rms_norm(x, norm)
    ops.add_normed(hidden, x, norm)
    torch.testing.assert_close(ops.settle(hidden), expected)


def angles_of(tokens: int, rotary_dim: int) -> tuple[torch.Tensor, Rotation]:
    angles = random(tokens, 1, rotary_dim // 2, seed=1)
    cos, sin = angles.cos(), angles.sin()
    return angles, Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    half = angles.shape[-1]
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), -1)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_prepare_qkv_normalises_turns_and_stores(ops: Ops, rotary_dim: int, has_norms: bool) -> None:
    qkv = random(3, 4 + 2 * 2, 8)
    angles, rotation = angles_of(3, rotary_dim)
    norms = HeadNorms(random(8, seed=2), random(8, seed=3), 1e-5) if has_norms else None
    keys, values = torch.zeros(9, 2, 8), torch.zeros(9, 2, 8)
    query = ops.prepare_qkv(qkv, rotation, norms, keys, values, torch.tensor([4, 1, 7]))
    plain_query, plain_key = qkv[:, :4], qkv[:, 4:6]
    if norms is not None:
        plain_query = ops.rms_norm(plain_query, Norm(norms.query, norms.eps))
        plain_key = ops.rms_norm(plain_key, Norm(norms.key, norms.eps))
    torch.testing.assert_close(query, turned(plain_query, angles))
    torch.testing.assert_close(keys[[4, 1, 7]], turned(plain_key, angles))
    torch.testing.assert_close(values[[4, 1, 7]], qkv[:, 6:])
    others = [0, 2, 3, 5, 6, 8]
    assert not keys[others].any()
    assert not values[others].any()


def test_prepare_qkv_keeps_half_precision(ops: Ops) -> None:
    qkv = random(2, 3, 4).bfloat16()
    still = Rotation(torch.ones(2, 1, 4), torch.zeros(2, 1, 4))
    keys, values = torch.zeros(2, 1, 4).bfloat16(), torch.zeros(2, 1, 4).bfloat16()
    query = ops.prepare_qkv(qkv, still, None, keys, values, torch.tensor([0, 1]))
    torch.testing.assert_close(query, qkv[:, :1])
    torch.testing.assert_close(keys, qkv[:, 1:2])
