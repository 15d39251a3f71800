"""Products of 5 to 256 rows with a weight matrix on the matrix units, with what stands around them in a decoder layer.

Small products are bound by latency: so their weights, which no kernel writes, are read before the kernel that makes the
rows has ended, and normalisation, gate and residual are part of the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.ops.triton.launch import pdl_options

MAX_ROWS = 256
PROCESSORS = 132  # of an H200


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """How a product is computed: a program makes a tile of [block_m, block_n] results, block_k inputs at a time.

    The first `held` blocks of the weight are in registers before the wait for the kernel before; if they are the whole
    weight, normalisation is part of the product. With `groups` > 1 each warp has its own part of a block of inputs.
    `swap` makes the weight the first operand.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 3
    held: int = 0
    groups: int = 1
    swap: bool = False

    def fuses_norm(self, inputs: int) -> bool:
        """Whether rows of so many inputs are normalised as part of the product."""
        return self.held * self.block_k >= inputs


def choose_product(rows: int, lines: int, inputs: int, *, is_gated: bool = False) -> ProductConfig | None:
    """The fastest way found on an H200 for x [rows, inputs] @ weight [lines, inputs] transposed; None is the library.

    Few rows and a short weight: all that fits is read ahead. Else the weight streams through shared memory, which pays
    if the programs keep most multiprocessors at work to the end, or if the library takes a norm and a gate as long.
    """
    is_small = lines * inputs <= 1 << 23
    is_short = inputs <= 1024
    if rows <= 8 and (is_small or lines <= 4096):
        if is_short:
            return ProductConfig(8, 32, 512, 4, held=2, groups=4, swap=True)
        held = triton.cdiv(inputs, 1024)
        return ProductConfig(8, 16, 1024, 8, held=held if held <= 3 else 1, groups=8, swap=True)
    if rows <= 16 and is_small and lines <= (4096 if is_short else 2048):
        if is_short:
            return ProductConfig(16, 32, 512, 4, held=2, groups=4, swap=True)
        return ProductConfig(16, 16, 1024, 8, held=2, groups=8)
    if rows <= 32:
        is_one_wave = not is_short and lines <= 64 * PROCESSORS
        block_k, num_stages = (256, 3) if is_one_wave else (128, 4)
        config = ProductConfig(16 if rows <= 16 else 32, 64, block_k, 4, num_stages, swap=True)
    elif rows <= 64 and is_small and is_short:
        config = ProductConfig(64, 64, 128, 4, num_stages=4, swap=True)
    elif rows <= 64:
        config = ProductConfig(64, 128, 64, 4, num_stages=5)
    elif is_gated and rows <= 128:
        config = ProductConfig(128, 256, 64, 8)
    elif is_gated and rows <= MAX_ROWS and is_short:
        config = ProductConfig(128, 128, 64, 8, num_stages=4)
    else:
        return None
    programs = triton.cdiv(rows, config.block_m) * triton.cdiv(lines, config.block_n)
    keeps_busy = programs > 0.7 * PROCESSORS * triton.cdiv(programs, PROCESSORS)
    return config if keeps_busy or (rows <= 64 and is_small and is_short) else None


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x,
    weight,
    bias,
    norm_weight,
    residual,
    out,
    rows,
    outputs,
    eps,
    INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HELD: tl.constexpr,
    GROUPS: tl.constexpr,
    SWAP: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    line = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    is_line = line < (2 * outputs if IS_GATED else outputs)
    if IS_GATED:  # a row of the gate, then the row of up that goes with it
        line = line // 2 + line % 2 * outputs
    FIRST: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    SECOND: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    if GROUPS == 1:
        k = tl.arange(0, BLOCK_K)[None, :]
        at_m, at_line, is_line = m[:, None], line[:, None], is_line[:, None]
        total, squares = tl.zeros([FIRST, SECOND], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    else:
        k = (tl.arange(0, GROUPS) * (BLOCK_K // GROUPS))[:, None, None] + tl.arange(0, BLOCK_K // GROUPS)[None, None, :]
        at_m, at_line, is_line = m[None, :, None], line[None, :, None], is_line[None, :, None]
        total, squares = tl.zeros([GROUPS, FIRST, SECOND], tl.float32), tl.zeros([GROUPS, BLOCK_M], tl.float32)
    x += at_m * INPUTS
    weight += at_line.to(tl.int64) * INPUTS
    is_row = at_m < rows
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    held, factors, values = (), (), ()
    for step in tl.static_range(HELD):
        held = _with(held, _load(weight, is_line, k + step * BLOCK_K, INPUTS, IS_EVEN, IS_EVEN))
        if norm_weight is not None:
            factors = _with(factors, _load(norm_weight, k >= 0, k + step * BLOCK_K, INPUTS, IS_EVEN, IS_EVEN))
    if PDL:
        tl.extra.cuda.gdc_wait()
    for step in tl.static_range(HELD):
        values = _with(values, _load(x, is_row, k + step * BLOCK_K, INPUTS, IS_EVEN, False))
    for step in tl.static_range(HELD):
        factor = None if norm_weight is None else factors[step]
        total, squares = _add(total, squares, values[step], held[step], factor, SWAP)
    if HELD * BLOCK_K < INPUTS:  # an empty loop would be compiled too
        for start in range(HELD * BLOCK_K, INPUTS, BLOCK_K):
            w = _load(weight, is_line, start + k, INPUTS, IS_EVEN, IS_EVEN)
            value = _load(x, is_row, start + k, INPUTS, IS_EVEN, False)
            total, squares = _add(total, squares, value, w, None, SWAP)
    if GROUPS > 1:
        total, squares = tl.sum(total, 0), tl.sum(squares, 0)
    if SWAP:
        total = tl.trans(total)
    if norm_weight is not None:
        total *= tl.rsqrt(squares / INPUTS + eps)[:, None]
    _finish(total, bias, residual, out, m, rows, outputs, BLOCK_N, IS_GATED)


@triton.jit
def _with(values, value):
    return values + (value,)  # noqa: RUF005  (no unpacking in kernels)


@triton.jit
def _load(lines, is_line, at, INPUTS: tl.constexpr, IS_EVEN: tl.constexpr, IS_WHOLE: tl.constexpr):
    if IS_WHOLE:
        return tl.load(lines + at)
    return tl.load(lines + at, mask=is_line if IS_EVEN else is_line & (at < INPUTS), other=0.0)


@triton.jit
def _add(total, squares, value, w, factor, SWAP: tl.constexpr):
    if factor is not None:  # the division by the root mean square follows the product
        wide = value.to(tl.float32)
        squares += tl.sum(wide * wide, len(value.shape) - 1)
        value = (wide * factor.to(tl.float32)).to(value.dtype)
    first, second = value, w
    if SWAP:
        first, second = w, value
    second = tl.trans(second) if len(w.shape) == 2 else tl.trans(second, 0, 2, 1)
    return tl.dot(first, second, total), squares


@triton.jit
def _finish(total, bias, residual, out, m, rows, outputs, BLOCK_N: tl.constexpr, IS_GATED: tl.constexpr):
    WIDTH: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)  # [WIDTH]
    if IS_GATED:
        gate, total = tl.split(tl.reshape(total, [total.shape[0], WIDTH, 2]))
        if bias is not None:
            gate += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
            bias += outputs
    if bias is not None:
        total += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        total *= gate / (1.0 + tl.exp(tl.minimum(-gate, 80.0)))
    place = m[:, None] * outputs + n[None, :]  # [BLOCK_M, WIDTH]
    is_place = (m < rows)[:, None] & (n < outputs)[None, :]
    if residual is not None:
        # `out` is `residual`: the program that writes an element is the only one that reads it.
        total += tl.load(residual + place, mask=is_place, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=is_place)


def product(
    x: Tensor,
    weight: Tensor,
    config: ProductConfig,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    is_gated: bool = False,
    pdl: bool = False,
) -> Tensor:
    """Multiply rows by weight transposed, with what stands around that in a decoder layer.

    In order: x is normalised if there is a `norm_weight` [inputs]; the product; `bias` is added; if `is_gated`, the
    outputs are (gate, up) and the result silu(gate) * up; `residual` is added. All tensors are contiguous.

    Args:
        x: [rows, inputs], 16 bits wide.
        weight: [outputs, inputs], or [2 * outputs, inputs] if gated.
        config: from `choose_product`.
        bias: one for each row of the weight, added.
        norm_weight: [inputs], or None; None if the config does not fuse the norm.
        eps: added to the mean square.
        residual: [rows, outputs], added; the result is written over it.
        is_gated: see above.
        pdl: see `launch`; weights are read early.
    """
    rows, inputs = x.shape
    lines = weight.shape[0]
    outputs = lines // 2 if is_gated else lines
    if norm_weight is not None and not config.fuses_norm(inputs):
        raise ValueError(f"{config} cannot normalise rows of {inputs}")
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device) if residual is None else residual
    _product_kernel[triton.cdiv(rows, config.block_m), triton.cdiv(lines, config.block_n)](
        x,
        weight,
        bias,
        norm_weight,
        residual,
        out,
        rows,
        outputs,
        eps,
        INPUTS=inputs,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        HELD=min(config.held, triton.cdiv(inputs, config.block_k)),
        GROUPS=config.groups,
        SWAP=config.swap,
        IS_EVEN=lines % config.block_n == 0 and inputs % config.block_k == 0,
        IS_GATED=is_gated,
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **pdl_options(pdl),
    )
    return out
