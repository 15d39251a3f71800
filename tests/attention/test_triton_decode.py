from __future__ import annotations

import pytest
import torch

from tests.attention.paged import DEVICE, Paged

pytest.importorskip("triton")
from tokenmill.attention.triton_decode import (
    DecodeScratch,
    choose_splits,
    decode_attention,
    decode_settings,
    make_scratch,
)

# One block holds 64 positions: contexts around its borders, shorter than the splits, and of one position.
CONTEXTS = [1, 63, 64, 65, 130, 16]


def decode(case: Paged, num_splits: int, **options: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(case.query, float("nan"))
    size = case.query.numel() // case.query.shape[2] * num_splits
    scratch = DecodeScratch(
        torch.full((size * case.query.shape[2],), float("nan"), device=DEVICE),
        torch.full((size,), float("nan"), device=DEVICE),
    )
    decode_attention(
        case.query, case.kv.keys[1], case.kv.values[1], case.table, case.slots, case.last_positions, out, scratch,
        page_size=case.page, scale=case.scale, num_splits=num_splits, **options,
    )  # fmt: skip
    return out


def rows_of(contexts: list[int]) -> list[tuple[int, int]]:
    return [(context - 1, 1) for context in contexts]


@pytest.mark.parametrize(("page", "num_splits"), [(1, 1), (3, 1), (16, 1), (64, 1), (3, 3), (16, 16), (64, 3)])
def test_ragged_contexts_in_any_pages(page: int, num_splits: int) -> None:
    case = Paged(rows_of(CONTEXTS), page=page, heads=2, kv_heads=1)
    case.check(decode(case, num_splits))


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
    for num_splits in (1, 2):
        out = torch.full_like(case.query, 7.0)
        size = 2 * case.query.shape[1] * num_splits
        scratch = DecodeScratch(torch.zeros(size * 16, device=DEVICE), torch.zeros(size, device=DEVICE))
        decode_attention(
            case.query, case.kv.keys[1], case.kv.values[1], case.table, case.slots[order], case.last_positions[order],
            out, scratch, page_size=case.page, scale=case.scale, num_splits=num_splits,
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
        page_size=case.page, scale=case.scale, num_splits=1,
    )  # fmt: skip
    assert torch.equal(out, expected)


def test_scratch_too_small_is_refused() -> None:
    case = Paged(rows_of([9]))
    scratch = DecodeScratch(torch.empty(64, device=DEVICE), torch.empty(4, device=DEVICE))
    with pytest.raises(ValueError, match="1 rows in 2 splits"):
        decode_attention(
            case.query, case.kv.keys[1], case.kv.values[1], case.table, case.slots, case.last_positions,
            torch.empty_like(case.query), scratch, page_size=4, scale=1.0, num_splits=2,
        )  # fmt: skip


def test_splits_fill_the_device_and_no_more() -> None:
    assert [choose_splits(rows, 8, 132) for rows in (1, 8, 16, 32, 256)] == [32, 8, 4, 1, 1]
    assert choose_splits(1, 1, 132) == 32
    assert choose_splits(1000, 1, 132) == 1


@pytest.mark.parametrize(("max_rows", "kv_heads"), [(256, 8), (3, 1), (300, 1), (1, 512)])
def test_scratch_holds_every_number_of_rows(max_rows: int, kv_heads: int) -> None:
    scratch = make_scratch(max_rows, 2 * kv_heads, kv_heads, 16, 132, torch.device("cpu"))
    needs = [rows * s for rows in range(1, max_rows + 1) if (s := choose_splits(rows, kv_heads, 132)) > 1]
    assert scratch.log_sums.numel() == 2 * kv_heads * max(needs, default=0)
    assert scratch.partials.numel() == 16 * scratch.log_sums.numel()


@pytest.mark.parametrize("rows", [1, 200])
@pytest.mark.parametrize("dim", [8, 64, 80, 128, 256])
@pytest.mark.parametrize("size", [2, 4])
def test_settings_fit_shared_memory(rows: int, dim: int, size: int) -> None:
    block_n, _, stages = decode_settings(rows, dim, size)
    assert block_n >= 16
    assert block_n & (block_n - 1) == 0
    assert 2 * block_n * max(16, 1 << (dim - 1).bit_length()) * size * stages <= 200 * 1024
