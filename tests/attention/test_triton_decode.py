from __future__ import annotations

import pytest
import torch

from tests.attention.paged import DEVICE, Paged

pytest.importorskip("triton")
from tokenmill.attention.triton_decode import (
    MAX_JOINED,
    DecodeScratch,
    SplitPlan,
    Splits,
    choose_splits,
    decode_attention,
    decode_settings,
    make_scratch,
)

# One block holds 64 positions: contexts around its borders, shorter than the splits, and of one position.
CONTEXTS = [1, 63, 64, 65, 130, 16]


ALL = 10**4  # pieces of all rows: each row is cut as often as it can be


def plan_of(case: Paged, num_splits: int, num_pieces: int = ALL) -> SplitPlan:
    """Scratch of exactly the size that is needed, poisoned."""
    rows, (_, heads, dim) = len(case.rows), case.query.shape
    scratch = DecodeScratch(
        torch.full((rows * heads * num_splits * dim,), float("nan"), device=DEVICE),
        torch.full((rows * heads * num_splits,), float("nan"), device=DEVICE),
        torch.zeros(rows * case.kv.keys.shape[2], dtype=torch.int32, device=DEVICE),
    )
    return SplitPlan(Splits(num_splits, num_pieces), case.last_positions.sum(0, True, dtype=torch.int32), scratch)


def decode(case: Paged, plan: SplitPlan | int) -> torch.Tensor:
    plan = plan_of(case, plan) if isinstance(plan, int) else plan
    out = torch.full_like(case.query, float("nan"))
    decode_attention(
        case.query, case.kv.keys[1], case.kv.values[1], case.table, case.slots, case.last_positions, out, plan,
        page_size=case.page, scale=case.scale,
    )  # fmt: skip
    assert not plan.scratch.counters.any()
    return out


def rows_of(contexts: list[int]) -> list[tuple[int, int]]:
    return [(context - 1, 1) for context in contexts]


@pytest.mark.parametrize(("page", "num_splits"), [(1, 1), (3, 1), (16, 1), (64, 1), (3, 3), (16, 16), (64, 3)])
def test_ragged_contexts_in_any_pages(page: int, num_splits: int) -> None:
    case = Paged(rows_of(CONTEXTS), page=page, heads=2, kv_heads=1)
    case.check(decode(case, num_splits))


def pieces_of(case: Paged, plan: SplitPlan) -> list[int]:
    """Into how many pieces each row was cut, by what was written to the poisoned scratch; whole rows write nothing."""
    written = ~plan.scratch.log_sums.isnan().view(len(case.rows), case.query.shape[1], plan.splits.num_splits)
    assert torch.equal(written, written[:, :1].expand_as(written))
    return [max(1, count) for count in written[:, 0].sum(1).tolist()]


@pytest.mark.parametrize("num_splits", [3, MAX_JOINED, MAX_JOINED + 1, 12])
@pytest.mark.parametrize(
    ("contexts", "num_pieces", "pieces"),
    [
        ([192] * 4, 5, [1, 1, 1, 1]),
        ([192] * 4, 6, [2, 2, 2, 2]),  # half of a piece is rounded up
        ([500, 63, 64, 65, 1], 2, [1, 1, 1, 1, 1]),
        ([500, 63, 64, 65, 1], 3, [2, 1, 1, 1, 1]),
        ([129, 300, 20, 500, 64], 9, [1, 3, 1, 4, 1]),
        ([1, 1], 64, [1, 1]),
        ([700, 1], 64, [11, 1]),
        ([128, 129], 8, [2, 3]),
    ],
)
def test_rows_are_cut_as_their_share_of_the_context_deserves(contexts, num_pieces, pieces, num_splits) -> None:
    case = Paged(rows_of(contexts), page=16)
    plan = plan_of(case, num_splits, num_pieces)
    case.check(decode(case, plan))
    found = pieces_of(case, plan)
    if num_splits == 12:
        assert found == pieces
    assert all(count <= min(num_splits, most) for count, most in zip(found, pieces, strict=True))
    assert all((count > 1) is (most > 1) for count, most in zip(found, pieces, strict=True))


@pytest.mark.parametrize("num_splits", [2, MAX_JOINED + 1])
def test_scratch_serves_one_step_after_another(num_splits: int) -> None:
    first, second = Paged(rows_of([300, 5, 90]), page=16), Paged(rows_of([2, 200, 128]), page=16, seed=1)
    plan = plan_of(first, num_splits, 8)
    for case in (first, second, first):
        case.check(decode(case, SplitPlan(plan.splits, case.last_positions.sum(0, True).int(), plan.scratch)))


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


def test_many_rows_use_the_large_blocks() -> None:
    assert decode_settings(128, 16, 4) != decode_settings(127, 16, 4)
    case = Paged(rows_of([1 + 7 * (i % 3) for i in range(128)]), heads=1, kv_heads=1, page=16)
    case.check(decode(case, 1))


def test_scores_far_apart_do_not_overflow() -> None:
    case = Paged(rows_of([70, 140]), page=16)
    case.query *= 300
    case.check(decode(case, 1))
    case.check(decode(case, 3))


def test_only_named_tokens_are_written() -> None:
    case = Paged(rows_of([9, 70, 20]), page=16)
    order = [2, 0]
    for num_splits in (1, 2, MAX_JOINED + 1):
        out = torch.full_like(case.query, 7.0)
        decode_attention(
            case.query, case.kv.keys[1], case.kv.values[1], case.table, case.slots[order], case.last_positions[order],
            out, plan_of(case, num_splits), page_size=case.page, scale=case.scale,
            tokens=torch.tensor(order, dtype=torch.int32, device=DEVICE),
        )  # fmt: skip
        assert (out[1] == 7).all()
        expected = case.expected()[order]
        torch.testing.assert_close(out[order].cpu().double(), expected, atol=2e-5, rtol=2e-5)


def test_queries_inside_a_wider_tensor_and_keys_with_gaps() -> None:
    case = Paged(rows_of([9, 70]), page=16)
    expected = decode(case, 1)
    case.query = torch.cat((case.query, torch.full_like(case.query, float("nan"))), 1)[:, :4]
    wide = torch.stack((case.kv.keys, case.kv.values), 2)  # [layers, kv slots, 2, kv_heads, head_dim]
    out = torch.empty_like(expected)
    decode_attention(
        case.query, wide[1, :, 0], wide[1, :, 1], case.table.long(), case.slots, case.last_positions, out, None,
        page_size=case.page, scale=case.scale,
    )  # fmt: skip
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 2), (4, 1)])
def test_scratch_too_small_is_refused(heads: int, kv_heads: int) -> None:
    case = Paged(rows_of([9]))
    scratch = DecodeScratch(
        torch.empty(2 * heads * 16, device=DEVICE),
        torch.empty(2 * heads, device=DEVICE),
        torch.zeros(kv_heads, dtype=torch.int32, device=DEVICE),
    )
    with pytest.raises(ValueError, match="1 rows in 2 splits"):
        decode(case, SplitPlan(Splits(2, 2), case.last_positions, scratch))


def test_splits_fill_the_device_and_no_more() -> None:
    chosen = [choose_splits(rows, 8, 132) for rows in (1, 8, 16, 32, 33, 64, 132, 133, 256)]
    assert [its.num_splits for its in chosen] == [32, 16, 8, 4, 4, 2, 2, 1, 1]
    assert [its.num_pieces for its in chosen[:7]] == [66, 66, 66, 66, 66, 72, 148]
    assert choose_splits(1, 1, 132).num_splits == 32
    assert choose_splits(1057, 1, 132).num_splits == 1
    assert choose_splits(1, 1057, 132).num_splits == 1
    assert choose_splits(1, 1000, 132).num_pieces == 1


@pytest.mark.parametrize(("real", "padded"), [(45, 48), (57, 64), (64, 64)])
def test_many_rows_of_one_length_stay_whole(real: int, padded: int) -> None:
    chosen = choose_splits(padded, 8, 132)
    case = Paged(rows_of([64 * 3 + i % 7 for i in range(real)] + [1] * (padded - real)), page=64, heads=1, kv_heads=1)
    plan = plan_of(case, chosen.num_splits, chosen.num_pieces)
    decode(case, plan)
    assert pieces_of(case, plan) == [1] * padded


@pytest.mark.parametrize(("max_rows", "kv_heads"), [(256, 8), (3, 1), (300, 1), (1, 512), (1, 2048)])
def test_scratch_holds_every_number_of_rows(max_rows: int, kv_heads: int) -> None:
    scratch = make_scratch(max_rows, 2 * kv_heads, kv_heads, 16, 132, torch.device("cpu"))
    chosen = {rows: choose_splits(rows, kv_heads, 132).num_splits for rows in range(1, max_rows + 1)}
    needs = [(rows, rows * count) for rows, count in chosen.items() if count > 1]
    assert scratch.log_sums.numel() == 2 * kv_heads * max((need for _, need in needs), default=0)
    assert scratch.partials.numel() == 16 * scratch.log_sums.numel()
    assert scratch.counters.numel() == kv_heads * max((rows for rows, _ in needs), default=0)
    assert not scratch.counters.any()


@pytest.mark.parametrize("rows", [1, 200])
@pytest.mark.parametrize("dim", [8, 64, 80, 128, 256])
@pytest.mark.parametrize("size", [2, 4])
def test_settings_fit_shared_memory(rows: int, dim: int, size: int) -> None:
    block_n, _, stages = decode_settings(rows, dim, size)
    assert block_n >= 16
    assert block_n & (block_n - 1) == 0
    assert 2 * block_n * max(16, 1 << (dim - 1).bit_length()) * size * stages <= 200 * 1024
