"""The numbers of `sampling.sampler.exponential`, made in registers.

Their logarithms are the hardware's, with errors of up to 1e-5, which grow for numbers over 7, one in a thousand: what
is left of 1 has few bits there.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.cuda.libdevice as libdevice

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def row_key(seed, position):
    """SplitMix64's output function of seed and position, both int64: the two halves of the result as uint32."""
    state = _mix64(seed.to(tl.uint64) * 0xBF58476D1CE4E5B9 + 0x9E3779B97F4A7C15)
    state = _mix64(state + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    return state.to(tl.uint32), (state >> 32).to(tl.uint32)


@triton.jit
def log2_exponential(low, high, ids, IS_INTERPRETED: tl.constexpr):
    """log2(LOG2E * number) of an exponentially distributed number for each of the ids, int32.

    (low, high) is the row's key.
    """
    state = low + ids.to(tl.uint32) * 0x9E3779B1
    state = _mix32(_mix32(state) ^ high)
    part = (state & 0x7FFFFFFF).to(tl.int32).to(tl.float32) * 2.0**-31 + 2.0**-32
    # Near 1 the logarithm's error would be greater than its value: a polynomial, made for parts up to 1 / 16.
    near = part * (1.442698041 + part * (0.7204905027 + part * 0.5167807607))
    # The factor leaves something where rounding made 1 of the part: an endless time would win nothing.
    far = -_log2(1.0 - part * (1 - 2.0**-24), IS_INTERPRETED)
    return _log2(tl.where(part < 0.0625, near, far), IS_INTERPRETED)


@triton.jit
def _log2(value, IS_INTERPRETED: tl.constexpr):
    if IS_INTERPRETED:
        return tl.log2(value)
    return libdevice.fast_log2f(value)


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
