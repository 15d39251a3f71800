"""Steps described by tables of a fixed length give what steps described by their rows give."""

from __future__ import annotations

import pytest
import torch

from tests.attention.paged import DEVICE, TOLERANCE, Paged

pytest.importorskip("triton")
from tokenmill.attention.triton import TritonAttention


def backend(case: Paged, gather_from: int = 2048) -> TritonAttention:
    heads, kv_heads, dim = case.query.shape[1], case.kv.keys.shape[2], case.query.shape[2]
    return TritonAttention(
        scale=case.scale, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, dtype=case.dtype, num_sms=4,
        gather_from=gather_from,
    )  # fmt: skip


@pytest.mark.parametrize("rows", [[(0, 7)], [(4, 1), (0, 7), (62, 4), (0, 1), (130, 3)], [(3, 1), (9, 1)]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", [0, 5])
def test_tables_with_room_to_spare_give_what_the_rows_give(rows, dtype, padding):
    spare = (0, 1)
    case = Paged([*rows, spare], dtype=dtype, dim=16 if dtype is torch.float32 else 64)
    attention, spare_slot = backend(case), case.layout.slots[-1]
    layout = type(case.layout)(case.layout.slots[:-1], case.layout.starts[:-1], case.layout.lengths[:-1])
    count = sum(layout.lengths)
    num_tokens, num_rows = count + padding, len(rows) + 3
    numbers = attention.tables(layout, num_tokens, num_rows, spare_slot)
    assert len(numbers) == attention.table_length(num_tokens, num_rows)
    tables = torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
    query = torch.cat([case.query[:count], torch.zeros_like(case.query[:1]).expand(padding, -1, -1)])
    metadata = attention.plan_tables(tables, num_tokens, num_rows, case.table, case.page)
    out = attention.run(query, case.kv, 1, metadata)[:count]
    torch.testing.assert_close(out, case.expected()[:count].to(out), rtol=0, atol=TOLERANCE[dtype])


def test_rows_that_do_not_fit_have_no_tables():
    case = Paged([(0, 1), (0, 1), (0, 40)], dtype=torch.bfloat16, dim=64)
    assert backend(case).tables(case.layout, 64, 1, 0) is None
    assert backend(case, gather_from=40).tables(case.layout, 64, 8, 0) is None
    many = Paged([(0, 2)] * 30)
    assert backend(many).tables(many.layout, 64, 2, 0) is None
