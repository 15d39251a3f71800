"""Paged causal attention of rows of many queries.

One Triton launch serves rows of any lengths, each on top of its own past. A long row may instead gather its pages and
use cuDNN, which is faster from a few thousand tokens on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.attention.triton_decode import LOG2_E, capped, padded_dim

WORK_COLUMNS = 4
BUCKET = 512  # cuDNN makes a plan for each new shape, so that shapes are rounded up to whole buckets
MAX_GATHERED_DIM = 128
MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Neighbouring queries of one slot: positions start .. start + length - 1, from token `first_token` of the step."""

    first_token: int
    slot: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    """Sizes of a program's tile: (queries times grouped heads) by positions, and how it is compiled."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def prefill_settings(group: int, head_dim: int, element_size: int, num_queries: int, num_sms: int) -> PrefillSettings:
    """For so many queries of all heads together, as measured on an H200 for 128 dimensions of bfloat16.

    Tiles of 128 queries are faster from where each multiprocessor has more than two.
    """
    least = max(16, int(triton.next_power_of_2(group)))
    if element_size > 2:
        return PrefillSettings(least, 32 if head_dim <= 64 else 16, 4, 2)
    if padded_dim(head_dim) > 128:
        return PrefillSettings(max(128, least), 64, 8, 2)
    return PrefillSettings(max(64 if num_queries <= 2 * 128 * num_sms else 128, least), 64, 4, 2)


def make_work(rows: Iterable[PrefillRow], block_queries: int) -> list[tuple[int, int, int, int]]:
    """The programs' work, heaviest first: (first token, slot, first position, queries of at most `block_queries`)."""
    work = [
        (row.first_token + done, row.slot, row.start + done, min(block_queries, row.length - done))
        for row in rows
        for done in range(0, row.length, block_queries)
    ]
    return sorted(work, key=lambda item: item[2] + item[3], reverse=True)


def prefill_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    work: Tensor,
    out: Tensor,
    settings: PrefillSettings,
    *,
    page_size: int,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
) -> None:
    """Causal attention of all the queries that `work` names, to all positions or the last `window`.

    Args:
        query: [tokens, heads, head_dim]; the last two dimensions are dense.
        keys, values: [kv_slots, kv_heads, head_dim] of one layer, of equal strides; the last two dimensions are dense.
        page_table: [slots, pages] int32 or int64.
        work: [items, 4] int32 from `make_work` with `settings.block_m // group` queries.
        out: like query; only the named tokens are written.
        settings: of `prefill_settings`.
        page_size: tokens a page.
        scale: multiplies the scores.
        window: positions that a query attends to, its own the last; 0: all.
        cap: bound of the scores, cap * tanh(score / cap); 0: none.
    """
    heads, head_dim, kv_heads = query.shape[1], query.shape[2], keys.shape[1]
    if keys.stride(0) != values.stride(0):
        raise ValueError(f"keys and values must have equal strides, not {keys.stride(0)} and {values.stride(0)}")
    if not work.shape[0]:
        return
    _attend[(kv_heads, work.shape[0])](
        query, keys, values, page_table, work, out,
        scale * LOG2_E, page_table.stride(0), query.stride(0), out.stride(0),
        GROUP=heads // kv_heads, HEAD_DIM=head_dim, BLOCK_D=padded_dim(head_dim), PAGE_SIZE=page_size,
        BLOCK_M=settings.block_m, BLOCK_N=settings.block_n, COLUMNS=WORK_COLUMNS, KV_STRIDE=keys.stride(0),
        WINDOW=window, CAP=cap * LOG2_E, IS_WIDE=keys.shape[0] * keys.stride(0) > MAX_INT32,
        num_warps=settings.num_warps, num_stages=settings.num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"])
def _attend(
    query, keys, values, page_table, work, out,
    scale, table_stride, query_stride, out_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, KV_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    kv_head, item = tl.program_id(0), work + tl.program_id(1) * COLUMNS
    first_token, slot = tl.load(item).to(tl.int64), tl.load(item + 1).to(tl.int64)
    first, count = tl.load(item + 2), tl.load(item + 3)
    if count == 0:
        return
    context = first + count
    members, numbers, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    steps, heads = members // GROUP, kv_head * GROUP + members % GROUP  # a query's grouped heads stand together
    has_dim = (dims < HEAD_DIM)[None, :]
    is_output = (steps < count)[:, None] & has_dim
    places = heads[:, None] * HEAD_DIM + dims[None, :]
    query += first_token * query_stride
    q = tl.load(query + (steps * query_stride)[:, None] + places, mask=is_output, other=0.0)  # [member, dim]
    table = page_table + slot * table_stride
    keys += kv_head * HEAD_DIM
    values += kv_head * HEAD_DIM
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    largest = tl.full([BLOCK_M], -1e30, tl.float32)  # finite: infinity minus infinity is no number
    total = tl.zeros([BLOCK_M], tl.float32)
    low = tl.maximum(first + 1 - WINDOW, 0) if WINDOW > 0 else 0
    factor = 1.0 if CAP > 0 else scale  # what is capped has been scaled
    for begin in range(low // BLOCK_N * BLOCK_N, context, BLOCK_N):
        # In place of what stands behind the context, and may never have been written, its last position is read.
        place = tl.minimum(begin + numbers, context - 1)
        if WINDOW > 0:  # before the window pages may be missing
            place = tl.maximum(place, low)
        page = tl.load(table + (begin if PAGE_SIZE % BLOCK_N == 0 else place) // PAGE_SIZE)
        if IS_WIDE:
            page = page.to(tl.int64)
        offsets = (page * PAGE_SIZE + place % PAGE_SIZE) * KV_STRIDE  # [n]
        offsets = offsets[:, None] + dims[None, :]
        k = tl.load(keys + offsets) if HEAD_DIM == BLOCK_D else tl.load(keys + offsets, mask=has_dim, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [member, n]
        if CAP > 0:
            scores = capped(scores * scale, CAP)
        if begin + BLOCK_N > first + 1:  # not all queries see the whole block
            scores = tl.where((first + steps)[:, None] >= (begin + numbers)[None, :], scores, float("-inf"))
        if WINDOW > 0:  # noqa: SIM102  (one of them is known when the kernel is compiled)
            if begin < context - WINDOW:
                scores = tl.where((first + steps)[:, None] < (begin + numbers)[None, :] + WINDOW, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(values + offsets) if HEAD_DIM == BLOCK_D else tl.load(values + offsets, mask=has_dim, other=0.0)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
        largest = new_largest
    out += first_token * out_stride
    mixed = (mixed * (1.0 / total)[:, None]).to(out.dtype.element_ty)
    tl.store(out + (steps * out_stride)[:, None] + places, mixed, mask=is_output)


def can_gather(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether cuDNN computes attention of such heads."""
    return dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= MAX_GATHERED_DIM


def gathered_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    row: PrefillRow,
    *,
    page_size: int,
    scale: float,
    bucket: int = BUCKET,
) -> Tensor:
    """Causal attention of one row over a dense copy of its K and V.

    Whole buckets of the past are seen by every query. The rest of the past and the row's own tokens form a causal
    square, with empty queries before and behind the row's. Both results are merged by their softmax sums.

    Args:
        query, keys, values, page_table: as in `prefill_attention`.

    Returns:
        [row.length, heads, head_dim].
    """
    past = row.start // bucket * bucket
    size = -(-(row.start + row.length - past) // bucket) * bucket
    front, context = row.start - past, row.start + row.length
    own = slice(front, front + row.length)
    pages = page_table[row.slot, : -(-context // page_size)]
    key, value = (
        _gather(pool, pages, page_size, context, past + size).transpose(0, 1)[None] for pool in (keys, values)
    )  # [1, kv_heads, past + size, head_dim]
    padded = query[row.first_token : row.first_token + row.length]
    if size != row.length:
        padded = query.new_empty((size, *query.shape[1:]))
        padded[:front] = 0
        padded[own] = query[row.first_token : row.first_token + row.length]
        padded[own.stop :] = 0
    padded = padded.transpose(0, 1)[None]  # [1, heads, size, head_dim]
    mixed, sums = _dense(padded, key[:, :, past:], value[:, :, past:], scale, is_causal=True, needs_sums=past > 0)
    mixed = mixed[0, :, own]
    if past:
        distant, distant_sums = _dense(
            padded, key[:, :, :past], value[:, :, :past], scale, is_causal=False, needs_sums=True
        )
        share = (distant_sums - sums)[:, own].sigmoid().to(mixed.dtype)  # [heads, length]
        mixed = torch.lerp(mixed, distant[0, :, own], share.unsqueeze(2))
    return mixed.transpose(0, 1)


def _gather(pool: Tensor, pages: Tensor, page_size: int, context: int, size: int) -> Tensor:
    """[size, kv_heads, head_dim], zero from `context` on: a weight of zero does not silence what was never written."""
    dense = pool.new_empty((max(size, pages.shape[0] * page_size), *pool.shape[1:]))
    whole = dense[: pages.shape[0] * page_size].unflatten(0, (-1, page_size))
    torch.index_select(pool.unflatten(0, (-1, page_size)), 0, pages, out=whole)
    dense[context:].zero_()
    return dense[:size]


def _dense(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, is_causal: bool, needs_sums: bool
) -> tuple[Tensor, Tensor]:
    """By cuDNN: attention of [1, heads, queries, head_dim]; its softmax sums' logarithms, [heads, queries] float32."""
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    mixed, log_sums, *_ = attend(query, key, value, None, needs_sums, 0.0, is_causal, False, scale=scale)
    return mixed, log_sums.view(query.shape[1:3]) if needs_sums else log_sums
