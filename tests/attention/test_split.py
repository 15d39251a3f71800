from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.attention.paged import DEVICE, Paged
from tokenmill.attention.base import FusedAttention, GraphAttention, RowLayout
from tokenmill.attention.reference import ReferenceAttention
from tokenmill.attention.split import GraphSplitAttention, SplitAttention
from tokenmill.ops.api import HeadNorms, Rotation

MIXED = [(4, 1), (0, 7), (62, 4), (0, 1), (64, 65), (63, 2), (130, 1)]


class Graphed(ReferenceAttention):
    """A backend that could be captured, and prepares what it runs."""

    def plan_decode(
        self, slots: torch.Tensor, positions: torch.Tensor, page_table: torch.Tensor, page_size: int
    ) -> Any:
        layout = RowLayout(tuple(slots.tolist()), tuple(positions.tolist()), (1,) * len(slots))
        return self.plan(layout, page_table, page_size)

    def prepares(self, metadata: Any) -> bool:
        return True

    def prepare_and_run(self, qkv: Any, rotation: Any, norms: Any, kv: Any, layer: int, metadata: Any) -> Any:
        return qkv, rotation, norms, kv, layer, metadata


def reference(scale: float) -> ReferenceAttention:
    return ReferenceAttention(scale=scale, token_elements=32)


def result_of(backend: Any, case: Paged) -> torch.Tensor:
    return backend.run(case.query, case.kv, 1, backend.plan(case.layout, case.table.long(), case.page))


@pytest.mark.parametrize("rows", [MIXED, MIXED[::-1], [(4, 1), (0, 3)]])
def test_each_row_is_computed_by_its_backend(rows: list[tuple[int, int]]) -> None:
    case = Paged(rows)
    prefill, decode = reference(0.5), reference(-0.5)
    by_prefill, by_decode = result_of(prefill, case), result_of(decode, case)
    is_decode = torch.tensor([length == 1 for _, length in rows for _ in range(length)], device=DEVICE)
    expected = torch.where(is_decode[:, None, None], by_decode, by_prefill)
    torch.testing.assert_close(result_of(SplitAttention(prefill, decode), case), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(by_prefill, by_decode, atol=1e-2)


@pytest.mark.parametrize(("rows", "scale"), [([(4, 1), (0, 1)], -0.5), ([(4, 2), (0, 7)], 0.5)])
def test_steps_of_one_kind_go_to_one_backend_whole(rows: list[tuple[int, int]], scale: float) -> None:
    case = Paged(rows)
    backend = SplitAttention(reference(0.5), reference(-0.5))
    (part,) = backend.plan(case.layout, case.table.long(), case.page)
    assert part.tokens is None
    assert torch.equal(result_of(backend, case), result_of(reference(scale), case))


def test_graphs_come_from_the_decode_backend() -> None:
    prefill, decode = reference(0.5), Graphed(scale=-0.5, token_elements=32)
    assert not isinstance(SplitAttention(decode, prefill), GraphAttention)
    backend = GraphSplitAttention(prefill, decode)
    assert isinstance(backend, GraphAttention)
    case = Paged([(4, 1), (30, 1), (0, 1)])
    metadata = backend.plan_decode(case.slots, case.last_positions, case.table.long(), case.page)
    assert torch.equal(backend.run(case.query, case.kv, 1, metadata), result_of(decode, case))


def test_decode_steps_are_prepared_where_the_backend_does() -> None:
    plain, fused = reference(0.5), Graphed(scale=-0.5, token_elements=32)
    backend, case = GraphSplitAttention(plain, fused), Paged(MIXED)
    assert isinstance(backend, FusedAttention)
    assert not backend.prepares(backend.plan(case.layout, case.table.long(), case.page))
    case = Paged([(4, 1), (30, 1)])
    assert not SplitAttention(fused, plain).prepares(
        SplitAttention(fused, plain).plan(case.layout, case.table.long(), case.page)
    )
    metadata = backend.plan(case.layout, case.table.long(), case.page)
    assert backend.prepares(metadata)
    qkv, norms = case.query, HeadNorms(case.query, case.query, 0.1)
    rotation = Rotation(case.query, case.query)
    given = backend.prepare_and_run(qkv, rotation, norms, case.kv, 1, metadata)
    assert given == (qkv, rotation, norms, case.kv, 1, metadata[0].metadata)
