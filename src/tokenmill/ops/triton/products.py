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
from tokenmill.ops.triton.rows import is_last_program

MAX_ROWS = 256
MAX_PARTIALS = 1 << 21
MAX_TILES = 1024


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """How a product is computed: a program makes a tile of [block_m, block_n] results, block_k inputs at a time.

    The first `held` blocks of the weight are in registers or shared memory before the wait for the kernel before;
    `has_prefetch` brings the others into the L2 cache meanwhile. With `groups` > 1 each warp has its own part of a
    block of inputs. `split` programs share the inputs of a tile. `swap` makes the weight the first operand.
    `fuses_norm` tells whether to normalise as part of the product, which one that splits cannot.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 3
    held: int = 0
    groups: int = 1
    split: int = 1
    swap: bool = False
    fuses_norm: bool = True
    has_prefetch: bool = False


def choose_product(rows: int, outputs: int, inputs: int, *, is_gated: bool = False) -> ProductConfig | None:
    """The fastest way found on an H200 for x [rows, inputs] @ weight [outputs, inputs]; None is the library.

    A gated product's `outputs` are those of the result: its weight has twice as many.
    """
    if rows > MAX_ROWS or (rows > 16 and outputs * inputs > 1 << 23):
        return None
    if rows > 32:
        split = 4 if outputs < 2048 and inputs >= 2048 else 1
        return ProductConfig(64, 32 if split > 1 else 64, 128, 4, split=split, fuses_norm=split == 1 and rows <= 64)
    block_m = 8 if rows <= 8 else 16 if rows <= 16 else 32
    if outputs * inputs > 1 << 23:
        return ProductConfig(16, 64, 128, 4, num_stages=4, swap=True, fuses_norm=False)
    if inputs <= 1024:
        return ProductConfig(block_m, 32, 512, 8, held=2, groups=8, swap=True)
    return ProductConfig(block_m, 16, 1024, 8, held=min(triton.cdiv(inputs, 1024), 3), groups=8, swap=True)


class ProductScratch:
    """Partial sums of split products, and how many parts of each tile are done.

    One product at a time may use it: all products of one stream may share one. Counters are 0 between products.
    """

    def __init__(self, device: torch.device) -> None:
        self.partials = torch.empty(MAX_PARTIALS, dtype=torch.float32, device=device)
        self.counters = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x,
    weight,
    bias,
    norm_weight,
    residual,
    out,
    partials,
    counters,
    rows,
    outputs,
    eps,
    INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HELD: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLIT: tl.constexpr,
    SWAP: tl.constexpr,
    IS_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    STEPS: tl.constexpr = (INPUTS + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT)
    FIRST: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    SECOND: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    part = tl.program_id(2)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    line = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    is_line = line < (2 * outputs if IS_GATED else outputs)
    if IS_GATED:  # a row of the gate, then the row of up that goes with it
        line = line // 2 + line % 2 * outputs
    if GROUPS == 1:
        k = tl.arange(0, BLOCK_K)[None, :]
        at_m, at_line, is_line = m[:, None], line[:, None], is_line[:, None]
        total, squares = tl.zeros([FIRST, SECOND], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    else:
        k = (tl.arange(0, GROUPS) * (BLOCK_K // GROUPS))[:, None, None] + tl.arange(0, BLOCK_K // GROUPS)[None, None, :]
        at_m, at_line, is_line = m[None, :, None], line[None, :, None], is_line[None, :, None]
        total, squares = tl.zeros([GROUPS, FIRST, SECOND], tl.float32), tl.zeros([GROUPS, BLOCK_M], tl.float32)
    k += part * STEPS * BLOCK_K
    weights = weight + at_line.to(tl.int64) * INPUTS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    held, factors = (), ()
    for step in tl.static_range(HELD):
        at = k + step * BLOCK_K
        held = _with(held, _load(weights + at, is_line & (at < INPUTS), IS_EVEN))
        if HAS_NORM:
            factors = _with(factors, _load(norm_weight + at, at < INPUTS, IS_EVEN))
    if PREFETCH:
        _prefetch(weight + line.to(tl.int64) * INPUTS + (part * STEPS + HELD) * BLOCK_K, (STEPS - HELD) * BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
    values = ()
    for step in tl.static_range(HELD):
        values = _with(values, _rows(x, at_m, k + step * BLOCK_K, rows, INPUTS, IS_EVEN))
    for step in tl.static_range(HELD):
        factor = factors[step] if HAS_NORM else 0
        total, squares = _add(total, squares, values[step], held[step], factor, SWAP, HAS_NORM)
    if HELD < STEPS:  # an empty loop would be compiled too
        factor = 0
        if HAS_NORM:
            factor = _load(norm_weight + k + HELD * BLOCK_K, k + HELD * BLOCK_K < INPUTS, IS_EVEN)
        for step in range(HELD, STEPS):
            at = k + step * BLOCK_K
            w = _load(weights + at, is_line & (at < INPUTS), IS_EVEN)
            value = _rows(x, at_m, at, rows, INPUTS, IS_EVEN)
            total, squares = _add(total, squares, value, w, factor, SWAP, HAS_NORM)
            if HAS_NORM:  # for the next block: the compiler does not pipeline a load this small
                factor = tl.load(norm_weight + at + BLOCK_K, mask=at + BLOCK_K < INPUTS, other=0.0)
    if GROUPS > 1:
        total, squares = tl.sum(total, 0), tl.sum(squares, 0)
    if SWAP:
        total = tl.trans(total)
    if HAS_NORM:
        total *= tl.rsqrt(squares / INPUTS + eps)[:, None]
    if SPLIT == 1:
        _finish(total, bias, residual, out, m, rows, outputs, BLOCK_N, HAS_BIAS, HAS_RESIDUAL, IS_GATED)
    else:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        parts = partials + tile * SPLIT * BLOCK_M * BLOCK_N + inside
        tl.store(parts + part * BLOCK_M * BLOCK_N, total)
        if is_last_program(counters + tile, SPLIT):
            # The last part to arrive adds up all of them, in one order.
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for other in tl.static_range(SPLIT):
                total += tl.load(parts + other * BLOCK_M * BLOCK_N, cache_modifier=".cg")
            _finish(total, bias, residual, out, m, rows, outputs, BLOCK_N, HAS_BIAS, HAS_RESIDUAL, IS_GATED)


@triton.jit
def _with(values, value):
    return values + (value,)  # noqa: RUF005  (no unpacking in kernels)


@triton.jit
def _load(pointers, is_inside, IS_EVEN: tl.constexpr):
    if IS_EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=is_inside, other=0.0)


@triton.jit
def _rows(x, at_m, at, rows, INPUTS: tl.constexpr, IS_EVEN: tl.constexpr):
    is_inside = at_m < rows
    if not IS_EVEN:
        is_inside = is_inside & (at < INPUTS)
    return tl.load(x + at_m * INPUTS + at, mask=is_inside, other=0.0)


@triton.jit
def _prefetch(starts, COUNT: tl.constexpr):
    size = tl.full(starts.shape, COUNT * (starts.dtype.element_ty.primitive_bitwidth // 8), tl.int32)
    instruction: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(instruction, "=r,l,r", [starts.to(tl.int64), size], tl.int32, is_pure=False, pack=1)


@triton.jit
def _add(total, squares, value, w, factor, SWAP: tl.constexpr, HAS_NORM: tl.constexpr):
    if HAS_NORM:  # the division by the root mean square follows the product
        wide = value.to(tl.float32)
        squares += tl.sum(wide * wide, len(value.shape) - 1)
        value = (wide * factor.to(tl.float32)).to(value.dtype)
    first, second = value, w
    if SWAP:
        first, second = w, value
    if len(w.shape) == 2:
        second = tl.trans(second)
    else:
        second = tl.trans(second, 0, 2, 1)
    return tl.dot(first, second, total, input_precision="ieee"), squares


@triton.jit
def _finish(
    total,
    bias,
    residual,
    out,
    m,
    rows,
    outputs,
    BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    WIDTH: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)  # [WIDTH]
    if IS_GATED:
        gate, total = tl.split(tl.reshape(total, [total.shape[0], WIDTH, 2]))
        if HAS_BIAS:
            gate += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
            bias += outputs
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        total *= gate / (1.0 + tl.exp(tl.minimum(-gate, 80.0)))
    place = m[:, None] * outputs + n[None, :]  # [BLOCK_M, WIDTH]
    is_place = (m < rows)[:, None] & (n < outputs)[None, :]
    if HAS_RESIDUAL:
        # `out` may be `residual`: the program that writes an element is the only one that reads it.
        total += tl.load(residual + place, mask=is_place, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=is_place)


def product(
    x: Tensor,
    weight: Tensor,
    config: ProductConfig,
    scratch: ProductScratch,
    *,
    out: Tensor | None = None,
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
        x: [rows, inputs]; not `out`.
        weight: [outputs, inputs], or [2 * outputs, inputs] if gated.
        config: from `choose_product`; one that splits takes no norm.
        scratch: used if the config splits.
        out: [rows, outputs]; may be `residual`; made if None.
        bias: one for each row of the weight, added.
        norm_weight: [inputs].
        eps: added to the mean square.
        residual: [rows, outputs], added.
        is_gated: see above.
        pdl: see `launch`; weights are read early.
    """
    rows, inputs = x.shape
    lines = weight.shape[0]
    outputs = lines // 2 if is_gated else lines
    grid = (triton.cdiv(rows, config.block_m), triton.cdiv(lines, config.block_n), config.split)
    if config.split > 1:
        tiles = grid[0] * grid[1]
        partials = tiles * config.split * config.block_m * config.block_n
        if norm_weight is not None or tiles > MAX_TILES or partials > MAX_PARTIALS:
            raise ValueError(f"{config} cannot split a product of {rows} rows and {outputs} outputs")
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device) if out is None else out
    is_even = lines % config.block_n == 0 and inputs % (config.block_k * config.split) == 0
    if rows:
        _product_kernel[grid](
            x,
            weight,
            x if bias is None else bias,
            x if norm_weight is None else norm_weight,
            x if residual is None else residual,
            out,
            scratch.partials,
            scratch.counters,
            rows,
            outputs,
            eps,
            INPUTS=inputs,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            HELD=min(config.held, triton.cdiv(inputs, config.block_k * config.split)),
            GROUPS=config.groups,
            SPLIT=config.split,
            SWAP=config.swap,
            IS_EVEN=is_even,
            HAS_BIAS=bias is not None,
            HAS_NORM=norm_weight is not None,
            HAS_RESIDUAL=residual is not None,
            IS_GATED=is_gated,
            PREFETCH=config.has_prefetch and is_even and pdl,
            PDL=pdl,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **pdl_options(pdl),
        )
    return out
