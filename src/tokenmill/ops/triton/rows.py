"""What the sampling kernels share: parameters, blocks of a row, and a row's state between kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(2048)  # ids at a time
PLAIN_BLOCK = tl.constexpr(1024)  # without filters
GROUP = tl.constexpr(8)  # ids of which the race remembers the best one's score only
LIST_ROOM = 4096
MARKS = tl.constexpr(16)

# The state of a row: [rows, FIELDS] float32 ...
FIELDS = tl.constexpr(8)
TOP = tl.constexpr(0)  # the greatest scaled logit
TOTAL = tl.constexpr(1)  # the sum of all weights; an id's weight is exp(scaled logit - TOP)
LOW = tl.constexpr(2)  # the bound of the ids kept lies in [LOW, HIGH)
HIGH = tl.constexpr(3)
WEIGHT_ABOVE = tl.constexpr(4)  # weight of the ids at or over HIGH
BOUND = tl.constexpr(5)  # kept is what is over BOUND, and what equals it up to LAST_ID
# ... and [rows, FIELDS] int32.
COUNT_ABOVE = tl.constexpr(0)  # ids at or over HIGH
COUNT_INSIDE = tl.constexpr(1)  # ids in [LOW, HIGH)
LOW_MARK = tl.constexpr(2)  # which mark LOW is
HIGH_MARK = tl.constexpr(3)  # which mark HIGH is; -1: HIGH is infinity
LAST_ID = tl.constexpr(4)


# Kernels get these as plain tuples, and name the members again: a kernel that is compiled ahead forgets their names.
class SamplingColumns(NamedTuple):
    """The sampling parameters by slot, on the device."""

    temperature: Tensor  # [slots] float32, over 0; 1 if greedy
    top_k: Tensor  # [slots] integers; 0: all
    top_p: Tensor  # [slots] float32; 1: all
    min_p: Tensor  # [slots] float32; 0: all
    seed: Tensor  # [slots] int64
    is_greedy: Tensor  # [slots] bool


class SamplingScratch(NamedTuple):
    """Memory for one draw at a time; `counters` are 0 between draws. Of each block, unless said otherwise."""

    floats: Tensor  # [rows, FIELDS], of the row
    ints: Tensor  # [rows, FIELDS], of the row
    counters: Tensor  # [rows], programs done
    best: Tensor  # [rows, blocks], greatest scaled logit
    weights: Tensor  # [rows, blocks], sum of weights relative to the best
    lowest: Tensor  # [rows, blocks], least scaled logit
    scores: Tensor  # [rows, blocks of PLAIN_BLOCK], of the race
    places: Tensor  # [rows, blocks of PLAIN_BLOCK], first id of the group with that score
    marks: Tensor  # [rows, MARKS], of the row
    mark_weights: Tensor  # [rows, blocks, MARKS], of the ids at or over each mark
    mark_counts: Tensor  # [rows, blocks, MARKS]
    list_values: Tensor  # [rows, list room], of the row
    list_ids: Tensor  # [rows, list room], of the row


def make_scratch(rows: int, vocab: int, device: torch.device, list_room: int = LIST_ROOM) -> SamplingScratch:
    """Memory for draws of up to `rows` rows."""
    blocks, plain_blocks = triton.cdiv(vocab, BLOCK.value), triton.cdiv(vocab, PLAIN_BLOCK.value)

    def floats(*shape: int) -> Tensor:
        return torch.empty((rows, *shape), dtype=torch.float32, device=device)

    def ints(*shape: int) -> Tensor:
        return torch.zeros((rows, *shape), dtype=torch.int32, device=device)

    return SamplingScratch(
        floats=floats(FIELDS.value), ints=ints(FIELDS.value), counters=ints(), best=floats(blocks),
        weights=floats(blocks), lowest=floats(blocks), scores=floats(plain_blocks), places=ints(plain_blocks),
        marks=floats(MARKS.value), mark_weights=floats(blocks, MARKS.value), mark_counts=ints(blocks, MARKS.value),
        list_values=floats(list_room), list_ids=ints(list_room),
    )  # fmt: skip


@triton.jit
def row_logits(logits, at, VOCAB: tl.constexpr):
    """The logits of a row at `at`; -inf beyond the vocabulary."""
    return tl.load(logits + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32)


@triton.jit
def scaled_logits(logits, at, VOCAB: tl.constexpr, temperature):
    """`row_logits` over the temperature, rounded as torch rounds."""
    value = row_logits(logits, at, VOCAB)
    return tl.div_rn(value, tl.zeros_like(value) + temperature) + 0.0  # -0.0 becomes 0.0: one key, one value


@triton.jit
def is_last_program(counter, programs):
    """Whether all other programs of the row have called this; what they stored before can then be read with .cg."""
    tl.debug_barrier()  # all of the program's stores stand before its one atomic
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1
    if is_last:
        tl.store(counter, 0)
    return is_last
