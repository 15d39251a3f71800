"""top_k, top_p and min_p without putting the vocabulary in order.

What is kept reaches some value; one that is low enough is found from the greatest logits and the weights of spans of
ids. The spans that reach it are read again, and the ids that do, usually few, are listed and drawn from. A row of which
too many ids reach it stays open, for a race of its whole.

The race comes first: its winner is drawn if so few ids, with so little weight, stand before it in the order that the
filters keep it. If not they keep nothing after it either, and the ids before it race again.

top_p is a share of what top_k leaves; of ids with equal logits the lower are kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.ops.triton.launch import start_and_wait
from tokenmill.ops.triton.noise import LOG2E, log2_exponential, row_key
from tokenmill.ops.triton.rows import (
    SPAN,
    SamplingColumns,
    SamplingScratch,
    over_temperature,
    row_logits,
    rules_of,
    store_token,
)

ROUNDS = tl.constexpr(7)
REACH = tl.constexpr(32.0)  # ids whose scaled logits are further below the greatest have no weight
MOST_SPANS = tl.constexpr(2048)  # of which one program should list ids
LIST_SPANS = tl.constexpr(64)
LIST_PIECE = tl.constexpr(1024)
ROW_PIECE = tl.constexpr(8192)
PAIRS = tl.constexpr(256)  # ids of which each is compared with each


@triton.jit
def summarise_kernel(
    logits, slots, columns, scratch, stride, VOCAB: tl.constexpr, SPANS: tl.constexpr, PDL: tl.constexpr
):
    """Each program writes the greatest scaled logits and the weights of SPANS spans of a row."""
    start_and_wait(PDL)
    columns, scratch = SamplingColumns(*columns), SamplingScratch(*scratch)
    row = tl.program_id(1).to(tl.int64)
    span = tl.program_id(0) * SPANS + tl.arange(0, SPANS)
    temperature = tl.load(columns.temperature + tl.load(slots + row))
    value = row_logits(logits + row * stride, span[:, None] * SPAN + tl.arange(0, SPAN)[None, :], VOCAB)
    best = tl.max(value, 1)  # [SPANS]
    # A span of forbidden ids only has no greatest logit to subtract.
    weight = tl.sum(tl.exp2((value - tl.maximum(best, -1e30)[:, None]) * (LOG2E / temperature)), 1)
    spans = triton.cdiv(VOCAB, SPAN)
    tl.store(scratch.bests + row * spans + span, over_temperature(best, temperature), mask=span < spans)
    tl.store(scratch.weights + row * spans + span, weight, mask=span < spans)


@triton.jit
def _lowest_needed(best, weight, top, total, k, p, VOCAB: tl.constexpr):
    """A value that the k likeliest ids reach, or ids with the share p of all weight; of `best` and `weight` [spans]."""
    low, high = top - REACH, top
    if (k < VOCAB) | (p < 1.0):
        peak = tl.exp(best - top)
        middle = tl.maximum(low, tl.min(tl.where(best > float("-inf"), best, float("inf")), 0))
        for _ in range(ROUNDS):
            is_over = best >= middle
            if k < VOCAB:
                is_enough = tl.sum(is_over.to(tl.int32), 0) >= k
            else:
                # A span that reaches the middle has one such id at least, and the weight that its others cannot have.
                sure = tl.maximum(peak, weight - (SPAN - 1) * tl.exp(middle - top))
                is_enough = tl.sum(tl.where(is_over, sure, 0.0), 0) >= p * 1.00001 * total
            low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
            middle = 0.5 * (low + high)
    return low


@triton.jit
def _list_ids(logits, temperature, best, low, spans, values, ids, most, VOCAB: tl.constexpr, ROOM: tl.constexpr):
    """List the ids that reach `low`, in order. Returns how many; more than ROOM if too many, or in `most` spans."""
    is_wanted = (best >= low) & (best > float("-inf"))
    rank, wanted = _places(tl.reshape(is_wanted, [best.shape[0] // 32, 32]))
    tl.store(spans + rank, tl.reshape(tl.arange(0, best.shape[0]), [best.shape[0] // 32, 32]), mask=rank >= 0)
    tl.debug_barrier()  # other threads read what is stored
    count = tl.where(wanted > most, ROOM + 1, 0)
    start = 0
    while (start < wanted) & (count <= ROOM):
        place = start + tl.arange(0, LIST_SPANS)
        span = tl.load(spans + place, mask=place < wanted, other=VOCAB)
        at = span[:, None] * SPAN + tl.arange(0, SPAN)[None, :]  # [LIST_SPANS, SPAN]
        value = over_temperature(row_logits(logits, at, VOCAB), temperature)
        order, more = _places((value >= low) & (value > float("-inf")))
        is_listed = (order >= 0) & (order + count < ROOM)
        tl.store(values + count + order, value, mask=is_listed)
        tl.store(ids + count + order, at, mask=is_listed)
        count += more
        start += LIST_SPANS
    tl.debug_barrier()
    return count


@triton.jit
def _places(is_wanted):
    """How many are wanted before each that is, row by row, and -1 for others [rows, columns]; how many are in all."""
    wanted = is_wanted.to(tl.int32)
    own = tl.sum(wanted, 1)
    before = tl.cumsum(own, 0) - own
    return tl.where(is_wanted, before[:, None] + tl.cumsum(wanted, 1) - 1, -1), tl.sum(own, 0)


@triton.jit
def _at(source, at, VOCAB: tl.constexpr, IS_LIST: tl.constexpr):
    """Scaled logits and ids at places of a list of ids, or of a row; -inf where there is none."""
    values, ids, size, temperature = source
    if IS_LIST:
        value = tl.load(values + at, mask=at < size, other=float("-inf"))
        at = tl.load(ids + at, mask=at < size, other=0)
    else:
        value = over_temperature(row_logits(values, at, VOCAB), temperature)
    return value, at


@triton.jit
def _before(source, top, value, token, VOCAB: tl.constexpr, IS_LIST: tl.constexpr):
    """How many of the source's ids stand before (value, token) in the order, and their weight."""
    SIZE: tl.constexpr = LIST_PIECE if IS_LIST else ROW_PIECE
    counts, weights = tl.zeros([SIZE], tl.int32), tl.zeros([SIZE], tl.float32)
    for start in range(0, source[2], SIZE):
        its, ids = _at(source, start + tl.arange(0, SIZE), VOCAB, IS_LIST)
        is_before = (its > value) | ((its == value) & (ids < token))
        counts += is_before.to(tl.int32)
        weights += tl.where(is_before, tl.exp(its - top), 0.0)
    return tl.sum(counts, 0), tl.sum(weights, 0)


@triton.jit
def _winner(source, race, value, token, VOCAB: tl.constexpr, IS_LIST: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """The scaled logit and id of the winner of the ids that stand before (value, token) in the order."""
    is_greedy, key_low, key_high, least = race
    SIZE: tl.constexpr = LIST_PIECE if IS_LIST else ROW_PIECE
    bests, places = tl.full([SIZE], float("-inf"), tl.float32), tl.zeros([SIZE], tl.int32)
    for start in range(0, source[2], SIZE):
        at = start + tl.arange(0, SIZE)
        its, ids = _at(source, at, VOCAB, IS_LIST)
        score = its
        if not is_greedy:
            score = its * LOG2E - log2_exponential(key_low, key_high, ids, IS_INTERPRETED)
        is_in = (its >= least) & ((its > value) | ((its == value) & (ids < token)))
        score = tl.where(is_in, score, float("-inf"))
        places = tl.where(score > bests, at, places)
        bests = tl.maximum(score, bests)
    place = tl.min(tl.where(bests == tl.max(bests, 0), places, VOCAB), 0)
    return _at(source, place, VOCAB, IS_LIST)


@triton.jit
def _ordered(value):
    """Integers in the order of float32 values."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _float_of(key):
    """The inverse of `_ordered`."""
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight_of_likeliest(source, top, k, VOCAB: tl.constexpr, IS_LIST: tl.constexpr):
    """The weight of the k likeliest of the source's ids, of which it has so many, or all that have any weight."""
    if IS_LIST and source[2] <= PAIRS:
        place = tl.arange(0, PAIRS)[None, :]
        value = tl.load(source[0] + place, mask=place < source[2], other=float("-inf"))  # [1, PAIRS]
        rank = tl.zeros([PAIRS], tl.int32)
        for start in range(0, source[2], 16):
            other = start + tl.arange(0, 16)[:, None]
            its = tl.load(source[0] + other, mask=other < source[2], other=float("-inf"))  # [16, 1]
            is_before = (its > value) | ((its == value) & (other < place))  # [16, PAIRS]
            rank += tl.sum(is_before.to(tl.int32), 0)
        total = tl.sum(tl.where(rank < k, tl.exp(tl.reshape(value, [PAIRS]) - top), 0.0), 0)
    else:
        low, high = _ordered(top - REACH) - 1, _ordered(top)
        more, heavier = 0, 0.0  # the ids over `high`, fewer than k
        while high - low > 1:
            middle = (low + high) >> 1
            count, weight = _before(source, top, _float_of(middle), 0, VOCAB, IS_LIST)
            is_few = count < k
            low, high = tl.where(is_few, low, middle), tl.where(is_few, middle, high)
            more, heavier = tl.where(is_few, count, more), tl.where(is_few, weight, heavier)
        total = heavier + (k - more) * tl.exp(_float_of(high) - top)
    return total


@triton.jit
def _settle(
    source, race, value, token, top, total, k, p,
    VOCAB: tl.constexpr, IS_LIST: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The id drawn, if (value, token) wins the race of a whole row; of a list, if the ids before it may race."""
    if (k < VOCAB) & (p < 1.0):
        total = _weight_of_likeliest(source, top, k, VOCAB, IS_LIST)
    target = tl.where(p < 1.0, p * total, float("inf"))
    most = VOCAB + 1
    is_sought = True
    while is_sought:
        if IS_LIST or most <= VOCAB:
            value, token = _winner(source, race, value, token, VOCAB, IS_LIST, IS_INTERPRETED)
        count, weight = _before(source, top, value, token, VOCAB, IS_LIST)
        # There are ever fewer, or some logits are no numbers, and this would not end.
        is_sought = (count > 0) & (count < most) & ((count >= k) | (weight >= target))
        most = count
    return tl.minimum(token, VOCAB - 1)


@triton.jit
def _list_row(logits, scratch, row, k, p, reach, temperature, VOCAB: tl.constexpr, ROOM: tl.constexpr):
    """List a row's ids that may be kept, or leave it open. Returns how many, what they reach, and the row's weights."""
    spans: tl.constexpr = triton.cdiv(VOCAB, SPAN)
    span = tl.arange(0, 32 * triton.next_power_of_2(triton.cdiv(spans, 32)))
    best = tl.load(scratch.bests + row * spans + span, mask=span < spans, other=float("-inf"))
    top = tl.max(best, 0)
    weight = tl.load(scratch.weights + row * spans + span, mask=span < spans, other=0.0)
    weight *= tl.exp(best - tl.maximum(top, -1e30))
    total = tl.sum(weight, 0)
    low = _lowest_needed(best, weight, top, total, k, p, VOCAB)
    # The weight of the k likeliest is that of ids further down too, and is found in a list, or slowly.
    most = ROOM
    if not ((k < VOCAB) & (p < 1.0)):
        low, most = tl.maximum(low, top - reach), MOST_SPANS
    values, ids = scratch.list_values + row * ROOM, scratch.list_ids + row * ROOM
    spans_wanted = scratch.spans + row * spans
    count = _list_ids(logits, temperature, best, low, spans_wanted, values, ids, most, VOCAB, ROOM)
    tl.store(scratch.tops + row, top)
    tl.store(scratch.totals + row, total)
    tl.store(scratch.lows + row, low)
    tl.store(scratch.is_open + row, (count > ROOM).to(tl.int32))
    return count, top, total, low


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def filter_kernel(
    logits, slots, columns, scratch, stride, positions, out_ids, last_tokens,
    VOCAB: tl.constexpr, ROOM: tl.constexpr, IS_LIST: tl.constexpr, IS_INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program draws a row from a list, or leaves it open; after the race, draws from an open row."""
    start_and_wait(PDL)
    columns, scratch = SamplingColumns(*columns), SamplingScratch(*scratch)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    logits += row * stride
    k, p, reach = rules_of(columns, slot, VOCAB)
    temperature = tl.load(columns.temperature + slot)
    if IS_LIST:
        count, top, total, low = _list_row(logits, scratch, row, k, p, reach, temperature, VOCAB, ROOM)
        source = (scratch.list_values + row * ROOM, scratch.list_ids + row * ROOM, count, temperature)
        is_sought = count <= ROOM
    else:
        top, total, low = tl.load(scratch.tops + row), tl.load(scratch.totals + row), tl.load(scratch.lows + row)
        source = (logits, out_ids, VOCAB, temperature)
        is_sought = (tl.load(scratch.is_open + row) != 0) & ((k < VOCAB) | (p < 1.0))
    if is_sought:
        key_low, key_high = row_key(tl.load(columns.seed + slot), tl.load(positions + row).to(tl.int64) + 1)
        race = (tl.load(columns.is_greedy + slot) != 0, key_low, key_high, tl.maximum(low, top - reach))
        if IS_LIST:
            value, token = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
        else:
            value, token = _at(source, tl.load(out_ids + row).to(tl.int32), VOCAB, IS_LIST)
        token = _settle(source, race, value, token, top, total, k, p, VOCAB, IS_LIST, IS_INTERPRETED)
        store_token(token, row, slot, out_ids, last_tokens)
