"""Paged attention of one query a row, in Triton: contexts cut into pieces, K/V loads shared by grouped heads.

Pieces with partial softmax sums follow flash decoding (Dao et al. 2023); sums run in base 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.ops.api import HeadNorms, Rotation
from tokenmill.ops.triton.launch import pdl_options
from tokenmill.ops.triton.qkv import prepared, rotation_of
from tokenmill.ops.triton.rows import is_last_program

LOG2_E = 1.4426950408889634
BLOCK_BYTES = 16384  # of one K block of the small setting
FEW_ROWS = 4
MAX_PIECES = 32  # of one row alone
WHOLE = 1 << 30  # a piece that no row is longer than
PLANNED_ROWS = 512  # that one kernel serves without being compiled anew
JOINED_NUMBERS = 32  # a thread, of pieces that are joined at once

# The columns of a piece, [pieces, COLUMNS] int32.
COLUMNS = tl.constexpr(8)
TOKEN = tl.constexpr(0)  # where its row stands in query and output
SLOT = tl.constexpr(1)
POSITION = tl.constexpr(2)  # of the query
START = tl.constexpr(3)  # its positions are START .. STOP - 1
STOP = tl.constexpr(4)
FIRST = tl.constexpr(5)  # its row's first piece
COUNT = tl.constexpr(6)  # its row's pieces; 0: there is no such piece


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """How a kernel is compiled, and into how many pieces contexts are cut."""

    block_n: int  # positions at a time
    num_warps: int
    num_stages: int
    is_early: bool  # let the next kernel start at once, and read a block of K and V while the one before still runs
    num_pieces: int  # rows longer than this part of all contexts together are cut evenly
    least_piece: int  # positions; shorter rows stay whole

    def capacity(self, rows: int) -> int:
        """Pieces of so many rows, at most."""
        return rows + self.num_pieces - 1


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The pieces of a step's rows, and room for their results. One launch at a time may use it."""

    settings: DecodeSettings
    pieces: Tensor  # [capacity, COLUMNS] int32
    counters: Tensor  # [capacity, kv_heads] int32, pieces of a row that are done, at its first; 0 between launches
    partials: Tensor  # [capacity, heads, head_dim] float32
    log_sums: Tensor  # [capacity, heads] float32, log2 of the softmax sums


def decode_settings(rows: int, kv_heads: int, head_dim: int, element_size: int, num_sms: int) -> DecodeSettings:
    """By the number of rows, as measured on an H200 for 128 dimensions of bfloat16.

    Few rows are cut so that all multiprocessors have work; of up to four, by programs that are small enough to become
    resident while the product before still runs. From where rows and heads alone do that, rows over 4/3 of
    the mean are cut, so that the longest does not set the time; rows of one length, up to a fifth of them padding, stay
    whole. Many rows stay whole: the short ones behind the long ones keep the device busy.
    """
    programs = rows * kv_heads
    block_n = max(16, BLOCK_BYTES // (padded_dim(head_dim) * element_size))
    small = min(64, block_n)
    if programs > 2 * num_sms:
        is_cut = programs <= 7 * num_sms
        return DecodeSettings(small, 4, 2, False, rows - rows // 4 if is_cut else 1, 0 if is_cut else WHOLE)
    if rows > 8:
        num_pieces = max(1, min(MAX_PIECES * rows, 3 * num_sms // kv_heads))
        return DecodeSettings(small, 2 if element_size == 2 else 4, 2, True, num_pieces, 2 * small)
    num_pieces = max(1, min(MAX_PIECES * rows, 4 * num_sms // kv_heads))
    if rows <= FEW_ROWS:
        return DecodeSettings(small, 4, 1, True, num_pieces, small if rows <= 2 else 2 * small)
    return DecodeSettings(small, 2 if element_size == 2 else 4, 2, True, num_pieces, small)


def padded_dim(head_dim: int) -> int:
    """`head_dim` as a size that the matrix units take."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def plan_decode(
    slots: Tensor,
    positions: Tensor,
    settings: DecodeSettings,
    heads: int,
    kv_heads: int,
    head_dim: int,
    tokens: Tensor | None = None,
    *,
    window: int = 0,
) -> DecodePlan:
    """Cut rows into pieces on the device. Longest contexts first read fastest.

    Args:
        slots, positions: [rows] int32; row i attends to positions 0 .. positions[i] of its slot, or the last `window`.
        settings: of `decode_settings`.
        heads, kv_heads, head_dim: of the queries and of K and V.
        tokens: [rows] int32, where each row stands in query and output; None: row i is token i.
    """
    rows, device = slots.shape[0], slots.device
    capacity = settings.capacity(rows)
    plan = DecodePlan(
        settings,
        torch.empty((capacity, COLUMNS.value), dtype=torch.int32, device=device),
        torch.empty((capacity, kv_heads), dtype=torch.int32, device=device),
        torch.empty((capacity, heads, head_dim), dtype=torch.float32, device=device),
        torch.empty((capacity, heads), dtype=torch.float32, device=device),
    )
    _cut[(1,)](
        positions, slots, slots if tokens is None else tokens, plan.pieces, plan.counters, rows, capacity,
        plan.counters.numel(), settings.num_pieces, settings.least_piece, HAS_TOKENS=tokens is not None,
        WINDOW=window, BLOCK_N=settings.block_n, BLOCK_ROWS=max(PLANNED_ROWS, triton.next_power_of_2(rows)),
    )  # fmt: skip
    return plan


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    plan: DecodePlan,
    out: Tensor,
    *,
    page_size: int,
    scale: float,
    rotation: Rotation | None = None,
    norms: HeadNorms | None = None,
    window: int = 0,
    cap: float = 0.0,
    pdl: bool = False,
) -> None:
    """Attention of the plan's rows. Safe to capture: contexts are read on the device.

    With `rotation`, `Ops.prepare_qkv` is part of it. Results differ from the two in a row by the rounding of one term
    of each sum; what is stored is the same.

    Args:
        query: [tokens, heads, head_dim], or with `rotation` [tokens, heads + 2 * kv_heads, head_dim]: queries, keys and
            values as the product leaves them. The last two dimensions are dense.
        keys, values: [kv_slots, kv_heads, head_dim] of one layer; the last two dimensions are dense. Written with
            `rotation`.
        page_table: [slots, pages] int32 or int64.
        plan: of `plan_decode`.
        out: [tokens, heads, head_dim]; only the rows' tokens are written.
        page_size: tokens a page.
        scale: multiplies the scores.
        rotation: the tokens' angles, or None: queries are prepared, and the rows' K and V are stored.
        norms: weights of the normalisation of heads, or None.
        window: that of the plan.
        cap: bound of the scores, cap * tanh(score / cap); 0: none.
        pdl: see `ops.triton.launch`. With `rotation`, plan, page table, angles and all K and V but the rows' own must
            not be written by a kernel since the last ordinary launch.
    """
    head_dim, kv_heads, group = query.shape[2], keys.shape[1], out.shape[1] // keys.shape[1]
    settings = plan.settings
    block_d, block_heads = padded_dim(head_dim), max(2, triton.next_power_of_2(group))
    joined = JOINED_NUMBERS * 32 * settings.num_warps // (block_heads * block_d)
    cos, sin = (query, query) if rotation is None else (rotation.cos, rotation.sin)
    _attend[(kv_heads, plan.pieces.shape[0])](
        query, keys, values, page_table, plan.pieces, out, plan.partials, plan.log_sums, plan.counters, cos, sin,
        query if norms is None else norms.query, query if norms is None else norms.key,
        0.0 if norms is None else norms.eps, scale * LOG2_E,
        page_table.stride(0), query.stride(0), keys.stride(0), values.stride(0), out.stride(0),
        GROUP=group, BLOCK_G=max(16, block_heads), BLOCK_HEADS=block_heads, HEAD_DIM=head_dim, BLOCK_D=block_d,
        BLOCK_N=settings.block_n, PAGE_SIZE=page_size, JOINED=min(max(joined, 2), 16),
        ROTARY_DIM=0 if rotation is None else cos.shape[-1], HAS_NORM=norms is not None,
        WINDOW=window, CAP=cap * LOG2_E, IS_EARLY=settings.is_early, PDL=pdl,
        num_warps=settings.num_warps, num_stages=settings.num_stages, **pdl_options(pdl),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["rows", "capacity", "num_counters", "num_pieces", "least_piece"],
    do_not_specialize_on_alignment=["positions", "slots", "tokens"],
)
def _cut(
    positions, slots, tokens, pieces, counters, rows, capacity, num_counters, num_pieces, least_piece,
    HAS_TOKENS: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, BLOCK_ROWS)
    is_row = row < rows
    position = tl.load(positions + row, mask=is_row, other=0)
    slot = tl.load(slots + row, mask=is_row, other=0)
    token = tl.load(tokens + row, mask=is_row, other=0) if HAS_TOKENS else row
    context = tl.where(is_row, position + 1, 0).to(tl.int64)
    seen = context
    if WINDOW > 0:  # whole blocks, so that a block stands in one page where pages are larger
        seen = context - tl.maximum(context - WINDOW, 0) // BLOCK_N * BLOCK_N
    longest = tl.maximum(tl.cdiv(tl.sum(seen, 0), num_pieces), least_piece)
    length = tl.cdiv(seen, tl.maximum(tl.cdiv(seen, tl.maximum(longest, 1)), 1))
    length = tl.maximum(tl.cdiv(length, BLOCK_N) * BLOCK_N, 1)
    count = tl.cdiv(seen, length).to(tl.int32)
    end = tl.cumsum(count, 0)
    first = end - count
    for number in range(tl.max(count, 0)):
        piece = pieces + (first + number) * COLUMNS
        is_piece = number < count
        start = context - seen + number * length
        tl.store(piece + TOKEN, token, mask=is_piece)
        tl.store(piece + SLOT, slot, mask=is_piece)
        tl.store(piece + POSITION, position, mask=is_piece)
        tl.store(piece + START, start.to(tl.int32), mask=is_piece)
        tl.store(piece + STOP, tl.minimum(start + length, context).to(tl.int32), mask=is_piece)
        tl.store(piece + FIRST, first, mask=is_piece)
        tl.store(piece + COUNT, count, mask=is_piece)
    for begin in range(tl.sum(count, 0), capacity, BLOCK_ROWS):
        tl.store(pieces + (begin + row) * COLUMNS + COUNT, 0, mask=begin + row < capacity)
    for begin in range(0, num_counters, BLOCK_ROWS):
        tl.store(counters + begin + row, 0, mask=begin + row < num_counters)


@triton.jit(do_not_specialize=["table_stride"])
def _attend(
    query, keys, values, page_table, pieces, out, partials, log_sums, counters, cos, sin, query_weight, key_weight,
    eps, scale, table_stride, query_stride, key_stride, value_stride, out_stride,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, JOINED: tl.constexpr,
    ROTARY_DIM: tl.constexpr, HAS_NORM: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    IS_EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL and IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    kv_head, number = tl.program_id(0), tl.program_id(1)
    piece = pieces + number * COLUMNS
    token, slot = tl.load(piece + TOKEN).to(tl.int64), tl.load(piece + SLOT).to(tl.int64)
    position, start, stop = tl.load(piece + POSITION), tl.load(piece + START), tl.load(piece + STOP)
    first, count = tl.load(piece + FIRST), tl.load(piece + COUNT)
    if count == 0:
        # Without rows all programs end here: if none waited, the next kernel would not wait for the one before.
        if PDL and number == 0:
            tl.extra.cuda.gdc_wait()
        return
    table = page_table + slot * table_stride
    group, dims = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + group
    column = dims[None, :]  # [1, dim]
    is_column = column < HEAD_DIM
    is_output = (group < GROUP)[:, None] & is_column  # [group, dim]
    query += token * query_stride
    keys += kv_head * HEAD_DIM
    values += kv_head * HEAD_DIM
    page = _load_page(table, start, stop, BLOCK_N, PAGE_SIZE)
    if ROTARY_DIM > 0:
        # The piece of the row's own token takes K and V of it from registers; no program reads them from the pool.
        is_own = is_column & (stop > position)
        stop = tl.minimum(stop, position)
        own_slot = tl.load(table + position // PAGE_SIZE).to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        partner, own_factor, partner_factor = rotation_of(cos, sin, token, column, ROTARY_DIM)
        own_weight, partner_weight, own_key_weight, partner_key_weight = 1.0, 1.0, 1.0, 1.0
        if HAS_NORM:
            own_weight = tl.load(query_weight + column, mask=is_column, other=0.0).to(tl.float32)
            partner_weight = tl.load(query_weight + partner, mask=is_column, other=0.0).to(tl.float32)
            own_key_weight = tl.load(key_weight + column, mask=is_column, other=0.0).to(tl.float32)
            partner_key_weight = tl.load(key_weight + partner, mask=is_column, other=0.0).to(tl.float32)
        if IS_EARLY:
            k, v, is_seen = _load_block(
                keys, values, page, start, stop, position, key_stride, value_stride, dims, HEAD_DIM, BLOCK_N,
                PAGE_SIZE, WINDOW,
            )  # fmt: skip
            page = _load_page(table, start + BLOCK_N, stop, BLOCK_N, PAGE_SIZE)
        if PDL:
            tl.extra.cuda.gdc_wait()
        member = tl.arange(0, BLOCK_HEADS)[:, None]
        at, is_query = query + (kv_head * GROUP + member) * HEAD_DIM, (member < GROUP) & is_column
        raw = tl.load(at + column, mask=is_query, other=0.0)  # [head, dim]
        other = tl.load(at + partner, mask=is_query, other=0.0)
        at = query + (tl.num_programs(0) * GROUP + kv_head) * HEAD_DIM
        raw_key = tl.load(at + column, mask=is_own, other=0.0)  # [1, dim]
        other_key = tl.load(at + partner, mask=is_own, other=0.0)
        own_v = tl.load(at + tl.num_programs(0) * HEAD_DIM + column, mask=is_own, other=0.0)  # [1, dim]
        q = prepared(raw, other, own_factor, partner_factor, own_weight, partner_weight, eps, HEAD_DIM, HAS_NORM)
        own_k = prepared(
            raw_key, other_key, own_factor, partner_factor, own_key_weight, partner_key_weight, eps, HEAD_DIM, HAS_NORM
        )
        q, own_k = q.to(raw.dtype), own_k.to(raw.dtype)
        # Padding rows share a slot, whose page nobody reads.
        tl.store(keys + own_slot * key_stride + column, own_k, mask=is_own)
        tl.store(values + own_slot * value_stride + column, own_v, mask=is_own)
        has_own = tl.max(is_own.to(tl.int32), 1)  # [1]
        q = tl.broadcast_to(q[None], [BLOCK_G // BLOCK_HEADS, BLOCK_HEADS, BLOCK_D]).reshape(BLOCK_G, BLOCK_D)
        score = capped(tl.sum(q.to(tl.float32) * own_k.to(tl.float32), 1) * scale, CAP)
        largest = tl.where(has_own > 0, score, -1e30)  # [group]
        total = has_own + tl.zeros([BLOCK_G], tl.float32)
        mixed = own_v + tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        if IS_EARLY:
            mixed, largest, total = _attend_block(mixed, largest, total, q, k, v, is_seen, scale, CAP)
            start += BLOCK_N
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()  # the rows' own K and V come from the kernel before
        q = tl.load(query + heads[:, None] * HEAD_DIM + column, mask=is_output, other=0.0)
        largest = tl.full([BLOCK_G], -1e30, tl.float32)  # finite: infinity minus infinity is no number
        total = tl.zeros([BLOCK_G], tl.float32)
        mixed = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for begin in range(start, stop, BLOCK_N):
        k, v, is_seen = _load_block(
            keys, values, page, begin, stop, position, key_stride, value_stride, dims, HEAD_DIM, BLOCK_N,
            PAGE_SIZE, WINDOW,
        )  # fmt: skip
        page = _load_page(table, begin + BLOCK_N, stop, BLOCK_N, PAGE_SIZE)
        mixed, largest, total = _attend_block(mixed, largest, total, q, k, v, is_seen, scale, CAP)
    if PDL and not IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    mixed = mixed / total[:, None]  # [group, dim]; at least one position was seen, so that total is at least 1
    out += token * out_stride
    if count == 1:
        tl.store(out + heads[:, None] * HEAD_DIM + column, mixed.to(out.dtype.element_ty), mask=is_output)
    else:
        num_heads = tl.num_programs(0) * GROUP
        part = number * num_heads + heads  # [group]
        tl.store(partials + part[:, None] * HEAD_DIM + column, mixed, mask=is_output)
        tl.store(log_sums + part, largest + tl.log2(total), mask=group < GROUP)
        if is_last_program(counters + first * tl.num_programs(0) + kv_head, count):
            _join(
                partials, log_sums, out, first, count, kv_head * GROUP, num_heads, GROUP, BLOCK_HEADS, HEAD_DIM,
                BLOCK_D, JOINED,
            )  # fmt: skip


@triton.jit
def _load_page(table, begin, stop, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """The pages of positions from `begin` on: one, or [n]. Read one block ahead, K and V need not wait for them."""
    if PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(table + begin // PAGE_SIZE, mask=begin < stop, other=0)
    else:
        place = begin + tl.arange(0, BLOCK_N)
        page = tl.load(table + place // PAGE_SIZE, mask=place < stop, other=0)
    return page.to(tl.int64)


@triton.jit
def _load_block(
    keys, values, page, begin, stop, position, key_stride, value_stride, dims,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """K [dim, n] and V [n, dim] of positions from `begin` on; which of them are seen before `stop`, [n]."""
    place = begin + tl.arange(0, BLOCK_N)
    is_seen = place < stop  # what stands behind may never have been written, and pages may be missing
    if WINDOW > 0:
        is_seen &= place > position - WINDOW  # as pages before the window may be
    has_dim = dims < HEAD_DIM
    kv_slot = page * PAGE_SIZE + place % PAGE_SIZE  # [n]
    key_places = (kv_slot * key_stride)[None, :] + dims[:, None]
    value_places = (kv_slot * value_stride)[:, None] + dims[None, :]
    k = tl.load(keys + key_places, mask=is_seen[None, :] & has_dim[:, None], other=0.0)
    v = tl.load(values + value_places, mask=is_seen[:, None] & has_dim[None, :], other=0.0)
    return k, v, is_seen


@triton.jit
def capped(scores, CAP: tl.constexpr):
    """CAP * tanh(scores / CAP), where there is a cap."""
    if CAP > 0:
        scores = CAP - 2 * CAP / (1 + tl.exp(scores * (2 / CAP)))
    return scores


@triton.jit
def _attend_block(mixed, largest, total, q, k, v, is_seen, scale, CAP: tl.constexpr):
    """One step of the running softmax."""
    scores = capped(tl.dot(q, k, input_precision="ieee") * scale, CAP)  # [group, n]
    scores = tl.where(is_seen[None, :], scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - new_largest[:, None])
    shrink = tl.exp2(largest - new_largest)
    total = total * shrink + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
    return mixed, new_largest, total


@triton.jit
def _join(
    partials, log_sums, out, first, count, first_head, num_heads,
    GROUP: tl.constexpr, BLOCK_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    JOINED: tl.constexpr,
):  # fmt: skip
    """Add up a row's pieces, in one order whichever program comes last."""
    heads, dims = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_D)
    is_output = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    largest = tl.full([BLOCK_HEADS], -1e30, tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    mixed = tl.zeros([BLOCK_HEADS, BLOCK_D], tl.float32)
    for begin in tl.range(0, count, JOINED, num_stages=1):
        number = begin + tl.arange(0, JOINED)
        is_piece = number < count
        part = (first + number)[:, None] * num_heads + first_head + heads[None, :]  # [piece, head]
        is_part = is_piece[:, None] & (heads < GROUP)[None, :]
        sums = tl.load(log_sums + part, mask=is_part, other=0.0, cache_modifier=".cg")
        places = part[:, :, None] * HEAD_DIM + dims[None, None, :]
        is_mixed = is_piece[:, None, None] & is_output[None, :, :]
        parts = tl.load(partials + places, mask=is_mixed, other=0.0, cache_modifier=".cg")  # [piece, head, dim]
        sums = tl.where(is_piece[:, None], sums, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(sums, 0))
        weights = tl.exp2(sums - new_largest[None, :])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weights, 0)
        mixed = mixed * shrink[:, None] + tl.sum(parts * weights[:, :, None], 0)
        largest = new_largest
    places = (first_head + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + places, (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_output)
