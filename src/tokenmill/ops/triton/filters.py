"""The ids that top_k and top_p keep, as one bound a row, without sorting.

Ids are counted and weighed above sixteen marks, at first spread over the row's range, then between the two marks that
enclose the bound. What lies between the last two marks is listed, and the list is bisected. A row whose list would be
too long (thousands of equal logits) is bisected itself, slowly.

top_p is a share of what top_k leaves; of ids with equal logits the lower are kept.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tokenmill.ops.triton.launch import start_and_wait
from tokenmill.ops.triton.rows import (
    BLOCK,
    BOUND,
    COUNT_ABOVE,
    COUNT_INSIDE,
    FIELDS,
    HIGH,
    HIGH_MARK,
    LAST_ID,
    LOW,
    LOW_MARK,
    MARKS,
    TOP,
    TOTAL,
    WEIGHT_ABOVE,
    SamplingColumns,
    SamplingScratch,
    is_last_program,
    scaled_logits,
)

# The numbers of the race lie between 2 ** -32 and 17, or are infinite; so an id whose scaled logit is 25.1 below the
# greatest never wins, and ids further down than this need no place in the order.
REACH = tl.constexpr(32.0)


@triton.jit
def set_marks(marks, high, low):
    """Write marks evenly spaced from high down to low, both included."""
    index = tl.arange(0, MARKS)
    even = high - (high - low) * (index / (MARKS - 1.0))
    tl.store(marks + index, tl.where(index == 0, high, tl.where(index == MARKS - 1, low, even)))


@triton.jit
def _filters_of(columns, slot, VOCAB: tl.constexpr):
    k = tl.load(columns.top_k + slot).to(tl.int32)
    k = tl.where((k <= 0) | (k > VOCAB), VOCAB, k)
    p = tl.load(columns.top_p + slot)
    is_filtered = ((k < VOCAB) | (p < 1.0)) & (tl.load(columns.is_greedy + slot) == 0)
    return k, p, is_filtered


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _count_kernel(
    logits, slots, columns, scratch, stride,
    VOCAB: tl.constexpr, ROOM: tl.constexpr, IS_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_and_wait(PDL)
    columns, scratch = SamplingColumns(*columns), SamplingScratch(*scratch)
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks = tl.num_programs(0)
    slot = tl.load(slots + row)
    floats, ints = scratch.floats + row * FIELDS, scratch.ints + row * FIELDS
    marks = scratch.marks + row * MARKS
    k, p, is_needed = _filters_of(columns, slot, VOCAB)
    if not IS_FIRST:
        # A row's programs all read this before the last of them rewrites it: they have to, to be counted.
        is_needed = is_needed & (tl.load(ints + COUNT_INSIDE) > ROOM)
    if is_needed:
        at = block * BLOCK + tl.arange(0, BLOCK)
        value = scaled_logits(logits + row * stride, at, VOCAB, tl.load(columns.temperature + slot))  # [BLOCK]
        weight = tl.exp(value - tl.load(floats + TOP))
        index = tl.arange(0, MARKS)
        count_over = tl.zeros([MARKS], tl.int32)
        weight_over = tl.zeros([MARKS], tl.float32)
        for mark in tl.static_range(MARKS):
            is_over = value >= tl.load(marks + mark)
            count_over = tl.where(index == mark, tl.sum(is_over.to(tl.int32), 0), count_over)
            weight_over = tl.where(index == mark, tl.sum(tl.where(is_over, weight, 0.0), 0), weight_over)
        base = row * blocks * MARKS
        tl.store(scratch.mark_counts + base + block * MARKS + index, count_over)
        tl.store(scratch.mark_weights + base + block * MARKS + index, weight_over)
        if is_last_program(scratch.counters + row, blocks):
            each = tl.arange(0, triton.next_power_of_2(triton.cdiv(VOCAB, BLOCK)))[:, None]
            place = base + each * MARKS + index[None, :]  # [blocks, MARKS]
            is_block = (each < blocks) & (index[None, :] >= 0)
            counts = tl.load(scratch.mark_counts + place, mask=is_block, other=0, cache_modifier=".cg")
            weights = tl.load(scratch.mark_weights + place, mask=is_block, other=0.0, cache_modifier=".cg")
            count_over, weight_over = tl.sum(counts, 0), tl.sum(weights, 0)
            _enclose(floats, ints, marks, count_over, weight_over, k, p, VOCAB)


@triton.jit
def _enclose(floats, ints, marks, count_over, weight_over, k, p, VOCAB: tl.constexpr):
    """From counts and weights over the marks [MARKS] find the two that enclose the bound, and set marks in between."""
    index = tl.arange(0, MARKS)
    mark = tl.load(marks + index)
    total = tl.load(floats + TOTAL)
    # The share is taken of the weight of the k likeliest, which lies between two marks' weights.
    is_enough = count_over >= k
    least = total
    if k < VOCAB:
        least = tl.max(tl.where(count_over <= k, weight_over, 0.0), 0)
    else:
        is_enough = weight_over >= tl.where(p < 1.0, p * total, float("inf"))
    low_mark = tl.min(tl.where(is_enough, index, MARKS - 1), 0)
    is_kept = (count_over <= k) & (weight_over < tl.where(p < 1.0, p * least, float("inf")))
    high_mark = tl.minimum(tl.max(tl.where(is_kept, index, -1), 0), low_mark)
    is_low, is_high = index == low_mark, index == high_mark
    low = tl.sum(tl.where(is_low, mark, 0.0), 0)
    count_above = tl.sum(tl.where(is_high, count_over, 0), 0)
    high = tl.where(high_mark < 0, float("inf"), tl.sum(tl.where(is_high, mark, 0.0), 0))
    tl.store(floats + LOW, low)
    tl.store(floats + HIGH, high)
    tl.store(floats + WEIGHT_ABOVE, tl.sum(tl.where(is_high, weight_over, 0.0), 0))
    tl.store(ints + COUNT_ABOVE, count_above)
    tl.store(ints + COUNT_INSIDE, tl.sum(tl.where(is_low, count_over, 0), 0) - count_above)
    tl.store(ints + LOW_MARK, low_mark)
    tl.store(ints + HIGH_MARK, high_mark)
    tl.debug_barrier()  # the marks are read above, by other threads than write them
    set_marks(marks, tl.minimum(high, tl.load(floats + TOP)), low)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _list_kernel(logits, slots, columns, scratch, stride, VOCAB: tl.constexpr, ROOM: tl.constexpr, PDL: tl.constexpr):
    start_and_wait(PDL)
    columns, scratch = SamplingColumns(*columns), SamplingScratch(*scratch)
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks = tl.num_programs(0)
    slot = tl.load(slots + row)
    _, _, is_filtered = _filters_of(columns, slot, VOCAB)
    floats, ints = scratch.floats + row * FIELDS, scratch.ints + row * FIELDS
    if is_filtered & (tl.load(ints + COUNT_INSIDE) <= ROOM):
        low, high = tl.load(floats + LOW), tl.load(floats + HIGH)
        low_mark, high_mark = tl.load(ints + LOW_MARK), tl.load(ints + HIGH_MARK)
        each = tl.arange(0, triton.next_power_of_2(triton.cdiv(VOCAB, BLOCK)))
        place = scratch.mark_counts + (row * blocks + each) * MARKS  # [blocks]
        before = tl.sum(tl.load(place + low_mark, mask=each < block, other=0), 0)
        before -= tl.sum(tl.load(place + high_mark, mask=(each < block) & (high_mark >= 0), other=0), 0)
        at = block * BLOCK + tl.arange(0, BLOCK)
        value = scaled_logits(logits + row * stride, at, VOCAB, tl.load(columns.temperature + slot))  # [BLOCK]
        is_listed = (value >= low) & (value < high)
        where = row * ROOM + before + tl.cumsum(is_listed.to(tl.int32), 0) - 1
        tl.store(scratch.list_values + where, value, mask=is_listed)
        tl.store(scratch.list_ids + where, at, mask=is_listed)


@triton.jit
def _ordered(value):
    """Integers in the order of float32 values."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _float_of(key):
    """The inverse of `_ordered`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _piece(source, start, VOCAB: tl.constexpr):
    """Values and ids of the source's places from `start`; -inf where there is none in [low, high)."""
    list_values, list_ids, is_listed, logits, temperature, inside, low, high, _ = source
    at = start + tl.arange(0, BLOCK)
    if is_listed:
        value = tl.load(list_values + at, mask=at < inside, other=float("-inf"))  # [BLOCK]
        ids = tl.load(list_ids + at, mask=at < inside, other=0)
    else:
        value = scaled_logits(logits, at, VOCAB, temperature)
        value = tl.where((value >= low) & (value < high), value, float("-inf"))
        ids = at
    return value, ids


@triton.jit
def _over(source, key, VOCAB: tl.constexpr):
    """How many ids of the source have at least the key `key`, and their weight."""
    count = 0
    weight = 0.0
    for start in range(0, tl.where(source[2], source[5], VOCAB), BLOCK):
        value, _ids = _piece(source, start, VOCAB)
        is_over = (_ordered(value) >= key) & (value > float("-inf"))
        count += tl.sum(is_over.to(tl.int32), 0)
        weight += tl.sum(tl.where(is_over, tl.exp(value - source[8]), 0.0), 0)
    return count, weight


@triton.jit
def _equal(source, key, last, VOCAB: tl.constexpr):
    """How many ids of the source up to `last` have the key `key`."""
    count = 0
    for start in range(0, tl.where(source[2], source[5], VOCAB), BLOCK):
        value, ids = _piece(source, start, VOCAB)
        is_equal = (_ordered(value) == key) & (ids <= last) & (value > float("-inf"))
        count += tl.sum(is_equal.to(tl.int32), 0)
    return count


@triton.jit
def _greatest_key(source, first, end, above, wanted, BY_COUNT: tl.constexpr, VOCAB: tl.constexpr):
    """The greatest key in [first, end) over which there are `wanted` ids, or weight, with those `above` the source."""
    start = first.to(tl.int64)
    while end - start > 1:
        middle = (start + end) >> 1
        count, weight = _over(source, middle.to(tl.int32), VOCAB)
        if BY_COUNT:
            is_enough = above + count >= wanted
        else:
            is_enough = above + weight >= wanted
        start, end = tl.where(is_enough, middle, start), tl.where(is_enough, end, middle)
    return start.to(tl.int32)


@triton.jit
def _last_id(source, key, kept, VOCAB: tl.constexpr):
    """The id up to which there are `kept` ids with the key `key`; VOCAB if there are no more than that."""
    last = VOCAB
    if kept < _equal(source, key, VOCAB, VOCAB):
        start, last = -1, VOCAB - 1
        while last - start > 1:
            middle = (start + last) >> 1
            is_enough = _equal(source, key, middle, VOCAB) >= kept
            start, last = tl.where(is_enough, start, middle), tl.where(is_enough, middle, last)
    return last


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _bound_kernel(logits, slots, columns, scratch, stride, VOCAB: tl.constexpr, ROOM: tl.constexpr, PDL: tl.constexpr):
    start_and_wait(PDL)
    columns, scratch = SamplingColumns(*columns), SamplingScratch(*scratch)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    k, p, is_filtered = _filters_of(columns, slot, VOCAB)
    if is_filtered:
        floats, ints = scratch.floats + row * FIELDS, scratch.ints + row * FIELDS
        top, low, high = tl.load(floats + TOP), tl.load(floats + LOW), tl.load(floats + HIGH)
        count_above, weight_above = tl.load(ints + COUNT_ABOVE), tl.load(floats + WEIGHT_ABOVE)
        inside = tl.load(ints + COUNT_INSIDE)
        values, ids = scratch.list_values + row * ROOM, scratch.list_ids + row * ROOM
        temperature = tl.load(columns.temperature + slot)
        source = (values, ids, inside <= ROOM, logits + row * stride, temperature, inside, low, high, top)
        end = tl.minimum(_ordered(high).to(tl.int64), _ordered(top).to(tl.int64) + 1)
        key, kept, target = _ordered(low), VOCAB, p * tl.load(floats + TOTAL)
        if k < VOCAB:
            key = _greatest_key(source, key, end, count_above, k, True, VOCAB)
            more, weight = _over(source, key + 1, VOCAB)
            kept = tl.minimum(k - count_above - more, _equal(source, key, VOCAB, VOCAB))
            target = p * (weight_above + weight + kept * tl.exp(_float_of(key) - top))
        if p < 1.0:
            share_key = _greatest_key(source, key, end, weight_above, target, False, VOCAB)
            _, weight = _over(source, share_key + 1, VOCAB)
            share_kept = (target - weight_above - weight) / tl.exp(_float_of(share_key) - top)
            share_kept = tl.maximum(tl.ceil(tl.minimum(share_kept, VOCAB * 1.0)).to(tl.int32), 1)
            kept = tl.where(share_key > key, share_kept, tl.minimum(kept, share_kept))
            key = share_key
        tl.store(floats + BOUND, _float_of(key))
        tl.store(ints + LAST_ID, _last_id(source, key, kept, VOCAB))


def find_bounds(row_args: tuple[Any, ...], scratch: SamplingScratch, shape: dict[str, Any]) -> None:
    """Write BOUND and LAST_ID of the rows that top_k or top_p cut.

    Args:
        row_args: logits [rows, vocab], slots [rows], the slots' parameters, the scratch, and the logits' stride.
        scratch: TOP, TOTAL and the first marks stand there.
        shape: the kernels' arguments VOCAB and PDL, and how to launch them.
    """
    rows = row_args[0].shape[0]
    shape = {**shape, "ROOM": scratch.list_values.shape[1]}
    grid = (triton.cdiv(shape["VOCAB"], BLOCK.value), rows)
    for is_first in (True, False):
        _count_kernel[grid](*row_args, IS_FIRST=is_first, num_warps=4, **shape)
    _list_kernel[grid](*row_args, num_warps=4, **shape)
    _bound_kernel[(rows,)](*row_args, num_warps=8, **shape)
