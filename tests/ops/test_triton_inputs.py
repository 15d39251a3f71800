from __future__ import annotations

import pytest
import torch

from tests.ops.kernels import DEVICE
from tokenmill.ops.reference import ReferenceOps

pytest.importorskip("triton")
from tokenmill.ops.triton.inputs import make_rotation, stage_tokens

PAGES = 40


def some(high: int, *shape: int, seed: int) -> torch.Tensor:
    return torch.randint(high, shape, dtype=torch.int32, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize(("kinds", "table_type"), [(1, torch.int32), (1, torch.int64), (3, torch.int32)])
@pytest.mark.parametrize(("tokens", "updates"), [(1, 0), (1, 65), (5, 1), (70, 300), (0, 3), (0, 0), (200, 7)])
def test_tokens_are_found_as_the_twin_finds_them(tokens, updates, kinds, table_type):
    page_size = 16
    columns = torch.stack(
        (some(50, tokens, seed=1) - 25, some(PAGES * page_size, tokens, seed=2), some(9, tokens, seed=3))
    )
    columns[0].clamp_(min=-1)
    entries = torch.randperm(kinds * 9 * PAGES, generator=torch.Generator().manual_seed(4))[:updates].to(
        DEVICE, torch.int32
    )
    triples = torch.stack((entries // PAGES, entries % PAGES, 1000 + entries), dim=1)
    triples = torch.cat((triples, triples[:2]))  # the same update twice is one
    last_tokens = 100 + torch.arange(9, device=DEVICE)
    table = some(1000, kinds, 9, PAGES, seed=5).to(table_type)
    expected_table = table.clone()
    expected = ReferenceOps().stage_tokens(columns, triples, last_tokens, expected_table, page_size)
    found = stage_tokens(columns, triples, last_tokens, table, page_size)
    assert torch.equal(table, expected_table)
    for ours, twins in zip(found, expected, strict=True):
        assert ours.dtype == torch.int32
        assert ours.tolist() == twins.tolist()


@pytest.mark.parametrize("half", [32, 40, 64])
def test_rotation_is_at_least_as_exact_as_the_twins(half):
    positions = torch.tensor([0, 1, 17, 4095, 40000, 105616, 131071], dtype=torch.int32, device=DEVICE)
    frequencies = (1e6 ** (-torch.arange(half, device=DEVICE) / half)).float()
    angles = (positions.float().view(-1, 1, 1) * frequencies).double()
    expected = torch.cat((angles.cos(), angles.cos()), -1) * 1.5, torch.cat((-angles.sin(), angles.sin()), -1) * 1.5
    found, twin = (make(positions, frequencies, 1.5) for make in (make_rotation, ReferenceOps().rotation))
    for ours, twins, truth in zip((found.cos, found.sin), (twin.cos, twin.sin), expected, strict=True):
        assert ours.shape == (7, 1, 2 * half)
        assert (ours - truth).abs().max() <= max((twins - truth).abs().max(), 1.5 * 2**-23)


def test_no_tokens_have_no_angles():
    rotation = make_rotation(torch.zeros(0, dtype=torch.int32, device=DEVICE), torch.ones(4, device=DEVICE), 1.0)
    assert rotation.cos.shape == rotation.sin.shape == (0, 1, 8)
