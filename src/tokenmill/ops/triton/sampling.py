"""Draws without putting the vocabulary in order: the same race as `sampling.sampler`, with the same numbers.

A greedy row's scores in the race are its logits. One program sees some blocks of one row, and tells its best score and
the group of ids that has it; the last of a row's programs to finish looks which id of the best group it is, and leaves
the row's counter at 0. All is read from the device by slot, so that a draw can stand in a graph.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenmill.ops.triton.filters import REACH, find_bounds, set_marks
from tokenmill.ops.triton.launch import pdl_options, start_and_wait
from tokenmill.ops.triton.noise import LOG2E, log2_exponential, row_key
from tokenmill.ops.triton.rows import (
    BLOCK,
    BOUND,
    FIELDS,
    GROUP,
    LAST_ID,
    MARKS,
    PLAIN_BLOCK,
    TOP,
    TOTAL,
    SamplingColumns,
    SamplingScratch,
    is_last_program,
    row_logits,
    scaled_logits,
)

PROGRAMS = 2048  # as many as keep a GPU busy


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _summarise_kernel(logits, slots, columns, scratch, stride, VOCAB: tl.constexpr, PDL: tl.constexpr):
    start_and_wait(PDL)
    columns, scratch = SamplingColumns(*columns), SamplingScratch(*scratch)
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks = tl.num_programs(0)
    degree = tl.load(columns.temperature + tl.load(slots + row))
    value = scaled_logits(logits + row * stride, block * BLOCK + tl.arange(0, BLOCK), VOCAB, degree)  # [BLOCK]
    top = tl.max(value, 0)
    own = row * blocks + block
    tl.store(scratch.best + own, top)
    # A block of forbidden ids only has no top to subtract.
    tl.store(scratch.weights + own, tl.sum(tl.exp(value - tl.maximum(top, -1e30)), 0))
    tl.store(scratch.lowest + own, tl.min(tl.where(value > float("-inf"), value, float("inf")), 0))
    if is_last_program(scratch.counters + row, blocks):
        each = tl.arange(0, triton.next_power_of_2(triton.cdiv(VOCAB, BLOCK)))
        is_block = each < blocks
        at = row * blocks + each
        tops = tl.load(scratch.best + at, mask=is_block, other=float("-inf"), cache_modifier=".cg")
        top = tl.max(tops, 0)
        floats = scratch.floats + row * FIELDS
        weight = tl.load(scratch.weights + at, mask=is_block, other=0.0, cache_modifier=".cg")
        low = tl.min(tl.load(scratch.lowest + at, mask=is_block, other=float("inf"), cache_modifier=".cg"), 0)
        tl.store(floats + TOP, top)
        tl.store(floats + TOTAL, tl.sum(weight * tl.exp(tops - tl.maximum(top, -1e30)), 0))
        tl.store(floats + BOUND, float("-inf"))
        tl.store(scratch.ints + row * FIELDS + LAST_ID, VOCAB)
        set_marks(scratch.marks + row * MARKS, top, tl.maximum(low, top - REACH))


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["slots", "positions"])
def _race_kernel(
    logits,
    slots,
    columns,
    scratch,
    stride,
    positions,
    out_ids,
    last_tokens,
    blocks,
    VOCAB: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    start_and_wait(PDL)
    columns, scratch = SamplingColumns(*columns), SamplingScratch(*scratch)
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    programs = tl.num_programs(0)
    slot = tl.load(slots + row)
    low, high = row_key(tl.load(columns.seed + slot), tl.load(positions + row).to(tl.int64) + 1)
    least, bound, last = 0.0, 0.0, 0
    if HAS_FILTERS:
        floats = scratch.floats + row * FIELDS
        share = tl.load(columns.min_p + slot)
        least = tl.load(floats + TOP) + tl.where(share > 0.0, tl.log(tl.maximum(share, 1e-30)), -REACH)
        bound, last = tl.load(floats + BOUND), tl.load(scratch.ints + row * FIELDS + LAST_ID)
        # The one block that this program has is passed over if none of its ids is kept.
        blocks = tl.where(tl.load(scratch.best + row * programs + program) >= tl.maximum(least, bound), 1, 0)
    is_greedy, temperature = tl.load(columns.is_greedy + slot) != 0, tl.load(columns.temperature + slot)
    race = (logits + row * stride, is_greedy, temperature, low, high, least, bound, last)
    SIZE: tl.constexpr = BLOCK if HAS_FILTERS else PLAIN_BLOCK
    tops = tl.full([SIZE // GROUP], float("-inf"), tl.float32)
    places = tl.zeros([SIZE // GROUP], tl.int32)
    for block in range(program * blocks, program * blocks + blocks):
        first = block * SIZE
        score = _scores(race, first, SIZE, VOCAB, HAS_FILTERS, IS_INTERPRETED)
        top = tl.max(tl.reshape(score, [SIZE // GROUP, GROUP]), 1)
        places = tl.where(top > tops, first + tl.arange(0, SIZE // GROUP) * GROUP, places)
        tops = tl.maximum(top, tops)
    top = tl.max(tops, 0)
    own = row * programs + program
    tl.store(scratch.scores + own, top)
    tl.store(scratch.places + own, tl.min(tl.where(tops == top, places, VOCAB - 1), 0))
    if is_last_program(scratch.counters + row, programs):
        each = tl.arange(0, triton.next_power_of_2(triton.cdiv(VOCAB, SIZE)))
        at = scratch.scores + row * programs + each
        found = tl.load(at, mask=each < programs, other=float("-inf"), cache_modifier=".cg")
        _, winner = tl.max(found, 0, return_indices=True)
        first = tl.load(scratch.places + row * programs + winner, cache_modifier=".cg")
        _, place = tl.max(_scores(race, first, GROUP, VOCAB, HAS_FILTERS, IS_INTERPRETED), 0, return_indices=True)
        token = tl.minimum(first + place, VOCAB - 1)  # also where no score is a number
        tl.store(out_ids + row, token.to(out_ids.dtype.element_ty))
        # Padding rows share a slot, whose last token nobody reads.
        tl.store(last_tokens + slot, token.to(last_tokens.dtype.element_ty))


@triton.jit
def _scores(
    race, first, SIZE: tl.constexpr, VOCAB: tl.constexpr, HAS_FILTERS: tl.constexpr, IS_INTERPRETED: tl.constexpr
):
    """The scores of SIZE ids from `first`, of which the greatest wins; -inf if not kept."""
    logits, is_greedy, temperature, low, high, least, bound, last = race
    at = first + tl.arange(0, SIZE)
    if HAS_FILTERS:
        value = scaled_logits(logits, at, VOCAB, temperature)
        is_kept = (value >= least) & ((value > bound) | ((value == bound) & (at <= last)))
        score = tl.where(is_kept, value, float("-inf"))
        factor = LOG2E
    else:
        score = row_logits(logits, at, VOCAB)
        factor = LOG2E / temperature
    if not is_greedy:
        score = score * factor - log2_exponential(low, high, first, SIZE, IS_INTERPRETED)
    return score


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

    Scores are rounded differently from the sampler's, so a draw differs where two ids arrive within about 1e-5, or the
    last bits of their scaled logits, of each other.

    Args:
        logits: [rows, vocab] float32 or bfloat16, rows contiguous. Not written.
        slots: [rows] integers.
        positions: [rows] integers, of the tokens before those drawn.
        columns: the slots' parameters.
        out_ids: [rows] integers, written.
        last_tokens: [slots] integers, written at `slots`.
        scratch: of at least these rows and this vocabulary.
        has_filters: False if no row has top_k, top_p or min_p (greedy rows aside), which are ignored then.
        pdl: see `launch`; nothing is read early.
    """
    rows, vocab = logits.shape
    if not rows:
        return
    has_filters = has_filters and vocab > 1  # the compiler fails at loops over a single id
    blocks = triton.cdiv(vocab, (BLOCK if has_filters else PLAIN_BLOCK).value)
    shape = {"VOCAB": vocab, "PDL": pdl, **pdl_options(pdl)}
    row_args = (logits, slots, tuple(columns), tuple(scratch), logits.stride(0))
    each = min(max(rows * blocks // PROGRAMS, 1), 8)
    if has_filters:
        each = 1
        _summarise_kernel[(blocks, rows)](*row_args, num_warps=4, **shape)
        find_bounds(row_args, scratch, shape)
    _race_kernel[(triton.cdiv(blocks, each), rows)](
        *row_args, positions, out_ids, last_tokens, each,
        HAS_FILTERS=has_filters, IS_INTERPRETED=logits.is_cpu, num_warps=4, **shape,
    )  # fmt: skip
