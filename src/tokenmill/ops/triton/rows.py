"""What the sampling kernels share: parameters, pieces of a row, and a row's state between kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(1024)  # ids at a time in the race of a whole row
GROUP = tl.constexpr(8)  # ids of which the race remembers the best one's score only
SPAN = tl.constexpr(32)  # ids of which the filters first look at the greatest logit and the weight only
LIST_ROOM = 16384


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
    """Memory for one draw at a time; `counters` are 0 between draws. An id's weight is exp(scaled logit - top)."""

    tops: Tensor  # [rows], the greatest scaled logit
    totals: Tensor  # [rows], the sum of all weights
    lows: Tensor  # [rows], what every id that is kept reaches
    is_open: Tensor  # [rows], whether there are too many such ids for a list
    bests: Tensor  # [rows, spans], greatest scaled logit
    weights: Tensor  # [rows, spans], sum of weights relative to the best
    spans: Tensor  # [rows, spans], those to be listed
    list_values: Tensor  # [rows, list room], scaled logits of the ids that reach `lows`
    list_ids: Tensor  # [rows, list room]
    counters: Tensor  # [rows], programs done
    scores: Tensor  # [rows, blocks], of the race
    places: Tensor  # [rows, blocks], first id of the group with that score


def make_scratch(rows: int, vocab: int, device: torch.device, list_room: int = LIST_ROOM) -> SamplingScratch:
    """Memory for draws of up to `rows` rows."""
    spans, blocks = triton.cdiv(vocab, SPAN.value), triton.cdiv(vocab, BLOCK.value)

    def floats(*shape: int) -> Tensor:
        return torch.empty((rows, *shape), dtype=torch.float32, device=device)

    def ints(*shape: int) -> Tensor:
        return torch.zeros((rows, *shape), dtype=torch.int32, device=device)

    return SamplingScratch(
        tops=floats(), totals=floats(), lows=floats(), is_open=ints(), bests=floats(spans), weights=floats(spans),
        spans=ints(spans), list_values=floats(list_room), list_ids=ints(list_room), counters=ints(),
        scores=floats(blocks), places=ints(blocks),
    )  # fmt: skip


# What several kernels call may name no constant: a kernel's key in Triton's cache would depend on which is used first.
@triton.jit
def rules_of(columns, slot, VOCAB: tl.constexpr):
    """A slot's k and p (VOCAB and 1: all; so if greedy), and by how much a logit may be less than the greatest."""
    is_greedy = tl.load(columns.is_greedy + slot) != 0
    k = tl.load(columns.top_k + slot).to(tl.int32)
    k = tl.where((k <= 0) | (k > VOCAB) | is_greedy, VOCAB, k)
    p = tl.where(is_greedy, 1.0, tl.load(columns.top_p + slot))
    # The numbers of the race lie between 2 ** -32 and 17, or are infinite; so an id whose scaled logit is 25.1 below
    # the greatest never wins, and ids further down than 32 need no place in the order.
    reach = tl.minimum(-tl.log(tl.maximum(tl.load(columns.min_p + slot), 1e-30)), 32.0)
    return k, p, tl.where(is_greedy, 0.0, reach)


@triton.jit
def row_logits(logits, at, VOCAB: tl.constexpr):
    """The logits of a row at `at`; -inf beyond the vocabulary."""
    return tl.load(logits + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32)


@triton.jit
def over_temperature(value, temperature):
    """Logits over the temperature, rounded as torch rounds."""
    return tl.div_rn(value, tl.zeros_like(value) + temperature) + 0.0  # -0.0 becomes 0.0: one key, one value


@triton.jit
def is_last_program(counter, programs):
    """Whether all other programs of the row have called this; what they stored before can then be read with .cg."""
    tl.debug_barrier()  # all of the program's stores stand before its one atomic
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def store_token(token, row, slot, out_ids, last_tokens):
    """Write a row's token; padding rows share a slot, whose last token nobody reads."""
    tl.store(out_ids + row, token.to(out_ids.dtype.element_ty))
    tl.store(last_tokens + slot, token.to(last_tokens.dtype.element_ty))
