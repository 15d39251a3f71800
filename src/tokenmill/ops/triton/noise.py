"""The numbers of `sampling.sampler.exponential`, made in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_key(seed, position):
    """SplitMix64's output function of seed and position, both int64: the two halves of the result as uint32."""
    state = _mix64(seed.to(tl.uint64) * 0xBF58476D1CE4E5B9 + 0x9E3779B97F4A7C15)
    state = _mix64(state + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    return state.to(tl.uint32), (state >> 32).to(tl.uint32)


@triton.jit
def exponential(low, high, ids):
    """An exponentially distributed number over 0 for each of ids, int32, of the row whose key is (low, high)."""
    state = _mix32(_mix32(ids.to(tl.uint32) * 0x9E3779B1 + low) ^ high)
    part = ((state & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2 ** -31
    rest = 1.0 - part
    # Kahan's log1p: what `rest` loses to rounding is given back by the quotient.
    return tl.where(rest == 1.0, part, -tl.log(tl.maximum(rest, 1e-30)) * tl.div_rn(part, 1.0 - rest))


@triton.jit
def _mix64(value):
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _mix32(value):
    value = (value ^ (value >> 16)) * 0x85EBCA6B
    value = (value ^ (value >> 13)) * 0xC2B2AE35
    return value ^ (value >> 16)
