"""Draws without putting the vocabulary in order: the same race as `sampling.sampler`, with the same numbers.

One program sees one block of one row; the last of a row's programs to finish joins what they found, always in one
order, and leaves the row's counter at 0. All is read from the device by slot, so that a draw can stand in a graph.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenmill.ops.triton.filters import REACH, find_bounds, set_marks
from tokenmill.ops.triton.launch import pdl_options, start_and_wait
from tokenmill.ops.triton.noise import exponential, row_key
from tokenmill.ops.triton.rows import (
    BLOCK,
    BOUND,
    FIELDS,
    LAST_ID,
    MARKS,
    TOP,
    TOTAL,
    SamplingColumns,
    SamplingScratch,
    is_last_program,
    scaled_logits,
)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _summarise_kernel(
    logits,
    slots,
    columns,
    scratch,
    stride,
    out_ids,
    last_tokens,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
    PDL: tl.constexpr,
):
    start_and_wait(PDL)
    columns, scratch = SamplingColumns(*columns), SamplingScratch(*scratch)
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks = tl.num_programs(0)
    slot = tl.load(slots + row)
    greedy = tl.load(columns.is_greedy + slot) != 0
    degree = tl.where(greedy, 1.0, tl.load(columns.temperature + slot))
    value = scaled_logits(logits + row * stride, block * BLOCK + tl.arange(0, BLOCK), VOCAB, degree)  # [BLOCK]
    top, place = tl.max(value, 0, return_indices=True)
    own = row * blocks + block
    tl.store(scratch.best + own, top)
    tl.store(scratch.places + own, block * BLOCK + place)
    if HAS_FILTERS:
        # A block of forbidden ids only has no top to subtract.
        tl.store(scratch.weights + own, tl.sum(tl.exp(value - tl.maximum(top, -1e30)), 0))
        tl.store(scratch.lowest + own, tl.min(tl.where(value > float("-inf"), value, float("inf")), 0))
    if is_last_program(scratch.counters + row, blocks):
        each = tl.arange(0, BLOCKS)
        is_block = each < blocks
        at = row * blocks + each
        tops = tl.load(scratch.best + at, mask=is_block, other=float("-inf"), cache_modifier=".cg")
        top, first = tl.max(tops, 0, return_indices=True)
        floats = scratch.floats + row * FIELDS
        tl.store(floats + TOP, top)
        if greedy:
            token = tl.load(scratch.places + row * blocks + first, cache_modifier=".cg")
            _put(token, row, slot, out_ids, last_tokens)
        if HAS_FILTERS:
            weight = tl.load(scratch.weights + at, mask=is_block, other=0.0, cache_modifier=".cg")
            total = tl.sum(weight * tl.exp(tops - tl.maximum(top, -1e30)), 0)
            low = tl.min(tl.load(scratch.lowest + at, mask=is_block, other=float("inf"), cache_modifier=".cg"), 0)
            tl.store(floats + TOTAL, total)
            tl.store(floats + BOUND, float("-inf"))
            tl.store(scratch.ints + row * FIELDS + LAST_ID, VOCAB)
            set_marks(scratch.marks + row * MARKS, top, tl.maximum(low, top - REACH))


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _race_kernel(
    logits,
    slots,
    columns,
    scratch,
    stride,
    positions,
    out_ids,
    last_tokens,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
    PDL: tl.constexpr,
):
    start_and_wait(PDL)
    columns, scratch = SamplingColumns(*columns), SamplingScratch(*scratch)
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks = tl.num_programs(0)
    slot = tl.load(slots + row)
    if tl.load(columns.is_greedy + slot) == 0:
        top = tl.load(scratch.floats + row * FIELDS + TOP)
        share = tl.load(columns.min_p + slot)
        least = tl.where(share > 0.0, top + tl.log(tl.maximum(share, 1e-30)), top - REACH)
        bound, last = float("-inf"), VOCAB
        if HAS_FILTERS:
            bound = tl.load(scratch.floats + row * FIELDS + BOUND)
            last = tl.load(scratch.ints + row * FIELDS + LAST_ID)
        score = float("-inf")
        winner = 0
        own = row * blocks + block
        if tl.load(scratch.best + own) >= tl.maximum(least, bound):
            at = block * BLOCK + tl.arange(0, BLOCK)
            value = scaled_logits(logits + row * stride, at, VOCAB, tl.load(columns.temperature + slot))  # [BLOCK]
            is_kept = (value >= least) & ((value > bound) | ((value == bound) & (at <= last)))
            low, high = row_key(tl.load(columns.seed + slot), tl.load(positions + row).to(tl.int64) + 1)
            arrival = tl.maximum(value - tl.log(exponential(low, high, at)), -1e30)  # kept ids beat all others
            score, place = tl.max(tl.where(is_kept, arrival, float("-inf")), 0, return_indices=True)
            winner = block * BLOCK + place
        tl.store(scratch.scores + own, score)
        tl.store(scratch.winners + own, winner)
        if is_last_program(scratch.counters + row, blocks):
            each = tl.arange(0, BLOCKS)
            at = scratch.scores + row * blocks + each
            _, first = tl.max(
                tl.load(at, mask=each < blocks, other=float("-inf"), cache_modifier=".cg"), 0, return_indices=True
            )
            token = tl.load(scratch.winners + row * blocks + first, cache_modifier=".cg")
            _put(token, row, slot, out_ids, last_tokens)


@triton.jit
def _put(token, row, slot, out_ids, last_tokens):
    # Padding rows share a slot, whose last token nobody reads.
    tl.store(out_ids + row, token.to(out_ids.dtype.element_ty))
    tl.store(last_tokens + slot, token.to(last_tokens.dtype.element_ty))


def sample_rows(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    columns: SamplingColumns,
    out_ids: Tensor,
    last_tokens: Tensor,
    scratch: SamplingScratch,
    *,
    has_filters: bool,
    pdl: bool = False,
) -> None:
    """Draw one token a row, as `sampling.sampler.sample` does; greedy rows take the likeliest.

    Scores are rounded differently from the sampler's, so a draw differs where two ids arrive within the last bits of
    each other; and ids that the race's numbers cannot let win (25 below the likeliest) are left out.

    Args:
        logits: [rows, vocab] float32 or bfloat16, rows contiguous. Not written.
        slots: [rows] integers.
        positions: [rows] integers, of the tokens before those drawn.
        columns: the slots' parameters.
        out_ids: [rows] integers, written.
        last_tokens: [slots] integers, written at `slots`.
        scratch: of at least these rows and this vocabulary.
        has_filters: False if no row has top_k or top_p (greedy rows aside), which are ignored then.
        pdl: see `launch`; nothing is read early.
    """
    rows, vocab = logits.shape
    if not rows:
        return
    has_filters = has_filters and vocab > 1  # the compiler fails at loops over a single id
    blocks = triton.cdiv(vocab, BLOCK)
    shape = {"VOCAB": vocab, "BLOCK": BLOCK, "BLOCKS": triton.next_power_of_2(blocks), "PDL": pdl, **pdl_options(pdl)}
    row_args = (logits, slots, tuple(columns), tuple(scratch), logits.stride(0))
    drawn = {"out_ids": out_ids, "last_tokens": last_tokens, "HAS_FILTERS": has_filters, "num_warps": 4}
    _summarise_kernel[(blocks, rows)](*row_args, **drawn, **shape)
    if has_filters:
        find_bounds(row_args, scratch, shape)
    _race_kernel[(blocks, rows)](*row_args, positions, **drawn, **shape)
