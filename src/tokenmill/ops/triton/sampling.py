"""Draws without putting the vocabulary in order: the same race as `sampling.sampler`, with the same numbers.

One program sees one block of one row; the last of a row's programs to finish joins what they found, always in one
order, and leaves the row's counter at 0. All is read from the device by slot, so that a draw can stand in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.ops.triton.filters import MARKS, REACH, FilterScratch, find_bounds, set_marks
from tokenmill.ops.triton.noise import exponential, row_key
from tokenmill.ops.triton.rows import (
    BLOCK,
    BOUND,
    FIELDS,
    LAST_ID,
    TOP,
    TOTAL,
    is_last_program,
    scaled_logits,
)


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """The sampling parameters by slot, on the device."""

    temperature: Tensor  # [slots] float32, over 0 unless greedy
    top_k: Tensor  # [slots] integers; 0: all
    top_p: Tensor  # [slots] float32; 1: all
    min_p: Tensor  # [slots] float32; 0: all
    seed: Tensor  # [slots] int64
    is_greedy: Tensor  # [slots] bool


class SamplingScratch:
    """Memory for one draw at a time of up to `rows` rows; the counters are 0 between draws."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        blocks = triton.cdiv(vocab, BLOCK)
        self.best = torch.empty((rows, blocks), dtype=torch.float32, device=device)
        self.scores = torch.empty((rows, blocks), dtype=torch.float32, device=device)
        self.weights = torch.empty((rows, blocks), dtype=torch.float32, device=device)
        self.lowest = torch.empty((rows, blocks), dtype=torch.float32, device=device)
        self.places = torch.empty((rows, blocks), dtype=torch.int32, device=device)
        self.winners = torch.empty((rows, blocks), dtype=torch.int32, device=device)
        self.floats = torch.empty((rows, FIELDS.value), dtype=torch.float32, device=device)
        self.ints = torch.empty((rows, FIELDS.value), dtype=torch.int32, device=device)
        self.counters = torch.zeros(rows, dtype=torch.int32, device=device)
        self.filters = FilterScratch(rows, vocab, device)


@triton.jit(do_not_specialize=["stride"])
def _summarise_kernel(
    logits,
    slots,
    temperature,
    is_greedy,
    best,
    places,
    weights,
    lowest,
    floats,
    ints,
    marks,
    counters,
    out_ids,
    last_tokens,
    stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
):
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks = tl.num_programs(0)
    slot = tl.load(slots + row)
    greedy = tl.load(is_greedy + slot) != 0
    degree = tl.where(greedy, 1.0, tl.load(temperature + slot))
    value = scaled_logits(logits + row * stride, block * BLOCK + tl.arange(0, BLOCK), VOCAB, degree)  # [BLOCK]
    top, place = tl.max(value, 0, return_indices=True)
    tl.store(best + row * blocks + block, top)
    tl.store(places + row * blocks + block, block * BLOCK + place)
    if HAS_FILTERS:
        # A block of forbidden ids only has no top to subtract.
        tl.store(weights + row * blocks + block, tl.sum(tl.exp(value - tl.maximum(top, -1e30)), 0))
        tl.store(lowest + row * blocks + block, tl.min(tl.where(value > float("-inf"), value, float("inf")), 0))
    if is_last_program(counters + row, blocks):
        each = tl.arange(0, BLOCKS)
        is_block = each < blocks
        at = row * blocks + each
        tops = tl.load(best + at, mask=is_block, other=float("-inf"), cache_modifier=".cg")
        top, first = tl.max(tops, 0, return_indices=True)
        tl.store(floats + row * FIELDS + TOP, top)
        if greedy:
            token = tl.load(places + row * blocks + first, cache_modifier=".cg")
            _put(token, row, slot, out_ids, last_tokens)
        if HAS_FILTERS:
            weight = tl.load(weights + at, mask=is_block, other=0.0, cache_modifier=".cg")
            total = tl.sum(weight * tl.exp(tops - tl.maximum(top, -1e30)), 0)
            low = tl.min(tl.load(lowest + at, mask=is_block, other=float("inf"), cache_modifier=".cg"), 0)
            tl.store(floats + row * FIELDS + TOTAL, total)
            tl.store(floats + row * FIELDS + BOUND, float("-inf"))
            tl.store(ints + row * FIELDS + LAST_ID, VOCAB)
            set_marks(marks + row * MARKS, top, tl.maximum(low, top - REACH))


@triton.jit(do_not_specialize=["stride"])
def _race_kernel(
    logits,
    slots,
    positions,
    temperature,
    min_p,
    seed,
    is_greedy,
    best,
    scores,
    winners,
    floats,
    ints,
    counters,
    out_ids,
    last_tokens,
    stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
):
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks = tl.num_programs(0)
    slot = tl.load(slots + row)
    if tl.load(is_greedy + slot) == 0:
        top = tl.load(floats + row * FIELDS + TOP)
        share = tl.load(min_p + slot)
        least = tl.where(share > 0.0, top + tl.log(tl.maximum(share, 1e-30)), top - REACH)
        bound, last = float("-inf"), VOCAB
        if HAS_FILTERS:
            bound = tl.load(floats + row * FIELDS + BOUND)
            last = tl.load(ints + row * FIELDS + LAST_ID)
        score = float("-inf")
        winner = 0
        if tl.load(best + row * blocks + block) >= tl.maximum(least, bound):
            at = block * BLOCK + tl.arange(0, BLOCK)
            value = scaled_logits(logits + row * stride, at, VOCAB, tl.load(temperature + slot))  # [BLOCK]
            is_kept = (value >= least) & ((value > bound) | ((value == bound) & (at <= last)))
            low, high = row_key(tl.load(seed + slot), tl.load(positions + row).to(tl.int64) + 1)
            arrival = tl.maximum(value - tl.log(exponential(low, high, at)), -1e30)  # kept ids beat all others
            score, place = tl.max(tl.where(is_kept, arrival, float("-inf")), 0, return_indices=True)
            winner = block * BLOCK + place
        tl.store(scores + row * blocks + block, score)
        tl.store(winners + row * blocks + block, winner)
        if is_last_program(counters + row, blocks):
            each = tl.arange(0, BLOCKS)
            seen = tl.load(scores + row * blocks + each, mask=each < blocks, other=float("-inf"), cache_modifier=".cg")
            _, first = tl.max(seen, 0, return_indices=True)
            _put(tl.load(winners + row * blocks + first, cache_modifier=".cg"), row, slot, out_ids, last_tokens)


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
    """
    rows, vocab = logits.shape
    if not rows:
        return
    blocks = triton.cdiv(vocab, BLOCK)
    shape = {"VOCAB": vocab, "BLOCK": BLOCK, "BLOCKS": triton.next_power_of_2(blocks), "HAS_FILTERS": has_filters}
    _summarise_kernel[(blocks, rows)](
        logits,
        slots,
        columns.temperature,
        columns.is_greedy,
        scratch.best,
        scratch.places,
        scratch.weights,
        scratch.lowest,
        scratch.floats,
        scratch.ints,
        scratch.filters.marks,
        scratch.counters,
        out_ids,
        last_tokens,
        logits.stride(0),
        num_warps=4,
        **shape,
    )
    if has_filters:
        filters = (columns.temperature, columns.top_k, columns.top_p, columns.is_greedy)
        find_bounds(logits, slots, filters, scratch.floats, scratch.ints, scratch.counters, scratch.filters)
    _race_kernel[(blocks, rows)](
        logits,
        slots,
        positions,
        columns.temperature,
        columns.min_p,
        columns.seed,
        columns.is_greedy,
        scratch.best,
        scratch.scores,
        scratch.winners,
        scratch.floats,
        scratch.ints,
        scratch.counters,
        out_ids,
        last_tokens,
        logits.stride(0),
        num_warps=4,
        **shape,
    )
