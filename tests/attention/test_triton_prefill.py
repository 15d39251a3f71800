from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.paged import DEVICE, TOLERANCE, Paged
from tokenmill.attention.reference import ReferenceAttention
from tokenmill.ops.api import Rotation

pytest.importorskip("triton")
from tokenmill.attention.triton import TritonAttention
from tokenmill.attention.triton_decode import COUNT, POSITION, SLOT, TOKEN
from tokenmill.attention.triton_prefill import (
    PrefillRow,
    PrefillSettings,
    can_gather,
    gathered_attention,
    make_work,
    prefill_attention,
    prefill_settings,
)

MIXED = [(4, 1), (0, 7), (62, 4), (0, 1), (64, 65), (63, 2), (130, 3)]
DIMS = {torch.float32: 16, torch.bfloat16: 64}


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool, needs_sums: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What cuDNN computes, plainly."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(group, 1) for x in (key, value))
    scores = query.float() @ key.transpose(2, 3) * scale  # [1, heads, queries, positions]
    if is_causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return (scores.softmax(3) @ value).to(query.dtype), scores.logsumexp(3)[0]


@pytest.fixture(autouse=True)
def cudnn_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type != "cuda":
        monkeypatch.setattr("tokenmill.attention.triton_prefill._dense", dense_attention)


def settings_of(case: Paged, num_sms: int = 132) -> PrefillSettings:
    tokens, heads, dim = case.query.shape
    group = heads // case.kv.keys.shape[2]
    return prefill_settings(group, dim, case.query.element_size(), tokens * heads, num_sms)


def prefill(case: Paged, *, num_sms: int = 132) -> torch.Tensor:
    settings = settings_of(case, num_sms)
    work = make_work(prefill_rows(case), settings.block_m * case.kv.keys.shape[2] // case.query.shape[1])
    out = torch.full_like(case.query, float("nan"))
    prefill_attention(
        case.query, case.kv.keys[1], case.kv.values[1], case.table,
        torch.tensor(work, dtype=torch.int32, device=DEVICE), out, settings, page_size=case.page, scale=case.scale,
        window=case.window, cap=case.cap,
    )  # fmt: skip
    return out


def prefill_rows(case: Paged) -> list[PrefillRow]:
    rows, first = [], 0
    for slot, (start, length) in zip(case.layout.slots, case.rows, strict=True):
        rows.append(PrefillRow(first, slot, start, length))
        first += length
    return rows


def gathered(case: Paged, bucket: int) -> torch.Tensor:
    return torch.cat(
        [
            gathered_attention(
                case.query, case.kv.keys[1], case.kv.values[1], case.table, row, page_size=case.page,
                scale=case.scale, bucket=bucket,
            )
            for row in prefill_rows(case)
        ]
    )  # fmt: skip


def backend_of(case: Paged, **options: int) -> TritonAttention:
    options |= {"window": case.window}
    heads, dim = case.query.shape[1:]
    return TritonAttention(
        scale=case.scale, cap=case.cap, num_heads=heads, num_kv_heads=case.kv.keys.shape[2], head_dim=dim,
        dtype=case.dtype, num_sms=options.pop("num_sms", 132), **options,
    )  # fmt: skip


@pytest.mark.parametrize("page", [1, 3, 16, 64])
def test_rows_of_any_lengths_in_any_pages(page: int) -> None:
    case = Paged(MIXED, page=page, heads=2, kv_heads=1)
    case.check(prefill(case))


@pytest.mark.parametrize(("window", "cap"), [(1, 0.0), (5, 0.0), (64, 2.0), (0, 2.0), (100, 0.0), (1000, 0.0)])
@pytest.mark.parametrize("page", [3, 64])
def test_windows_and_caps(window: int, cap: float, page: int) -> None:
    case = Paged([*MIXED, (150, 70), (0, 200)], page=page, heads=2, kv_heads=1, window=window, cap=cap)
    case.check(prefill(case))
    backend = backend_of(case)
    case.check(backend.run(case.query, case.kv, 1, backend.plan(case.layout, case.table, case.page)))


def test_rows_inside_the_window_are_gathered() -> None:
    case = Paged([(0, 16), (8, 20), (0, 20)], dim=64, dtype=torch.float16, window=20)
    backend = backend_of(case, gather_from=12)
    metadata = backend.plan(case.layout, case.table, case.page)
    assert [row.first_token for row in metadata.gathered] == [0, 36]
    case.check(backend.run(case.query, case.kv, 1, metadata))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 33])
def test_grouped_heads(group: int) -> None:
    case = Paged([(20, 30)], heads=2 * group, kv_heads=2, page=16)
    case.check(prefill(case))


def test_many_queries_have_larger_tiles() -> None:
    case = Paged([(0, 300), (20, 40)], heads=2, kv_heads=1, page=16, dtype=torch.bfloat16)
    assert (settings_of(case, 3).block_m, settings_of(case, 2).block_m) == (64, 128)
    for num_sms in (3, 2):
        case.check(prefill(case, num_sms=num_sms))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [8, 64, 80, 96, 128, 256])
def test_head_dims_and_types(dim: int, dtype: torch.dtype) -> None:
    case = Paged([(65, 5), (0, 9)], heads=2, kv_heads=1, dim=dim, page=16, dtype=dtype)
    case.check(prefill(case))


def test_scores_far_apart_do_not_overflow() -> None:
    case = Paged([(70, 20)], page=16)
    case.query *= 300
    case.check(prefill(case))


def test_only_named_tokens_are_written() -> None:
    case = Paged([(0, 3), (5, 4), (2, 2)], page=3)
    out = torch.full_like(case.query, 7.0)
    work = torch.tensor(make_work(prefill_rows(case)[1:2], 1), dtype=torch.int32, device=DEVICE)
    prefill_attention(
        case.query, case.kv.keys[1], case.kv.values[1], case.table.long(), work, out, settings_of(case),
        page_size=3, scale=case.scale,
    )  # fmt: skip
    assert (out[:3] == 7).all()
    assert (out[7:] == 7).all()
    torch.testing.assert_close(out[3:7].cpu().double(), case.expected()[3:7], atol=2e-5, rtol=2e-5)


def test_strides_apart_are_refused() -> None:
    case = Paged([(0, 3)])
    wide = torch.stack((case.kv.values, case.kv.values), 2)
    with pytest.raises(ValueError, match="equal strides"):
        prefill_attention(
            case.query, case.kv.keys[1], wide[1, :, 0], case.table, torch.zeros((1, 4), dtype=torch.int32),
            torch.empty_like(case.query), settings_of(case), page_size=4, scale=1.0,
        )  # fmt: skip


@given(
    rows=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), max_size=12), block=st.sampled_from([1, 3, 64])
)
def test_work_holds_every_query_once_and_heavy_blocks_first(rows: list[tuple[int, int]], block: int) -> None:
    plan, first = [], 0
    for slot, (start, length) in enumerate(rows):
        plan.append(PrefillRow(first, slot, start, length))
        first += length
    work = make_work(plan, block)
    queries = sorted((token + i, slot, at + i) for token, slot, at, count in work for i in range(count))
    assert queries == [(row.first_token + i, row.slot, row.start + i) for row in plan for i in range(row.length)]
    ends = [at + count for _, _, at, count in work]
    assert ends == sorted(ends, reverse=True)
    assert all(1 <= count <= block for _, _, _, count in work)


@pytest.mark.parametrize("bucket", [4, 16])
@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gathered_rows(bucket: int, page: int, dtype: torch.dtype) -> None:
    rows = [(0, 16), (0, 5), (16, 16), (32, 9), (3, 2), (21, 19), (15, 1), (16, 1)]
    case = Paged(rows, page=page, dim=64, dtype=dtype)
    case.check(gathered(case, bucket))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="cuDNN computes no float32")
def test_gathered_rows_merge_exactly() -> None:
    case = Paged([(32, 9), (21, 19), (0, 5)], page=3, heads=6, kv_heads=2)
    case.query *= 30
    case.check(gathered(case, 8))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="cuDNN needs a GPU")
@pytest.mark.parametrize("rows", [[(0, 2048)], [(1000, 2100)], [(4096, 2048), (7, 1), (0, 30)]])
def test_long_rows_by_cudnn(rows: list[tuple[int, int]]) -> None:
    case = Paged(rows, heads=8, kv_heads=2, dim=128, page=16, dtype=torch.bfloat16)
    backend = backend_of(case)
    case.check(backend.run(case.query, case.kv, 1, backend.plan(case.layout, case.table, case.page)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_sms", [1, 132])
def test_mixed_step_equals_the_reference(dtype: torch.dtype, num_sms: int) -> None:
    case = Paged(MIXED, page=16, dtype=dtype, dim=DIMS[dtype])
    backend = backend_of(case, num_sms=num_sms, gather_from=60)
    metadata = backend.plan(case.layout, case.table, case.page)
    assert metadata.decode is not None
    pieces = [piece for piece in metadata.decode.pieces.tolist() if piece[COUNT.value]]
    rows = [[piece[column.value] for column in (TOKEN, SLOT, POSITION)] for piece in pieces]
    assert rows == [[0, case.layout.slots[0], 4], [12, case.layout.slots[3], 0]]  # the longer context first
    assert not backend.prepares(metadata)
    assert metadata.work is not None
    assert len(metadata.gathered) == (0 if dtype == torch.float32 else 1)
    result = backend.run(case.query, case.kv, 1, metadata)
    case.check(result)
    reference = ReferenceAttention(scale=case.scale, token_elements=1)
    expected = reference.run(case.query, case.kv, 1, reference.plan(case.layout, case.table.long(), case.page))
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows", [[(9, 1), (70, 1)], [(0, 5)], [(10, 12)], [(3, 1)]])
def test_steps_of_one_kind(rows: list[tuple[int, int]]) -> None:
    case = Paged(rows, dim=64, dtype=torch.float16)
    backend = backend_of(case, gather_from=12)
    case.check(backend.run(case.query, case.kv, 1, backend.plan(case.layout, case.table, case.page)))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="graphs need a GPU")
@pytest.mark.parametrize("num_sms", [1, 2, 132])  # whole rows, few pieces, many pieces
def test_captured_decode_serves_other_contexts(num_sms: int) -> None:
    short = [(9, 1), (70, 1), (0, 1), (5, 1), (5, 1)]
    long = [(500, 1), (3, 1), (64, 1), (0, 1), (200, 1)]
    case, other = Paged(long, page=16), Paged(short, page=16, seed=1)
    backend = backend_of(case, num_sms=num_sms)
    slots, positions, query = other.slots, other.last_positions, other.query.clone()
    table = torch.zeros_like(case.table)
    keys, values = torch.zeros_like(case.kv.keys), torch.zeros_like(case.kv.values)
    kv = replace(case.kv, keys=keys, values=values)

    def step() -> torch.Tensor:
        return backend.run(query, kv, 1, backend.plan_decode(slots, positions, table, 16))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for now in (case, other, case):
        slots.copy_(now.slots)
        positions.copy_(now.last_positions)
        query.copy_(now.query)
        table[:, : now.table.shape[1]].copy_(now.table)
        keys[:, : now.kv.keys.shape[1]].copy_(now.kv.keys)
        values[:, : now.kv.keys.shape[1]].copy_(now.kv.values)
        graph.replay()
        now.check(out)


@pytest.mark.parametrize("num_sms", [1, 2, 132])
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (1, 0.0), (33, 2.0)])
def test_decode_steps_prepare_inside(num_sms: int, window: int, cap: float) -> None:
    case = Paged([(9, 1), (700, 1), (0, 1), (30, 1), (64, 1)], page=16, window=window, cap=cap)
    backend = backend_of(case, num_sms=num_sms)
    qkv = torch.cat((case.query, torch.randn(5, 4, 16).to(DEVICE)), 1)
    still = Rotation(torch.ones(5, 1, 16, device=DEVICE), torch.zeros(5, 1, 16, device=DEVICE))
    for context, own in zip(case.contexts, qkv.cpu(), strict=True):
        context[0][-1], context[1][-1] = own[4:6], own[6:]
    for metadata in (
        backend.plan(case.layout, case.table, case.page),
        backend.plan_decode(case.slots, case.last_positions, case.table, case.page),
    ):
        assert backend.prepares(metadata)
        case.check(backend.prepare_and_run(qkv, still, None, case.kv, 1, metadata))
        case.check(backend.run(case.query, case.kv, 1, metadata))  # K and V have been stored


def test_what_cudnn_takes() -> None:
    assert can_gather(128, torch.bfloat16)
    assert not can_gather(128, torch.float32)
    assert not can_gather(256, torch.bfloat16)
    assert not can_gather(20, torch.float16)
