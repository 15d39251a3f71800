"""What the sampling kernels share: blocks of a row, and a row's state between kernels."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 2048  # ids a program

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


@triton.jit
def scaled_logits(logits, at, VOCAB: tl.constexpr, temperature):
    """The logits of a row at `at` over the temperature, rounded as torch rounds; -inf beyond the vocabulary."""
    value = tl.load(logits + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.div_rn(value, tl.zeros_like(value) + temperature) + 0.0  # -0.0 becomes 0.0: one key, one value


@triton.jit
def is_last_program(counter, programs):
    """Whether all other programs of the row have called this; what they stored before can then be read with .cg."""
    tl.debug_barrier()  # all of the program's stores stand before its one atomic
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1
    if is_last:
        tl.store(counter, 0)
    return is_last
