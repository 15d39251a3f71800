"""Products of up to four rows with a weight matrix: a program holds some rows of the weight in registers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.ops.triton.launch import pdl_options

GEMV_ROWS = 4


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """How one product is computed."""

    block_n: int
    block_k: int
    num_warps: int


def choose(rows: int, outputs: int, inputs: int) -> LinearConfig:
    """The fastest way found on an H200 for x [rows, inputs] @ weight [outputs, inputs].

    A program has few rows of the weight so that the next kernel becomes resident beside it.
    """
    if rows == 1 and inputs <= 1024:
        return LinearConfig(16 if outputs >= 32768 else 8, 1024, num_warps=4)
    block_n = 8 if rows == 1 and outputs >= 32768 else 4 if rows <= 2 or inputs <= 4096 else 2
    return LinearConfig(block_n, 1024, num_warps=4)


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
        config: from `choose`.
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
