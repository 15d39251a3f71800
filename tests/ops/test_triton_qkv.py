from __future__ import annotations

import pytest
import torch

from tests.ops.kernels import DEVICE, DTYPES, assert_near, random
from tokenmill.ops.api import HeadNorms, Rotation
from tokenmill.ops.reference import ReferenceOps

pytest.importorskip("triton")
from tokenmill.ops.triton.qkv import prepare_qkv

REFERENCE = ReferenceOps()


def rotation_of(positions: torch.Tensor, frequencies: torch.Tensor) -> Rotation:
    angles = positions.float().view(-1, 1, 1) * frequencies
    cos, sin = angles.cos(), angles.sin()
    return Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim", "rotary_dim"),
    [(3, 2, 1, 8, 8), (2, 6, 2, 80, 64), (1, 5, 5, 16, 4), (70, 3, 1, 8, 8), (65, 30, 5, 128, 128), (65, 5, 1, 96, 32)],
)
def test_prepare_qkv(tokens, heads, kv_heads, head_dim, rotary_dim, has_norms, dtype):
    qkv = random(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    rotation = rotation_of(torch.arange(tokens, device=DEVICE) * 1000, random(rotary_dim // 2, seed=1).abs())
    norms = HeadNorms(random(head_dim, seed=2, dtype=dtype), random(head_dim, seed=3, dtype=dtype), 0.1)
    kv_slots = torch.randperm(tokens + 9, generator=torch.Generator().manual_seed(4))[:tokens].to(DEVICE)
    found, expected = (random(2, tokens + 9, kv_heads, head_dim, seed=5, dtype=dtype) for _ in range(2))
    args = (qkv, rotation, norms if has_norms else None)
    query = prepare_qkv(*args, *found, kv_slots)
    assert_near(query, REFERENCE.prepare_qkv(*args, *expected, kv_slots))
    assert_near(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    untouched = [slot for slot in range(tokens + 9) if slot not in kv_slots.tolist()]
    assert torch.equal(found[0][untouched], expected[0][untouched])


def test_prepare_qkv_of_nothing():
    rotation = rotation_of(torch.zeros(0, device=DEVICE), random(4))
    keys, values = random(2, 3, 1, 8)
    assert prepare_qkv(random(0, 4, 8), rotation, None, keys, values, torch.zeros(0, device=DEVICE)).shape == (0, 2, 8)
