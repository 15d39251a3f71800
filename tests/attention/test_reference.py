from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.attention.base import KVCache, RowLayout
from tokenmill.attention.reference import PIECE_QUERIES, SPARE_COST, cut_rows, group_pieces
from tokenmill.attention.select import make_backends
from tokenmill.spec import ModelSpec

BACKENDS = ["reference", "reference,reference"]
LAYERS = 2


def spec_of(heads: int, kv_heads: int, head_dim: int) -> ModelSpec:
    return ModelSpec("llama", 8, heads * head_dim, 8, LAYERS, heads, kv_heads, head_dim, 512)


class Case:
    """Random K/V of some rows in scattered pages; every slot that no row owns holds NaN."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 8,
        page: int = 4,
        *,
        window: int = 0,
        cap: float = 0.0,
        seed: int = 0,
    ) -> None:
        layers = tuple(range(LAYERS)) if window else ()
        self.spec = replace(spec_of(heads, kv_heads, dim), window=window, window_layers=layers, attention_cap=cap)
        generator = torch.Generator().manual_seed(seed)
        slots, pages = len(rows) + 2, max(-(-(start + length) // page) for start, length in rows)
        order = torch.randperm(slots, generator=generator).tolist()[: len(rows)]
        self.layout = RowLayout(tuple(order), tuple(r[0] for r in rows), tuple(r[1] for r in rows))
        self.page_table = torch.randperm(slots * pages, generator=generator).view(slots, pages)
        tokens = sum(self.layout.lengths)
        self.query = torch.randn(tokens, heads, dim, generator=generator)
        self.key = torch.randn(tokens, kv_heads, dim, generator=generator)
        self.value = torch.randn(tokens, kv_heads, dim, generator=generator)
        shape = (LAYERS, slots * pages * page, kv_heads, dim)
        self.kv = KVCache(*(torch.full(shape, float("nan")) for _ in range(2)), page)
        self.pasts = []
        for slot, start in zip(self.layout.slots, self.layout.starts, strict=True):
            past = torch.randn(2, start, kv_heads, dim, generator=generator)
            self.kv.keys[1, self.places(slot, start)], self.kv.values[1, self.places(slot, start)] = past
            self.pasts.append(past)
            unseen = self.places(slot, max(0, start + 1 - window) if window else 0)
            self.kv.keys[1, unseen] = self.kv.values[1, unseen] = float("nan")

    def places(self, slot: int, stop: int) -> torch.Tensor:
        positions = torch.arange(stop)
        return self.page_table[slot, positions // self.kv.page_size] * self.kv.page_size + positions % self.kv.page_size

    def new_places(self) -> torch.Tensor:
        rows = zip(self.layout.slots, self.layout.starts, self.layout.lengths, strict=True)
        return torch.cat([self.places(slot, start + length)[start:] for slot, start, length in rows])

    def run(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        (backend,) = make_backends(name, self.spec)
        kv = KVCache(self.kv.keys.to(dtype), self.kv.values.to(dtype), self.kv.page_size)
        metadata = backend.plan(self.layout, self.page_table, kv.page_size)
        kv.keys[1, self.new_places()] = self.key.to(dtype)
        kv.values[1, self.new_places()] = self.value.to(dtype)
        result = backend.run(self.query.to(dtype), kv, 1, metadata)
        self.kv = KVCache(kv.keys.float(), kv.values.float(), kv.page_size)
        return result.float()

    def expected(self) -> torch.Tensor:
        """One row, one head and one query at a time, in float64."""
        results, first = [], 0
        share = self.spec.num_heads // self.spec.num_kv_heads
        for past, start, length in zip(self.pasts, self.layout.starts, self.layout.lengths, strict=True):
            keys = torch.cat((past[0], self.key[first : first + length])).double()
            values = torch.cat((past[1], self.value[first : first + length])).double()
            for i in range(length):
                for head in range(self.spec.num_heads):
                    window, cap = self.spec.window, self.spec.attention_cap
                    seen = slice(max(0, start + i + 1 - window) if window else 0, start + i + 1), head // share
                    scores = keys[seen] @ self.query[first + i, head].double() * self.spec.head_dim**-0.5
                    scores = (scores / cap).tanh() * cap if cap else scores
                    results.append(scores.softmax(0) @ values[seen])
            first += length
        return torch.stack(results).view(first, self.spec.num_heads, -1).float()


LAYOUTS = {
    "one decode row": [(6, 1)],
    "first token": [(0, 1)],
    "decode rows of unlike contexts": [(3, 1), (30, 1), (0, 1), (11, 1)],
    "decode rows of like contexts": [(5, 1), (5, 1)],
    "one prompt": [(0, 9)],
    "one chunk": [(10, 5)],
    "mixed": [(4, 1), (0, 7), (9, 3), (0, 1), (2, 7)],
    "long prompt": [(0, 2 * PIECE_QUERIES + 3), (7, 1)],
    "very unlike rows": [(300, 1), (0, 2), (1, 1), (0, 150)],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", LAYOUTS.values(), ids=LAYOUTS)
def test_equals_one_query_at_a_time(backend: str, rows: list[tuple[int, int]]) -> None:
    case = Case(rows)
    torch.testing.assert_close(case.run(backend), case.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page"), [(9, 3, 16, 1), (4, 4, 5, 16), (5, 1, 7, 3), (6, 2, 1, 64)]
)
def test_odd_shapes(backend: str, heads: int, kv_heads: int, dim: int, page: int) -> None:
    case = Case(LAYOUTS["mixed"], heads, kv_heads, dim, page)
    torch.testing.assert_close(case.run(backend), case.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [LAYOUTS["mixed"], LAYOUTS["decode rows of unlike contexts"]])
def test_half_precision(backend: str, rows: list[tuple[int, int]]) -> None:
    case = Case(rows)
    torch.testing.assert_close(case.run(backend, torch.bfloat16), case.expected(), atol=0.04, rtol=0.04)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [0, 1, 5, 16, 300])
@pytest.mark.parametrize("cap", [0.0, 1.5])
def test_windows_and_caps(backend: str, window: int, cap: float) -> None:
    case = Case([*LAYOUTS["mixed"], (40, 1), (290, 270)], window=window, cap=cap)
    torch.testing.assert_close(case.run(backend), case.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", LAYOUTS.values(), ids=LAYOUTS)
def test_padding_may_follow_the_rows(backend: str, rows: list[tuple[int, int]]) -> None:
    case = Case(rows)
    tokens, (its,) = len(case.query), make_backends(backend, case.spec)
    case.run(backend)
    padded = torch.cat((case.query, torch.ones(5, *case.query.shape[1:])))
    metadata = its.plan(case.layout, case.page_table, case.kv.page_size)
    result = its.run(padded, case.kv, 1, metadata)
    assert result.shape == padded.shape
    torch.testing.assert_close(result[:tokens], case.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_only_its_rows_slots_of_its_layer(backend: str) -> None:
    case = Case(LAYOUTS["mixed"])
    case.run(backend)
    owned = torch.cat(
        [
            case.places(s, a + n)
            for s, a, n in zip(case.layout.slots, case.layout.starts, case.layout.lengths, strict=True)
        ]
    )
    is_written = ~case.kv.keys[1].isnan().any(-1).any(-1)
    assert is_written.nonzero().flatten().tolist() == sorted(owned.tolist())
    assert case.kv.keys[0].isnan().all()
    assert case.kv.values[0].isnan().all()
    torch.testing.assert_close(case.kv.keys[1, case.places(case.layout.slots[1], 7)], case.key[1:8])
    torch.testing.assert_close(case.kv.values[1, case.places(case.layout.slots[1], 7)], case.value[1:8])


@settings(deadline=None, max_examples=20)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 160))), min_size=1, max_size=8),
    page=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 100),
)
def test_any_layout_equals_its_rows_alone(rows: list[tuple[int, int]], page: int, seed: int) -> None:
    case = Case(rows, page=page, seed=seed)
    together = case.run("reference")
    first = 0
    for i, (start, length) in enumerate(rows):
        alone = Case(rows, page=page, seed=seed)
        part = slice(first, first + length)
        alone.layout = RowLayout((case.layout.slots[i],), (start,), (length,))
        alone.query, alone.key, alone.value = case.query[part], case.key[part], case.value[part]
        torch.testing.assert_close(alone.run("reference"), together[part], atol=1e-5, rtol=1e-5)
        first += length


@given(
    rows=st.lists(st.tuples(st.integers(0, 9000), st.one_of(st.just(1), st.integers(1, 600))), min_size=1, max_size=70)
)
def test_groups_hold_every_piece_once_with_little_padding(rows: list[tuple[int, int]]) -> None:
    layout = RowLayout(tuple(range(len(rows))), tuple(r[0] for r in rows), tuple(r[1] for r in rows))
    pieces = cut_rows(layout)
    tokens = [piece.first_token + i for piece in pieces for i in range(piece.length)]
    assert tokens == list(range(sum(layout.lengths)))
    groups = group_pieces(pieces, 2000)
    assert sorted((piece for group in groups for piece in group), key=lambda piece: piece.first_token) == pieces
    for group in groups:
        padded = len(group) * max(p.length for p in group) * max(p.context for p in group)
        real = sum(p.length * p.context for p in group)
        assert padded <= 1.25 * real + 9 * SPARE_COST or len(group) == 1
        assert len(group) * max(p.context for p in group) <= 2000 or len(group) == 1


def test_like_decode_rows_are_one_group() -> None:
    layout = RowLayout(tuple(range(16)), tuple(480 + i for i in range(16)), (1,) * 16)
    assert len(group_pieces(cut_rows(layout), 16 * 496)) == 1
    assert len(group_pieces(cut_rows(layout), 4 * 496)) == 4
