"""Products of few rows with a weight matrix, where the library falls short of the memory's speed.

Up to four rows, a program holds some rows of the weight in registers and multiplies by hand; up to sixty-four, it loops
over the inner dimension with the matrix units. Beyond, the library is as fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.ops.triton.launch import pdl_options, start_and_wait

GEMV_ROWS = 4
DOT_ROWS = 64
MAX_SPLIT = 4
SPLIT_OUTPUTS = 2048  # products with fewer outputs fill the device only if split
COUNTERS = 256


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """How one product is computed. `swap` makes the weight the first operand, for few rows."""

    kind: Literal["gemv", "dot"]
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1
    swap: bool = False
    split: int = 1


def choose(rows: int, outputs: int, inputs: int) -> LinearConfig | None:
    """The fastest way found on an H200 for x [rows, inputs] @ weight [outputs, inputs]; None is the library.

    A gemv's CTA has few rows so that the next kernel becomes resident beside it.
    """
    if rows <= GEMV_ROWS:
        if rows == 1 and inputs <= 1024:
            return LinearConfig("gemv", 16 if outputs >= 32768 else 8, 1024, num_warps=4)
        block_n = 8 if rows == 1 and outputs >= 32768 else 4 if rows <= 2 or inputs <= 4096 else 2
        return LinearConfig("gemv", block_n, 1024, num_warps=4)
    if rows > DOT_ROWS or (rows > 16 and outputs >= 16384 and inputs > 2048):
        return None
    split = MAX_SPLIT if outputs < SPLIT_OUTPUTS and inputs >= 2048 else 1
    if rows <= 16:
        if split > 1 and inputs > 2048:
            return LinearConfig("dot", 32, 128, num_warps=4, num_stages=4, split=split)
        return LinearConfig("dot", 64, 128, num_warps=4, num_stages=4, swap=True, split=split)
    if outputs >= 6144:
        return LinearConfig("dot", 64, 128, num_warps=4, num_stages=4, swap=True)
    return LinearConfig("dot", 32, 128, num_warps=4, num_stages=4, split=split)


class LinearScratch:
    """Partial sums of split products, and how many parts of a block of outputs are done.

    One product at a time may use it: all products of one stream may share one. Counters are 0 between products.
    """

    def __init__(self, device: torch.device) -> None:
        self.partials = torch.empty(MAX_SPLIT * DOT_ROWS * SPLIT_OUTPUTS, dtype=torch.float32, device=device)
        self.counters = torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def _gemv_kernel(
    x,
    weight,
    bias,
    norm_weight,
    residual,
    out,
    outputs,
    eps,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    HELD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    k = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    up_weight = weight + outputs * INPUTS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    held, held_up = (), ()
    for chunk in tl.static_range(HELD):
        at = chunk * BLOCK_K + k
        held = _with(held, _weights(weight, n, at, outputs, INPUTS, IS_EVEN))
        if IS_GATED:
            held_up = _with(held_up, _weights(up_weight, n, at, outputs, INPUTS, IS_EVEN))
    if PDL:
        tl.extra.cuda.gdc_wait()
    sums, sums_up, squares = (), (), ()
    for _ in tl.static_range(ROWS):
        sums = _with(sums, tl.zeros([BLOCK_N, BLOCK_K], tl.float32))
        sums_up = _with(sums_up, tl.zeros([BLOCK_N, BLOCK_K], tl.float32))
        squares = _with(squares, tl.zeros([BLOCK_K], tl.float32))
    for chunk in tl.static_range(HELD):
        at = chunk * BLOCK_K + k
        for row in tl.static_range(ROWS):
            value, square = _inputs(x + row * INPUTS, norm_weight, at, INPUTS, HAS_NORM)
            squares = _replaced(squares, row, squares[row] + square)
            sums = _replaced(sums, row, sums[row] + held[chunk].to(tl.float32) * value[None, :])
            if IS_GATED:
                sums_up = _replaced(sums_up, row, sums_up[row] + held_up[chunk].to(tl.float32) * value[None, :])
    if HELD * BLOCK_K < INPUTS:  # an empty loop would be compiled too
        for start in range(HELD * BLOCK_K, INPUTS, BLOCK_K):
            at = start + k
            w = _weights(weight, n, at, outputs, INPUTS, IS_EVEN).to(tl.float32)
            if IS_GATED:
                w_up = _weights(up_weight, n, at, outputs, INPUTS, IS_EVEN).to(tl.float32)
            for row in tl.static_range(ROWS):
                value, square = _inputs(x + row * INPUTS, norm_weight, at, INPUTS, HAS_NORM)
                squares = _replaced(squares, row, squares[row] + square)
                sums = _replaced(sums, row, sums[row] + w * value[None, :])
                if IS_GATED:
                    sums_up = _replaced(sums_up, row, sums_up[row] + w_up * value[None, :])
    for row in tl.static_range(ROWS):
        result = tl.sum(sums[row], 1)  # [BLOCK_N]
        scale = 1.0
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(squares[row], 0) / INPUTS + eps)
            result *= scale
        if HAS_BIAS:
            result += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
        if IS_GATED:
            result = result / (1.0 + tl.exp(tl.minimum(-result, 80.0))) * (tl.sum(sums_up[row], 1) * scale)
        if HAS_RESIDUAL:
            # `out` may be `residual`: the program that writes an element is the only one that reads it.
            result += tl.load(residual + row * outputs + n, mask=n < outputs, other=0.0).to(tl.float32)
        tl.store(out + row * outputs + n, result.to(out.dtype.element_ty), mask=n < outputs)


@triton.jit
def _with(values, value):
    return values + (value,)  # noqa: RUF005  (no unpacking in kernels)


@triton.jit
def _replaced(values, place: tl.constexpr, value):
    return values[:place] + (value,) + values[place + 1 :]  # noqa: RUF005


@triton.jit
def _weights(weight, n, at, outputs, INPUTS: tl.constexpr, IS_EVEN: tl.constexpr):
    pointers = weight + n.to(tl.int64)[:, None] * INPUTS + at[None, :]  # [BLOCK_N, BLOCK_K]
    if IS_EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=(n < outputs)[:, None] & (at < INPUTS)[None, :], other=0.0)


@triton.jit
def _inputs(x, norm_weight, at, INPUTS: tl.constexpr, HAS_NORM: tl.constexpr):
    is_input = at < INPUTS
    value = tl.load(x + at, mask=is_input, other=0.0).to(tl.float32)  # [BLOCK_K]
    square = value * value
    if HAS_NORM:
        value *= tl.load(norm_weight + at, mask=is_input, other=0.0).to(tl.float32)
    return value, square


@triton.jit(do_not_specialize=["rows"])
def _dot_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    partials,
    counters,
    rows,
    outputs,
    INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    steps: tl.constexpr = (INPUTS + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT)
    k = part * steps * BLOCK_K + tl.arange(0, BLOCK_K)  # [BLOCK_K]
    is_even_k: tl.constexpr = INPUTS % (BLOCK_K * SPLIT) == 0
    start_and_wait(PDL)
    weights = weight + n.to(tl.int64)[:, None] * INPUTS
    if SWAP:
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(steps):
        if is_even_k and EVEN_N:
            w = tl.load(weights + k[None, :])  # [BLOCK_N, BLOCK_K]
        else:
            w = tl.load(weights + k[None, :], mask=(n < outputs)[:, None] & (k < INPUTS)[None, :], other=0.0)
        is_loaded = (m < rows)[:, None]
        if not is_even_k:
            is_loaded = is_loaded & (k < INPUTS)[None, :]
        value = tl.load(x + m[:, None] * INPUTS + k[None, :], mask=is_loaded, other=0.0)  # [BLOCK_M, BLOCK_K]
        if SWAP:
            total = tl.dot(w, tl.trans(value), total, input_precision="ieee")
        else:
            total = tl.dot(value, tl.trans(w), total, input_precision="ieee")
        k += BLOCK_K
    if SWAP:
        total = tl.trans(total)
    place = m[:, None] * outputs + n[None, :]  # [BLOCK_M, BLOCK_N]
    is_place = (m < rows)[:, None] & (n < outputs)[None, :]
    if SPLIT == 1:
        _finish(total, bias, residual, out, n, place, is_place, outputs, HAS_BIAS, HAS_RESIDUAL)
    else:
        tl.store(partials + part * rows * outputs + place, total, mask=is_place)
        tl.debug_barrier()  # all of the program's stores stand before its one atomic
        done = tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel")
        if done == SPLIT - 1:
            # The last part to arrive adds up all of them, in one order, and leaves the counter as it was found.
            tl.store(counters + tl.program_id(0), 0)
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for other in tl.static_range(SPLIT):
                pointers = partials + other * rows * outputs + place
                total += tl.load(pointers, mask=is_place, other=0.0, cache_modifier=".cg")
            _finish(total, bias, residual, out, n, place, is_place, outputs, HAS_BIAS, HAS_RESIDUAL)


@triton.jit
def _finish(
    total, bias, residual, out, n, place, is_place, outputs, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr
):
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        total += tl.load(residual + place, mask=is_place, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=is_place)


def gemv(
    x: Tensor,
    weight: Tensor,
    config: LinearConfig,
    *,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    is_gated: bool = False,
    pdl: bool = False,
) -> Tensor:
    """Multiply up to four rows by weight transposed, with what stands around that in a decoder layer.

    In order: x is normalised if there is a `norm_weight` [inputs]; the product; `bias` [outputs] is added; if
    `is_gated`, the weight is [2 * outputs, inputs] = (gate, up) and the result silu(gate) * up, without bias;
    `residual` [rows, outputs] is added. All tensors are contiguous.

    Args:
        x: [rows, inputs], rows <= 4; not `out`.
        weight: [outputs, inputs].
        config: from `choose`, of kind gemv.
        out: [rows, outputs]; may be `residual`; made if None.
        bias, norm_weight, eps, residual, is_gated: see above.
        pdl: see `launch`; weights are read early.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if is_gated else weight.shape[0]
    if rows > GEMV_ROWS or (is_gated and bias is not None):
        raise ValueError(f"gemv takes up to {GEMV_ROWS} rows, and no bias if gated; got {rows} rows")
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device) if out is None else out
    block_k = min(config.block_k, triton.next_power_of_2(inputs))
    tile = config.block_n * block_k * (2 if is_gated else 1)
    if rows:
        _gemv_kernel[(triton.cdiv(outputs, config.block_n),)](
            x,
            weight,
            x if bias is None else bias,
            x if norm_weight is None else norm_weight,
            x if residual is None else residual,
            out,
            outputs,
            eps,
            ROWS=rows,
            INPUTS=inputs,
            BLOCK_N=config.block_n,
            BLOCK_K=block_k,
            IS_EVEN=outputs % config.block_n == 0 and inputs % block_k == 0,
            HELD=min(triton.cdiv(inputs, block_k), max(16384 // tile, 1)),
            HAS_BIAS=bias is not None,
            HAS_NORM=norm_weight is not None,
            HAS_RESIDUAL=residual is not None,
            IS_GATED=is_gated,
            PDL=pdl,
            num_warps=config.num_warps,
            **pdl_options(pdl),
        )
    return out


def dot(
    x: Tensor,
    weight: Tensor,
    config: LinearConfig,
    scratch: LinearScratch,
    *,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Multiply up to sixty-four rows by weight transposed, and add bias and residual. All tensors are contiguous.

    Args:
        x: [rows, inputs], rows <= 64; not `out`.
        weight: [outputs, inputs].
        config: from `choose`, of kind dot.
        scratch: used if the config splits.
        out: [rows, outputs]; may be `residual`; made if None.
        bias: [outputs], added.
        residual: [rows, outputs], added.
        pdl: see `launch`.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0]
    blocks = triton.cdiv(outputs, config.block_n)
    if rows > DOT_ROWS:
        raise ValueError(f"dot takes up to {DOT_ROWS} rows, got {rows}")
    if config.split > 1 and (blocks > COUNTERS or config.split * rows * outputs > scratch.partials.numel()):
        raise ValueError(f"{outputs} outputs are too many to split a product {config.split} times")
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device) if out is None else out
    if rows:
        _dot_kernel[(blocks, config.split)](
            x,
            weight,
            x if bias is None else bias,
            x if residual is None else residual,
            out,
            scratch.partials,
            scratch.counters,
            rows,
            outputs,
            INPUTS=inputs,
            BLOCK_M=max(16, triton.next_power_of_2(rows)),
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            SPLIT=config.split,
            SWAP=config.swap,
            EVEN_N=outputs % config.block_n == 0,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            PDL=pdl,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **pdl_options(pdl),
        )
    return out
