"""Draws without putting the vocabulary in order: the same race as `sampling.sampler`, with the same numbers.

A greedy row's scores in the race are its logits. One program sees some blocks of one row, and tells its best score and
the group of ids that has it; the last of a row's programs to finish looks which id of the best group it is, and leaves
the row's counter at 0. All is read from the device by slot, so that a draw can stand in a graph.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenmill.ops.triton.filters import filter_kernel, summarise_kernel
from tokenmill.ops.triton.launch import pdl_options, start_and_wait
from tokenmill.ops.triton.noise import LOG2E, log2_exponential, row_key
from tokenmill.ops.triton.rows import (
    BLOCK,
    GROUP,
    SPAN,
    SamplingColumns,
    SamplingScratch,
    is_last_program,
    over_temperature,
    row_logits,
    rules_of,
    store_token,
)

PROGRAMS = 2048  # as many as keep a GPU busy
SPANS = 64  # of a program that summarises


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["slots", "positions"])
def _race_kernel(
    logits, slots, columns, scratch, stride, positions, out_ids, last_tokens, blocks,
    VOCAB: tl.constexpr, HAS_FILTERS: tl.constexpr, IS_INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_and_wait(PDL)
    columns, scratch = SamplingColumns(*columns), SamplingScratch(*scratch)
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    programs = tl.num_programs(0)
    is_open = True
    if HAS_FILTERS:
        is_open = tl.load(scratch.is_open + row) != 0
    if is_open:
        slot = tl.load(slots + row)
        low, high = row_key(tl.load(columns.seed + slot), tl.load(positions + row).to(tl.int64) + 1)
        least = 0.0
        if HAS_FILTERS:
            _, _, reach = rules_of(columns, slot, VOCAB)
            least = tl.maximum(tl.load(scratch.lows + row), tl.load(scratch.tops + row) - reach)
        is_greedy, temperature = tl.load(columns.is_greedy + slot) != 0, tl.load(columns.temperature + slot)
        race = (logits + row * stride, is_greedy, temperature, low, high, least)
        tops = tl.full([BLOCK // GROUP], float("-inf"), tl.float32)
        places = tl.zeros([BLOCK // GROUP], tl.int32)
        for block in range(program * blocks, program * blocks + blocks):
            first = block * BLOCK
            score = _scores(race, first, BLOCK, VOCAB, HAS_FILTERS, IS_INTERPRETED)
            best = tl.max(tl.reshape(score, [BLOCK // GROUP, GROUP]), 1)
            places = tl.where(best > tops, first + tl.arange(0, BLOCK // GROUP) * GROUP, places)
            tops = tl.maximum(best, tops)
        best = tl.max(tops, 0)
        own = row * programs + program
        tl.store(scratch.scores + own, best)
        tl.store(scratch.places + own, tl.min(tl.where(tops == best, places, VOCAB - 1), 0))
        if is_last_program(scratch.counters + row, programs):
            each = tl.arange(0, triton.next_power_of_2(triton.cdiv(VOCAB, BLOCK)))
            at = scratch.scores + row * programs + each
            found = tl.load(at, mask=each < programs, other=float("-inf"), cache_modifier=".cg")
            _, winner = tl.max(found, 0, return_indices=True)
            first = tl.load(scratch.places + row * programs + winner, cache_modifier=".cg")
            _, place = tl.max(_scores(race, first, GROUP, VOCAB, HAS_FILTERS, IS_INTERPRETED), 0, return_indices=True)
            token = tl.minimum(first + place, VOCAB - 1)  # also where no score is a number
            store_token(token, row, slot, out_ids, last_tokens)


@triton.jit
def _scores(
    race, first, SIZE: tl.constexpr, VOCAB: tl.constexpr, HAS_FILTERS: tl.constexpr, IS_INTERPRETED: tl.constexpr
):
    """The scores of SIZE ids from `first`, of which the greatest wins; -inf if not kept."""
    logits, is_greedy, temperature, low, high, least = race
    at = first + tl.arange(0, SIZE)
    score = row_logits(logits, at, VOCAB)
    factor = LOG2E / temperature
    if HAS_FILTERS:
        value = over_temperature(score, temperature)
        score = tl.where(value >= least, value, float("-inf"))
        factor = LOG2E
    if not is_greedy:
        score = score * factor - log2_exponential(low, high, at, IS_INTERPRETED)
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
    shape = {"VOCAB": vocab, "PDL": pdl, **pdl_options(pdl)}
    drawing = {**shape, "IS_INTERPRETED": logits.is_cpu}
    row_args = (logits, slots, tuple(columns), tuple(scratch), logits.stride(0))
    all_args = (*row_args, positions, out_ids, last_tokens)
    room = scratch.list_ids.shape[1]
    if has_filters:
        grid = (triton.cdiv(vocab, SPANS * SPAN.value), rows)
        summarise_kernel[grid](*row_args, SPANS=SPANS, num_warps=4, **shape)
        filter_kernel[(rows,)](*all_args, ROOM=room, IS_LIST=True, num_warps=8, **drawing)
    blocks = triton.cdiv(vocab, BLOCK.value)
    each = min(max(rows * blocks // PROGRAMS, 1), 8)
    _race_kernel[(triton.cdiv(blocks, each), rows)](*all_args, each, HAS_FILTERS=has_filters, num_warps=4, **drawing)
    if has_filters:
        filter_kernel[(rows,)](*all_args, ROOM=room, IS_LIST=False, num_warps=16, **drawing)
