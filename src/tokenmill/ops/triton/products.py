"""Products of 5 to 256 rows with a weight matrix on the matrix units, with what stands around them in a decoder layer.

Small products are bound by latency: so their weights, which no kernel writes, are read before the kernel that makes the
rows has ended, and normalisation, gate and residual are part of the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.ops.triton.activation import gated
from tokenmill.ops.triton.gemv import appended
from tokenmill.ops.triton.launch import pdl_options
from tokenmill.spec import Activation

MAX_ROWS = 256
PROCESSORS = 132  # of an H200


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """How a product is computed: a program makes a tile of [block_m, block_n] results, block_k inputs at a time.

    The first `held` blocks of the weight are in registers before the wait for the kernel before; if they are the whole
    weight, normalisation is part of the product. With `groups` > 1 each warp has its own part of a block of inputs.
    `swap` makes the weight the first operand. With `splits` > 1 a program takes that part of the inputs.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 3
    held: int = 0
    groups: int = 1
    swap: bool = False
    splits: int = 1

    def fuses_norm(self, inputs: int) -> bool:
        """Whether rows of so many inputs are normalised as part of the product."""
        return self.held * self.block_k >= inputs


def choose_product(rows: int, lines: int, inputs: int, *, is_gated: bool = False) -> ProductConfig | None:
    """The fastest way found on an H200 for x [rows, inputs] @ weight [lines, inputs] transposed; None is the library.

    A few rows and a small weight: the first blocks are held. Else the weight streams through shared memory, which pays
    where the programs keep most multiprocessors busy to the end, and for short rows, where latency decides.
    """
    is_small, is_short = lines * inputs <= 1 << 23, inputs <= 1024
    block_m = 8 if rows <= 8 else 16 if rows <= 16 else 32
    can_hold = is_small or lines <= 4096
    if rows > 8:
        can_hold = is_small and rows <= 16 and lines <= (4096 if is_short else 2048)
    if can_hold:
        if is_short:
            return ProductConfig(block_m, 32, 512, 4, held=2, groups=4, swap=True)
        held = 2 if rows > 8 else triton.cdiv(inputs, 1024) if inputs <= 3072 else 1
        return ProductConfig(block_m, 16, 1024, 8, held=held, groups=8, swap=rows <= 8)
    if rows <= 32:
        block_k, num_stages = (256, 3) if not is_short and lines <= 64 * PROCESSORS else (128, 4)
        config = ProductConfig(max(block_m, 16), 64, block_k, 4, num_stages, swap=True)
    elif rows <= 64 and is_small and is_short:
        config = ProductConfig(64, 64, 128, 4, num_stages=4, swap=True)
    elif rows <= 64:
        config = ProductConfig(64, 128, 64, 4, num_stages=5)
    elif rows <= 128 and is_small and is_short:
        with_gate, plain = (
            ProductConfig(64, 128, 64, 4, num_stages=5),
            ProductConfig(64, 64, 128, 4, num_stages=4, swap=True),
        )
        config = with_gate if is_gated else plain
    elif is_gated and rows <= 128:
        config = ProductConfig(128, 256, 64, 8)
    elif is_gated and rows <= MAX_ROWS and is_short:
        config = ProductConfig(128, 128, 64, 8, num_stages=4)
    elif rows <= MAX_ROWS and is_small and is_short:
        config = ProductConfig(64, 128, 64, 4, num_stages=5)
    else:
        return None
    programs = triton.cdiv(rows, config.block_m) * triton.cdiv(lines, config.block_n)
    keeps_busy = programs > 0.7 * PROCESSORS * triton.cdiv(programs, PROCESSORS)
    return config if keeps_busy or (rows <= 64 and is_small and is_short) else None


def choose_parts(rows: int, lines: int, inputs: int) -> ProductConfig | None:
    """The fastest way found on an H200 to compute a product in parts, to be added to the hidden state.

    x [rows, inputs] and weight [lines, inputs] are cut along the inputs, so that a product of few outputs keeps all
    multiprocessors busy and reads less; the normalisation that follows adds the parts in passing. None: a product in
    one, of `choose_product` or the library, is faster.
    """
    is_small, is_long = lines * inputs <= 1 << 22, inputs >= 3 * lines
    if rows <= (16 if is_small else 8) or rows > MAX_ROWS:
        return None
    if rows <= 32:
        config = ProductConfig(16 if is_small or rows <= 16 else 32, 64, 128, 4, num_stages=4, swap=True)
    elif is_small:
        config = ProductConfig(64, 64 if rows <= 128 else 128, 64, 4, num_stages=4)
    elif is_long and rows <= 64:
        config = ProductConfig(64, 64, 128, 4)
    else:
        return None
    programs = triton.cdiv(triton.next_power_of_2(rows), config.block_m) * triton.cdiv(lines, config.block_n)
    room = PROCESSORS if is_small or not is_long else 2 * PROCESSORS
    fitting = (splits for splits in (8, 4, 2) if programs * splits <= room and inputs % (splits * config.block_k) == 0)
    splits = next(fitting, 1)
    return replace(config, splits=splits) if splits > 1 and programs * splits > 0.7 * room else None


def choose_scores(rows: int, inputs: int) -> ProductConfig | None:
    """How few rows are multiplied with a router: in as many parts as keep multiprocessors busy; None is the library."""
    splits = next((splits for splits in (16, 8, 4, 2) if inputs % (splits * 128) == 0), 1)
    if rows > MAX_ROWS:
        return None
    return ProductConfig(min(64, max(8, triton.next_power_of_2(rows))), 64, 128, 4, swap=True, splits=splits)


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x,
    weight,
    bias,
    norm_weight,
    residual,
    out,
    rows,
    lines,
    eps,
    INPUTS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HELD: tl.constexpr,
    GROUPS: tl.constexpr,
    SWAP: tl.constexpr,
    IS_EVEN: tl.constexpr,
    GATE: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    line = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    if GATE is not None:  # a row of the gate, then the row of up that goes with it
        line = line // 2 + line % 2 * (lines // 2)
    FIRST: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    SECOND: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    if GROUPS == 1:
        k = tl.arange(0, BLOCK_K)[None, :]
        at_m, at_line = m[:, None], line[:, None]
        total, squares = tl.zeros([FIRST, SECOND], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    else:
        k = (tl.arange(0, GROUPS) * (BLOCK_K // GROUPS))[:, None, None] + tl.arange(0, BLOCK_K // GROUPS)[None, None, :]
        at_m, at_line = m[None, :, None], line[None, :, None]
        total, squares = tl.zeros([GROUPS, FIRST, SECOND], tl.float32), tl.zeros([GROUPS, BLOCK_M], tl.float32)
    part = tl.program_id(2)
    x += at_m * INPUTS + part * PART
    weight += at_line.to(tl.int64) * INPUTS + part * PART
    is_row, is_line = at_m < rows, at_line < lines
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    held, factors, values = (), (), ()
    for step in tl.static_range(HELD):
        held = appended(held, _load(weight, is_line, k + step * BLOCK_K, PART, IS_EVEN, IS_EVEN))
        if norm_weight is not None:
            factors = appended(factors, _load(norm_weight, k >= 0, k + step * BLOCK_K, PART, IS_EVEN, IS_EVEN))
    if PDL:
        tl.extra.cuda.gdc_wait()
    for step in tl.static_range(HELD):
        values = appended(values, _load(x, is_row, k + step * BLOCK_K, PART, IS_EVEN, False))
    for step in tl.static_range(HELD):
        factor = None if norm_weight is None else factors[step]
        total, squares = _add(total, squares, values[step], held[step], factor, SWAP)
    if HELD * BLOCK_K < PART:  # an empty loop would be compiled too
        for start in range(HELD * BLOCK_K, PART, BLOCK_K):
            w = _load(weight, is_line, start + k, PART, IS_EVEN, IS_EVEN)
            value = _load(x, is_row, start + k, PART, IS_EVEN, False)
            total, squares = _add(total, squares, value, w, None, SWAP)
    if GROUPS > 1:
        total, squares = tl.sum(total, 0), tl.sum(squares, 0)
    if SWAP:
        total = tl.trans(total)
    if norm_weight is not None:
        total *= tl.rsqrt(squares / INPUTS + eps)[:, None]
    if bias is not None:
        total += tl.load(bias + line, mask=line < lines, other=0.0).to(tl.float32)[None, :]
    if GATE is not None:
        gate, up = tl.split(tl.reshape(total, [total.shape[0], total.shape[1] // 2, 2]))
        total = gated(gate, up, GATE)
    WIDTH: tl.constexpr = total.shape[1]
    n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    outputs = lines // 2 if GATE is not None else lines
    place = (part.to(tl.int64) * rows + m[:, None]) * outputs + n  # [BLOCK_M, WIDTH]
    is_place = (m[:, None] < rows) & (n < outputs)
    if residual is not None:
        # `out` is `residual`: the program that writes an element is the only one that reads it.
        total += tl.load(residual + place, mask=is_place, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=is_place)


@triton.jit
def _load(lines, is_line, at, PART: tl.constexpr, IS_EVEN: tl.constexpr, IS_WHOLE: tl.constexpr):
    if IS_WHOLE:
        return tl.load(lines + at)
    return tl.load(lines + at, mask=is_line if IS_EVEN else is_line & (at < PART), other=0.0)


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


def product(
    x: Tensor,
    weight: Tensor,
    config: ProductConfig,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gate: Activation | None = None,
    pdl: bool = False,
) -> Tensor:
    """Multiply rows by weight transposed, with what stands around that in a decoder layer.

    In order: x is normalised if there is a `norm_weight` [inputs]; the product; `bias` is added; with `gate`, an
    activation, the outputs are (gate, up) and the result activation(gate) * up; `residual` is added. All tensors are
    contiguous.

    The arguments are those of `gemv`, but x has any number of rows, 16 bits an element; `config` is from
    `choose_product` and must fuse the norm if there is one; and the result is written over `residual`. From
    `choose_parts`, the result is [parts, rows, outputs] float32, to be summed, of the plain product only.
    """
    rows, inputs = x.shape
    lines, splits = weight.shape[0], config.splits
    if splits > 1 and (bias is not None or norm_weight is not None or residual is not None or gate):
        raise ValueError(f"{config}: nothing else can be done to the parts of a product")
    if norm_weight is not None and not config.fuses_norm(inputs):
        raise ValueError(f"{config} cannot normalise rows of {inputs}")
    if splits > 1:
        out = x.new_empty(splits, rows, lines, dtype=torch.float32)
    else:
        out = x.new_empty(rows, lines // 2 if gate else lines) if residual is None else residual
    part = inputs // splits
    _product_kernel[triton.cdiv(rows, config.block_m), triton.cdiv(lines, config.block_n), splits](
        x,
        weight,
        bias,
        norm_weight,
        residual,
        out,
        rows,
        lines,
        eps,
        INPUTS=inputs,
        PART=part,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        HELD=min(config.held, triton.cdiv(part, config.block_k)),
        GROUPS=config.groups,
        SWAP=config.swap,
        IS_EVEN=lines % config.block_n == 0 and part % config.block_k == 0,
        GATE=gate,
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **pdl_options(pdl),
    )
    return out
