from __future__ import annotations

import pytest
import torch

from tests.ops.kernels import DEVICE, DTYPES, assert_near, poisoned, random
from tokenmill.ops.api import HeadNorms, Rotation
from tokenmill.ops.reference import ReferenceOps

pytest.importorskip("triton")
from tokenmill.ops.triton.inputs import angle_table, apply_page_updates, gather_inputs, locate_tokens
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
    [(3, 2, 1, 8, 8), (2, 6, 2, 80, 64), (1, 5, 5, 16, 4), (70, 3, 1, 8, 8)],
)
def test_prepare_qkv(tokens, heads, kv_heads, head_dim, rotary_dim, has_norms, dtype):
    qkv = random(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    rotation = rotation_of(torch.arange(tokens, device=DEVICE) * 1000, random(rotary_dim // 2, seed=1).abs())
    norms = HeadNorms(random(head_dim, seed=2, dtype=dtype), random(head_dim, seed=3, dtype=dtype), 0.1)
    kv_slots = torch.randperm(tokens + 9, generator=torch.Generator().manual_seed(4))[:tokens].to(DEVICE)
    found, expected = (random(2, tokens + 9, kv_heads, head_dim, seed=5, dtype=dtype) for _ in range(2))
    args = (qkv, rotation, norms if has_norms else None)
    query = poisoned(tokens, heads, head_dim, dtype=dtype)
    assert prepare_qkv(*args, *found, kv_slots, query) is query
    assert_near(query, REFERENCE.prepare_qkv(*args, *expected, kv_slots))
    assert_near(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    untouched = [slot for slot in range(tokens + 9) if slot not in kv_slots.tolist()]
    assert torch.equal(found[0][untouched], expected[0][untouched])


def test_prepare_qkv_of_nothing():
    rotation = rotation_of(torch.zeros(0, device=DEVICE), random(4))
    keys, values = random(2, 3, 1, 8)
    assert prepare_qkv(random(0, 4, 8), rotation, None, keys, values, torch.zeros(0, device=DEVICE)).shape == (0, 2, 8)


@pytest.mark.parametrize("page_size", [1, 16, 5])
def test_locate_tokens(page_size):
    positions = torch.tensor([0, 4, 17, 39], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([2, 0, 2, 1], dtype=torch.int32, device=DEVICE)
    pages = -(-40 // page_size)
    page_table = torch.arange(3 * pages, dtype=torch.int32, device=DEVICE).flip(0).view(3, pages).contiguous()
    frequencies = random(3).abs()
    found = Rotation(poisoned(4, 1, 6), poisoned(4, 1, 6))
    kv_slots = poisoned(4, dtype=torch.int64)
    locate_tokens(positions, slots, page_table, page_size, angle_table(frequencies, 2.0, 40), found, kv_slots)
    expected = rotation_of(positions, frequencies)
    torch.testing.assert_close(found.cos, expected.cos * 2)
    torch.testing.assert_close(found.sin, expected.sin * 2)
    page = page_table[slots.long(), (positions // page_size).long()]
    assert torch.equal(kv_slots, (page * page_size + positions % page_size).long())


def test_angles_of_far_positions():
    table = angle_table(torch.tensor([1.0, 0.37], device=DEVICE), 1.0, 131072)
    exact = torch.arange(131072, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.37]).double()
    exact[:, 1] = (torch.arange(131072).float() * torch.tensor(0.37)).double()  # the product is rounded, as everywhere
    expected = torch.cat((exact.cos(), exact.sin()), 1).float()
    torch.testing.assert_close(table.cpu(), expected, rtol=0, atol=3e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [3, 1500])
def test_gather_inputs(hidden, dtype):
    embedding = random(11, hidden, dtype=dtype)
    tokens = torch.tensor([4, -1, 0, -1], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([0, 2, 1, 0], dtype=torch.int32, device=DEVICE)
    last_tokens = torch.tensor([10, 99, 7], device=DEVICE)
    out = poisoned(4, hidden, dtype=dtype)
    assert gather_inputs(tokens, slots, last_tokens, embedding, out) is out
    assert torch.equal(out, embedding[[4, 7, 0, 10]])


@pytest.mark.parametrize("count", [0, 1, 129, 200])
def test_apply_page_updates(count):
    page_table = poisoned(20, 13, dtype=torch.int32)
    places = torch.randperm(20 * 13, generator=torch.Generator().manual_seed(0))[:200]
    updates = torch.stack((places // 13, places % 13, torch.arange(200)), 1).to(DEVICE, torch.int32)
    expected = page_table.clone()
    expected.view(-1)[places[:count].to(DEVICE)] = updates[:count, 2]
    apply_page_updates(page_table, updates, torch.tensor([count], dtype=torch.int32, device=DEVICE))
    assert torch.equal(page_table, expected)
