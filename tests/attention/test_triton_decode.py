from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.attention.paged import DEVICE, TOLERANCE, Paged
from tokenmill.ops.api import HeadNorms, Rotation
from tokenmill.ops.reference import ReferenceOps

pytest.importorskip("triton")
from tokenmill.attention.triton_decode import (
    COLUMNS,
    COUNT,
    DecodePlan,
    DecodeSettings,
    decode_attention,
    decode_settings,
    plan_decode,
)

# One block holds 64 positions: contexts around its borders, shorter than the pieces, and of one position.
CONTEXTS = [1, 63, 64, 65, 130, 16]


def settings_of(case: Paged, pieces: int, least: int = 0) -> DecodeSettings:
    """As chosen for some rows, but cut into so many pieces."""
    chosen = decode_settings(8, 1, case.query.shape[2], case.dtype.itemsize, 132)
    return replace(chosen, num_pieces=pieces, least_piece=least)


def plan_of(case: Paged, settings: DecodeSettings, tokens: torch.Tensor | None = None) -> DecodePlan:
    heads, kv_heads, dim = case.query.shape[1], case.kv.keys.shape[2], case.query.shape[2]
    slots, positions = case.slots, case.last_positions
    if tokens is not None:
        slots, positions = slots[tokens], positions[tokens]
    plan = plan_decode(slots, positions, settings, heads, kv_heads, dim, tokens, window=case.window)
    plan.partials.fill_(float("nan"))
    plan.log_sums.fill_(float("nan"))
    return plan


def decode(case: Paged, pieces: int | DecodePlan) -> torch.Tensor:
    """With about so many pieces a row."""
    plan = plan_of(case, settings_of(case, pieces * len(case.rows))) if isinstance(pieces, int) else pieces
    out = torch.full_like(case.query, float("nan"))
    decode_attention(
        case.query, case.kv.keys[1], case.kv.values[1], case.table, plan, out, page_size=case.page, scale=case.scale,
        window=case.window, cap=case.cap,
    )  # fmt: skip
    assert not plan.counters.any()
    return out


def counts_of(plan: DecodePlan) -> list[int]:
    """The number of pieces of each row, in the order of rows."""
    columns = plan.pieces.tolist()
    counts, first = [], 0
    while first < len(columns) and columns[first][COUNT.value]:
        counts.append(columns[first][COUNT.value])
        first += counts[-1]
    assert not any(column[COUNT.value] for column in columns[first:])
    return counts


def rows_of(contexts: list[int]) -> list[tuple[int, int]]:
    return [(context - 1, 1) for context in contexts]


@pytest.mark.parametrize(("page", "pieces"), [(1, 1), (3, 1), (16, 1), (64, 1), (3, 3), (16, 16), (64, 3)])
def test_ragged_contexts_in_any_pages(page: int, pieces: int) -> None:
    case = Paged(rows_of(CONTEXTS), page=page, heads=2, kv_heads=1)
    case.check(decode(case, pieces))


@pytest.mark.parametrize(
    ("contexts", "wanted", "counts"),
    [
        ([192] * 4, 4, [1, 1, 1, 1]),
        ([192] * 4, 5, [2, 2, 2, 2]),
        ([500, 63, 64, 65, 1], 1, [1, 1, 1, 1, 1]),
        ([500, 63, 64, 65, 1], 2, [2, 1, 1, 1, 1]),
        ([129, 300, 20, 500, 64], 5, [1, 2, 1, 3, 1]),
        ([1, 1], 64, [1, 1]),
        ([700, 1], 64, [11, 1]),
        ([2100, 65], 64, [33, 2]),
        ([128, 129], 8, [2, 3]),
    ],
)
def test_rows_over_the_share_of_a_piece_are_cut_evenly(contexts, wanted, counts) -> None:
    case = Paged(rows_of(contexts), page=16)
    plan = plan_of(case, settings_of(case, wanted))
    assert counts_of(plan) == counts
    case.check(decode(case, plan))
    cut = [index for index, count in enumerate(c for count in counts for c in [count] * count) if count > 1]
    written = (~plan.log_sums.isnan()).all(1).nonzero().flatten().tolist()
    assert written == cut


def test_pieces_are_not_shorter_than_the_least() -> None:
    case = Paged(rows_of([500, 257, 256, 255, 1]), page=16)
    assert counts_of(plan_of(case, settings_of(case, 100, least=256))) == [2, 2, 1, 1, 1]


def test_a_plan_serves_one_layer_after_another() -> None:
    case = Paged(rows_of([300, 5, 90]), page=16)
    plan = plan_of(case, settings_of(case, 8))
    for _ in range(3):
        case.check(decode(case, plan))


@pytest.mark.parametrize(("window", "cap"), [(1, 0.0), (5, 0.0), (64, 0.0), (65, 3.0), (0, 3.0), (600, 0.0)])
@pytest.mark.parametrize(("page", "pieces"), [(3, 1), (16, 3), (64, 1), (64, 3)])
def test_windows_and_caps(window: int, cap: float, page: int, pieces: int) -> None:
    case = Paged(rows_of([*CONTEXTS, 500]), page=page, heads=2, kv_heads=1, window=window, cap=cap)
    case.check(decode(case, pieces))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 17])
def test_grouped_heads(group: int) -> None:
    case = Paged(rows_of([66]), heads=2 * group, kv_heads=2, page=16)
    case.check(decode(case, 1))
    case.check(decode(case, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [8, 64, 80, 96, 128, 256])
def test_head_dims_and_types(dim: int, dtype: torch.dtype) -> None:
    case = Paged(rows_of([3, 33]), heads=2, kv_heads=1, dim=dim, page=16, dtype=dtype)
    case.check(decode(case, 1))
    case.check(decode(case, 2))


def test_page_larger_than_a_block() -> None:
    case = Paged(rows_of([200, 129]), page=128)
    case.check(decode(case, 1))
    case.check(decode(case, 2))


def test_many_rows_use_large_blocks() -> None:
    case = Paged(rows_of([1 + 70 * (i % 3) for i in range(12)]), heads=1, kv_heads=1, page=16)
    case.check(decode(case, plan_of(case, decode_settings(1000, 1, 16, 4, 132))))


def test_scores_far_apart_do_not_overflow() -> None:
    case = Paged(rows_of([70, 140]), page=16)
    case.query *= 300
    case.check(decode(case, 1))
    case.check(decode(case, 3))


def test_only_named_tokens_are_written() -> None:
    case = Paged(rows_of([9, 70, 20]), page=16)
    order = torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    for pieces in (2, 20):
        out = torch.full_like(case.query, 7.0)
        decode_attention(
            case.query, case.kv.keys[1], case.kv.values[1], case.table, plan_of(case, settings_of(case, pieces), order),
            out, page_size=case.page, scale=case.scale,
        )  # fmt: skip
        assert (out[1] == 7).all()
        torch.testing.assert_close(out[order].cpu().double(), case.expected()[[2, 0]], atol=2e-5, rtol=2e-5)


def test_queries_inside_a_wider_tensor_and_keys_with_gaps() -> None:
    case = Paged(rows_of([9, 70]), page=16)
    expected = decode(case, 1)
    plan = plan_of(case, settings_of(case, 2))
    case.query = torch.cat((case.query, torch.full_like(case.query, float("nan"))), 1)[:, :4]
    wide = torch.stack((case.kv.keys, case.kv.values), 2)  # [layers, kv slots, 2, kv_heads, head_dim]
    out = torch.empty_like(expected)
    decode_attention(
        case.query, wide[1, :, 0], wide[1, :, 1], case.table.long(), plan, out, page_size=case.page, scale=case.scale
    )  # fmt: skip
    assert torch.equal(out, expected)


def rotation_of(positions: torch.Tensor, rotary_dim: int) -> Rotation:
    angles = positions.float().view(-1, 1, 1) * torch.linspace(1, 0.01, rotary_dim // 2, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    return Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim", "has_norms", "dtype"),
    [
        (2, 1, 128, 128, True, torch.bfloat16),
        (4, 2, 64, 64, False, torch.bfloat16),
        (5, 1, 80, 80, True, torch.float32),
        (3, 3, 96, 48, True, torch.float32),
        (16, 1, 16, 16, False, torch.float32),
        (4, 2, 256, 64, True, torch.float32),
    ],
)
def test_prepared_inside(heads, kv_heads, dim, rotary_dim, has_norms, dtype, pieces, is_early) -> None:
    case = Paged(rows_of(CONTEXTS), heads=heads, kv_heads=kv_heads, dim=dim, page=16, dtype=dtype)
    rows = len(case.rows)
    generator = torch.Generator().manual_seed(7)
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim, generator=generator).to(DEVICE, dtype)
    weights = (1 + 0.1 * torch.randn(2, dim, generator=generator)).to(DEVICE, dtype)
    norms = HeadNorms(weights[0], weights[1], 1e-5) if has_norms else None
    rotation = rotation_of(case.last_positions, rotary_dim)
    places = case.table[case.slots.long(), case.last_positions // case.page] * case.page
    places = (places + case.last_positions % case.page).long()
    keys, values = case.kv.keys[1].clone(), case.kv.values[1].clone()
    case.query = ReferenceOps().prepare_qkv(qkv, rotation, norms, keys, values, places)
    settings = replace(settings_of(case, pieces * rows), is_early=is_early)
    out = torch.full_like(case.query, float("nan"))
    for pool in (case.kv.keys, case.kv.values):
        pool[1, places] = float("nan")  # what the step itself must bring
    plan = plan_of(case, settings)
    decode_attention(
        qkv, case.kv.keys[1], case.kv.values[1], case.table, plan, out, page_size=case.page, scale=case.scale,
        rotation=rotation, norms=norms,
    )  # fmt: skip
    assert not plan.counters.any()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(case.kv.keys[1], keys, atol=tolerance, rtol=tolerance, equal_nan=True)
    assert torch.equal(case.kv.values[1].nan_to_num(), values.nan_to_num())
    for (own_keys, own_values), place in zip(case.contexts, places.tolist(), strict=True):
        own_keys[-1], own_values[-1] = keys[place], values[place]
    case.check(out)


def test_padding_rows_share_a_page_that_nobody_reads() -> None:
    case = Paged(rows_of([70, 1]), page=16)
    qkv = torch.randn(4, 8, 16, device=DEVICE)
    slots = torch.tensor([case.layout.slots[0], *[case.layout.slots[1]] * 3], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([69, 0, 0, 0], dtype=torch.int32, device=DEVICE)
    results = []
    for rows in (1, 4):
        keys, values = case.kv.keys[1].clone(), case.kv.values[1].clone()
        plan = plan_decode(slots[:rows], positions[:rows], settings_of(case, 3), 4, 2, 16)
        out = torch.empty(rows, 4, 16, device=DEVICE)
        decode_attention(
            qkv[:rows], keys, values, case.table, plan, out, page_size=16, scale=case.scale,
            rotation=rotation_of(positions[:rows], 16),
        )  # fmt: skip
        results.append(out)
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[1][1:], qkv[1:, 6:].repeat_interleave(2, 1))  # each row is its own context


@pytest.mark.parametrize(("real", "padded"), [(45, 48), (57, 64), (64, 64)])
def test_many_rows_of_one_length_stay_whole(real: int, padded: int) -> None:
    case = Paged(rows_of([64 * 3 + i % 7 for i in range(real)] + [1] * (padded - real)), page=64, heads=1, kv_heads=1)
    assert counts_of(plan_of(case, decode_settings(padded, 8, 16, 4, 132))) == [1] * padded


def test_few_rows_are_cut_to_fill_the_device() -> None:
    case = Paged(rows_of([1000]), page=64, heads=1, kv_heads=1)
    assert counts_of(plan_of(case, decode_settings(1, 8, 16, 4, 132))) == [16]


@pytest.mark.parametrize("rows", [1, 8, 64, 256, 700])
@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize("longest", [1, 300, 3000])
def test_pieces_fit_their_tensor(rows: int, kv_heads: int, longest: int) -> None:
    settings = decode_settings(rows, kv_heads, 16, 4, 132)
    positions = torch.randint(0, longest, (rows,), generator=torch.Generator().manual_seed(rows), dtype=torch.int32)
    plan = plan_decode(torch.zeros_like(positions).to(DEVICE), positions.to(DEVICE), settings, kv_heads, kv_heads, 16)
    counts = counts_of(plan)
    assert len(counts) == rows
    assert sum(counts) <= plan.pieces.shape[0]
    assert plan.pieces.shape[1] == COLUMNS.value


@pytest.mark.parametrize("rows", [1, 64, 200])
@pytest.mark.parametrize("dim", [8, 64, 80, 128, 256])
@pytest.mark.parametrize("size", [2, 4])
def test_settings_fit_shared_memory(rows: int, dim: int, size: int) -> None:
    settings = decode_settings(rows, 8, dim, size, 132)
    assert settings.block_n >= 16
    assert settings.block_n & (settings.block_n - 1) == 0
    padded = max(16, 1 << (dim - 1).bit_length())
    assert 2 * settings.block_n * padded * size * settings.num_stages <= 200 * 1024
