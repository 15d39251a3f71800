"""Paged attention of one query a row, in Triton: the context split over programs, K/V loads shared by grouped heads.

Splits with partial softmax sums follow flash decoding (Dao et al. 2023); sums run in base 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
MANY_ROWS = 128  # from here on, large blocks read faster
MAX_SPLITS = 32
MAX_JOINED = 4  # pieces that the last of a row's programs joins itself; more are faster joined in parallel
BLOCK_BYTES = 16384  # of one K block of the small setting


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Partial results of the pieces. One launch at a time may use it: launches that share it share a stream."""

    partials: Tensor  # [rows * heads * splits * head_dim] float32
    log_sums: Tensor  # [rows * heads * splits] float32, log2 of the softmax sums
    counters: Tensor  # [rows * kv_heads] int32, pieces done; 0 between launches


@dataclass(frozen=True, slots=True)
class Splits:
    """Into how many pieces contexts are cut: fixed numbers, of which each row uses what its own length deserves.

    A row's share of `num_pieces`, rounded to the nearest, is its share of all rows' context.
    """

    num_splits: int  # of one row, at most: programs a row and head
    num_pieces: int  # of all rows together, about


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """What cut rows need beside their numbers."""

    splits: Splits
    position_sum: Tensor  # [1] int32, of the rows' positions
    scratch: DecodeScratch


def make_scratch(
    max_rows: int, heads: int, kv_heads: int, head_dim: int, num_sms: int, device: torch.device
) -> DecodeScratch:
    """Room for what `choose_splits` says of any number of rows up to `max_rows`."""
    chosen = [(rows, choose_splits(rows, kv_heads, num_sms).num_splits) for rows in range(1, max_rows + 1)]
    cut = [(rows, count) for rows, count in chosen if count > 1]
    size = heads * max((rows * count for rows, count in cut), default=0)
    return DecodeScratch(
        torch.empty(size * head_dim, dtype=torch.float32, device=device),
        torch.empty(size, dtype=torch.float32, device=device),
        torch.zeros(kv_heads * max((rows for rows, _ in cut), default=0), dtype=torch.int32, device=device),
    )


def choose_splits(rows: int, kv_heads: int, num_sms: int) -> Splits:
    """How to cut contexts, by the number of rows alone.

    Few rows of one length make four programs a multiprocessor together, one row of them up to eight. From where rows
    and heads alone make nearly three, rows over 4/3 of the mean are cut, so that the longest does not set the time;
    rows of one length, up to a fifth of them padding, stay whole. Over eight, the short rows behind the long ones keep
    the device busy.
    """
    programs = rows * kv_heads
    if programs > 8 * num_sms:
        return Splits(1, rows)
    num_splits = max(2, min(MAX_SPLITS, 8 * num_sms // programs))
    return Splits(num_splits, max(rows + rows // 8, 4 * num_sms // kv_heads))


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    out: Tensor,
    plan: SplitPlan | None,
    *,
    page_size: int,
    scale: float,
    tokens: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Row i attends to positions 0 .. positions[i] of its slot. Safe to capture: contexts are read on the device.

    Args:
        query: [tokens, heads, head_dim]; the last two dimensions are dense.
        keys, values: [kv_slots, kv_heads, head_dim] of one layer; the last two dimensions are dense.
        page_table: [slots, pages] int32 or int64.
        slots, positions: [rows] int32.
        out: like query; only the rows' tokens are written.
        plan: how rows are cut, each evenly in whole blocks; None: not at all.
        tokens: [rows] int32, where each row stands in query and out; None: row i is token i.
        pdl: launch while the kernel before still runs, and wait for it on the device (needs compute capability 9).
    """
    rows, heads, head_dim, kv_heads = slots.shape[0], query.shape[1], query.shape[2], keys.shape[1]
    if rows == 0:
        return
    num_splits = 1 if plan is None else plan.splits.num_splits
    num_pieces = 1 if plan is None else plan.splits.num_pieces
    partials = log_sums = counters = position_sum = out  # never touched unless split
    if plan is not None and num_splits > 1:
        scratch, position_sum = plan.scratch, plan.position_sum
        partials, log_sums, counters = scratch.partials, scratch.log_sums, scratch.counters
        if log_sums.numel() < rows * heads * num_splits or counters.numel() < rows * kv_heads:
            raise ValueError(f"decode attention of {rows} rows in {num_splits} splits needs a larger scratch")
    is_joined = num_splits <= MAX_JOINED
    block_n, num_warps, num_stages = decode_settings(rows, head_dim, query.element_size())
    launch = {"launch_pdl": True} if pdl else {}
    shape = {
        "HEAD_DIM": head_dim,
        "BLOCK_N": block_n,
        "BLOCK_D": padded_dim(head_dim),
        "HAS_TOKENS": tokens is not None,
        "PDL": pdl,
    }
    where = slots if tokens is None else tokens
    # Splits vary slowest: programs with nothing to do come last, where they keep no other waiting.
    _attend[(kv_heads, rows, num_splits)](
        query, keys, values, page_table, slots, positions, where, out, partials, log_sums, counters, position_sum,
        scale * LOG2_E, num_splits, num_pieces, page_table.stride(0), query.stride(0), keys.stride(0),
        values.stride(0), out.stride(0),
        GROUP=heads // kv_heads, BLOCK_G=max(16, triton.next_power_of_2(heads // kv_heads)), PAGE_SIZE=page_size,
        IS_SPLIT=num_splits > 1, IS_JOINED=is_joined, num_warps=num_warps, num_stages=num_stages, **shape, **launch,
    )  # fmt: skip
    if not is_joined:
        _combine[(heads, rows)](
            partials, log_sums, positions, position_sum, where, out, num_splits, num_pieces, out.stride(0),
            BLOCK_S=triton.next_power_of_2(num_splits), num_warps=4, **shape, **launch,
        )  # fmt: skip


def decode_settings(rows: int, head_dim: int, element_size: int) -> tuple[int, int, int]:
    """(positions a block, warps, pipeline stages), as measured on an H200 for 128 dimensions of bfloat16."""
    most = max(16, BLOCK_BYTES // (padded_dim(head_dim) * element_size))
    if rows >= MANY_ROWS:
        return min(128, 2 * most), 4, 3
    return min(64, most), 2 if element_size == 2 else 4, 3


def padded_dim(head_dim: int) -> int:
    """`head_dim` as a size that the matrix units take."""
    return max(16, int(triton.next_power_of_2(head_dim)))


@triton.jit
def _piece_length(context, position_sum, rows, num_splits, num_pieces, BLOCK_N: tl.constexpr):
    """Positions a piece of a row; over the context's if the row stays whole."""
    total = tl.load(position_sum) + rows
    share = (2 * num_pieces * context + total) // (2 * total)  # rounded to the nearest
    count = tl.minimum(tl.maximum(share, 1), num_splits)
    return tl.cdiv(tl.cdiv(context, count), BLOCK_N) * BLOCK_N


@triton.jit(do_not_specialize=["num_splits", "num_pieces", "table_stride"])
def _attend(
    query, keys, values, page_table, slots, positions, tokens, out, partials, log_sums, counters, position_sum,
    scale, num_splits, num_pieces, table_stride, query_stride, key_stride, value_stride, out_stride,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HAS_TOKENS: tl.constexpr, IS_SPLIT: tl.constexpr, IS_JOINED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        # Everything read below may come from the kernel before, or from one that it has not waited for itself.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    stop = tl.load(positions + row).to(tl.int32) + 1
    start = 0
    if IS_SPLIT:
        length = _piece_length(stop, position_sum, tl.num_programs(1), num_splits, num_pieces, BLOCK_N)
        pieces = tl.cdiv(stop, length)
        start = split * length
        stop = tl.minimum(start + length, stop)
        if start >= stop:
            return
    token = row.to(tl.int64)
    if HAS_TOKENS:
        token = tl.load(tokens + row).to(tl.int64)
    table = page_table + tl.load(slots + row).to(tl.int64) * table_stride
    group, dims = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + group
    has_dim = dims < HEAD_DIM
    is_output = (group < GROUP)[:, None] & has_dim[None, :]
    places = heads[:, None] * HEAD_DIM + dims[None, :]  # [group, dim]
    q = tl.load(query + token * query_stride + places, mask=is_output, other=0.0)
    keys += kv_head * HEAD_DIM
    values += kv_head * HEAD_DIM
    largest = tl.full([BLOCK_G], -1e30, tl.float32)  # finite: infinity minus infinity is no number
    total = tl.zeros([BLOCK_G], tl.float32)
    mixed = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for first in range(start, stop, BLOCK_N):
        place = first + tl.arange(0, BLOCK_N)
        is_seen = place < stop  # what stands behind may never have been written, and pages may be missing
        if PAGE_SIZE % BLOCK_N == 0:
            page = tl.load(table + first // PAGE_SIZE).to(tl.int64)
        else:
            page = tl.load(table + place // PAGE_SIZE, mask=is_seen, other=0).to(tl.int64)
        kv_slot = page * PAGE_SIZE + place % PAGE_SIZE  # [n]
        key_places = (kv_slot * key_stride)[None, :] + dims[:, None]
        k = tl.load(keys + key_places, mask=is_seen[None, :] & has_dim[:, None], other=0.0)  # [dim, n]
        scores = tl.dot(q, k, input_precision="ieee") * scale  # [group, n]
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weights, 1)
        value_places = (kv_slot * value_stride)[:, None] + dims[None, :]
        v = tl.load(values + value_places, mask=is_seen[:, None] & has_dim[None, :], other=0.0)  # [n, dim]
        mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
        largest = new_largest
    mixed = mixed / total[:, None]  # [group, dim]; at least one position was seen, so that total is at least 1
    if IS_SPLIT:
        if pieces > 1:
            part = ((row * tl.num_programs(0) * GROUP + heads) * num_splits).to(tl.int64)  # [group], of the first piece
            own = part + split
            tl.store(partials + own[:, None] * HEAD_DIM + dims[None, :], mixed, mask=is_output)
            tl.store(log_sums + own, largest + tl.log2(total), mask=group < GROUP)
            if IS_JOINED:
                counter = counters + row * tl.num_programs(0) + kv_head
                tl.debug_barrier()  # all of the program's stores stand before its one atomic
                if tl.atomic_add(counter, 1, sem="acq_rel") == pieces - 1:
                    # The last of the row's programs leaves the counter as it was found.
                    tl.store(counter, 0)
                    mixed = _joined(partials, log_sums, part, pieces, group < GROUP, is_output, dims, HEAD_DIM)
                    tl.store(out + token * out_stride + places, mixed.to(out.dtype.element_ty), mask=is_output)
        else:
            tl.store(out + token * out_stride + places, mixed.to(out.dtype.element_ty), mask=is_output)
    else:
        tl.store(out + token * out_stride + places, mixed.to(out.dtype.element_ty), mask=is_output)


@triton.jit
def _joined(partials, log_sums, part, pieces, is_head, is_output, dims, HEAD_DIM: tl.constexpr):
    """The pieces' results [group, dim] as one, added in one order whichever program comes last."""
    largest = tl.load(log_sums + part, mask=is_head, other=0.0, cache_modifier=".cg")  # [group]
    for piece in range(1, pieces):
        largest = tl.maximum(largest, tl.load(log_sums + part + piece, mask=is_head, other=0.0, cache_modifier=".cg"))
    weights = tl.zeros_like(largest)
    mixed = tl.zeros_like(is_output.to(tl.float32))
    for piece in range(pieces):
        own = part + piece
        weight = tl.exp2(tl.load(log_sums + own, mask=is_head, other=0.0, cache_modifier=".cg") - largest)
        pointers = partials + own[:, None] * HEAD_DIM + dims[None, :]
        mixed += weight[:, None] * tl.load(pointers, mask=is_output, other=0.0, cache_modifier=".cg")
        weights += weight
    return mixed / weights[:, None]


@triton.jit(do_not_specialize=["num_splits", "num_pieces"])
def _combine(
    partials, log_sums, positions, position_sum, tokens, out, num_splits, num_pieces, out_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head, row = tl.program_id(0), tl.program_id(1)
    context = tl.load(positions + row).to(tl.int32) + 1
    # Splits behind the last piece left nothing: their part of the scratch is of an earlier launch.
    pieces = tl.cdiv(context, _piece_length(context, position_sum, tl.num_programs(1), num_splits, num_pieces, BLOCK_N))
    if pieces == 1:
        return
    token = row.to(tl.int64)
    if HAS_TOKENS:
        token = tl.load(tokens + row).to(tl.int64)
    splits, dims = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    part = (row * tl.num_programs(0) + head).to(tl.int64) * num_splits + splits  # [split]
    sums = tl.load(log_sums + part, mask=splits < pieces, other=float("-inf"))
    weights = tl.exp2(sums - tl.max(sums, 0))
    is_part = (splits < pieces)[:, None] & (dims < HEAD_DIM)[None, :]
    parts = tl.load(partials + part[:, None] * HEAD_DIM + dims[None, :], mask=is_part, other=0.0)  # [split, dim]
    mixed = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    places = token * out_stride + head * HEAD_DIM + dims
    tl.store(out + places, mixed.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
