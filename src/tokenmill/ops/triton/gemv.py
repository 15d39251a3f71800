"""Products of up to four rows with a weight matrix, with what stands around them in a decoder layer.

They take as long as the weights take to read. So a program requests its first weights before it waits for the kernel
that makes the rows, and always some more before it multiplies what has come.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.ops.triton.activation import gated
from tokenmill.ops.triton.launch import pdl_options
from tokenmill.spec import Activation

GEMV_ROWS = 4
VECTOR_BYTES = 16  # what a thread loads at once


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """How a product is computed.

    A program multiplies `block_n` rows of the weight, 32 * `num_warps` vectors of inputs at a time, with `ahead` such
    blocks requested. Its threads stand along the inputs, so that each loads its own part of x.
    """

    block_n: int
    num_warps: int
    ahead: int


def choose_gemv(rows: int, outputs: int, inputs: int, *, is_gated: bool = False) -> GemvConfig:
    """The fastest way found on an H200 for x [rows, inputs] @ weight [outputs, inputs] in bfloat16.

    A program that is small lets the next kernel become resident beside it. A gated product's `outputs` are those of
    the result: its weight has twice as many.
    """
    if inputs <= 1024:
        return GemvConfig(8 if rows == 1 or is_gated or outputs > 4096 else 4, 4, 1)
    if rows == 1 or inputs > 2 * outputs:
        return GemvConfig(4, 4, 4 if rows <= 2 else 3)
    if rows == 2:
        return GemvConfig(8, 4, 2)
    return GemvConfig(8, 2, 2) if outputs > inputs else GemvConfig(4, 4, 3)


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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    IS_EVEN: tl.constexpr,
    AHEAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATE: tl.constexpr,
    PDL: tl.constexpr,
):
    # A gated product's block has the gates' rows of the weight first, then those of the same outputs' ups.
    block_outputs: tl.constexpr = BLOCK_N // 2 if GATE is not None else BLOCK_N
    blocks: tl.constexpr = (INPUTS + BLOCK_K - 1) // BLOCK_K
    first = tl.program_id(0) * block_outputs
    place = tl.arange(0, BLOCK_N)[None, :, None]
    line = first + place % block_outputs + place // block_outputs * outputs  # [1, BLOCK_N, 1], of the weight
    is_line = first + place % block_outputs < outputs
    row = tl.arange(0, BLOCK_M)[:, None, None]
    sums = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K // VECTOR], tl.float32)
    squares = tl.zeros([BLOCK_M, 1, BLOCK_K // VECTOR], tl.float32)
    held = ()
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    for step in tl.static_range(blocks + AHEAD):
        if PDL and step == AHEAD:
            tl.extra.cuda.gdc_wait()
        if step < blocks:
            at = step * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
            pointers = weight + line.to(tl.int64) * INPUTS + at  # [1, BLOCK_N, BLOCK_K]
            if IS_EVEN:
                loaded = tl.load(pointers, eviction_policy="evict_first")
            else:
                loaded = tl.load(pointers, mask=is_line & (at < INPUTS), other=0.0)
            held = appended(held, loaded)
        if step >= AHEAD:
            at = (step - AHEAD) * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
            value = tl.load(x + row * INPUTS + at, mask=(at < INPUTS) & (row < ROWS), other=0.0).to(tl.float32)
            if HAS_NORM:
                squares += _vector_sums(value * value, VECTOR)
                value *= tl.load(norm_weight + at, mask=at < INPUTS, other=0.0).to(tl.float32)  # [BLOCK_M, 1, BLOCK_K]
            sums += _vector_sums(held[step - AHEAD].to(tl.float32) * value, VECTOR)
    result = tl.sum(sums, 2, keep_dims=True)  # [BLOCK_M, BLOCK_N, 1]
    if HAS_NORM:
        result *= tl.rsqrt(tl.sum(squares, 2, keep_dims=True) / INPUTS + eps)
    if HAS_BIAS:
        result += tl.load(bias + line, mask=is_line, other=0.0).to(tl.float32)
    if GATE is not None:
        gate, up = tl.split(tl.permute(tl.reshape(result, [BLOCK_M, 2, block_outputs]), [0, 2, 1]))
        result = gated(gate, up, GATE)
    result = tl.reshape(result, [BLOCK_M, block_outputs])
    m, n = tl.arange(0, BLOCK_M)[:, None], first + tl.arange(0, block_outputs)[None, :]
    is_result = (m < ROWS) & (n < outputs)
    if HAS_RESIDUAL:
        # `out` may be `residual`: the program that writes an element is the only one that reads it.
        result += tl.load(residual + m * outputs + n, mask=is_result, other=0.0).to(tl.float32)
    tl.store(out + m * outputs + n, result.to(out.dtype.element_ty), mask=is_result)


@triton.jit
def appended(values, value):
    """A tuple and one value more."""
    return values + (value,)  # noqa: RUF005  (no unpacking in kernels)


@triton.jit
def _vector_sums(values, VECTOR: tl.constexpr):
    """Sums over the inputs that one thread holds side by side: [m, n, k] to [m, n, k / VECTOR]."""
    shape: tl.constexpr = values.shape
    return tl.sum(tl.reshape(values, [shape[0], shape[1], shape[2] // VECTOR, VECTOR]), 3)


def gemv(
    x: Tensor,
    weight: Tensor,
    config: GemvConfig,
    *,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gate: Activation | None = None,
    pdl: bool = False,
) -> Tensor:
    """Multiply up to four rows by weight transposed, with what stands around that in a decoder layer.

    In order: x is normalised if there is a `norm_weight` [inputs]; the product; `bias` is added; with `gate`, an
    activation, the outputs are (gate, up) and the result activation(gate) * up; `residual` is added. All tensors are
    contiguous.

    Args:
        x: [rows, inputs], rows <= 4; not `out`.
        weight: [outputs, inputs], or [2 * outputs, inputs] if gated.
        config: from `choose_gemv`.
        out: [rows, outputs]; may be `residual`; made if None.
        bias: one for each row of the weight, added.
        norm_weight: [inputs].
        eps: added to the mean square.
        residual: [rows, outputs], added.
        gate: see above.
        pdl: see `launch`; weights are read early.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if gate else weight.shape[0]
    if rows > GEMV_ROWS:
        raise ValueError(f"gemv takes up to {GEMV_ROWS} rows, got {rows}")
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device) if out is None else out
    vector = VECTOR_BYTES // x.element_size()
    block_k = config.num_warps * 32 * vector
    block_outputs = config.block_n // 2 if gate else config.block_n
    if rows:
        _gemv_kernel[(triton.cdiv(outputs, block_outputs),)](
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
            BLOCK_M=triton.next_power_of_2(rows),
            BLOCK_N=config.block_n,
            BLOCK_K=block_k,
            VECTOR=vector,
            IS_EVEN=outputs % block_outputs == 0 and inputs % block_k == 0,
            AHEAD=min(triton.cdiv(inputs, block_k), config.ahead),
            HAS_BIAS=bias is not None,
            HAS_NORM=norm_weight is not None,
            HAS_RESIDUAL=residual is not None,
            GATE=gate,
            PDL=pdl,
            num_warps=config.num_warps,
            **pdl_options(pdl),
        )
    return out
