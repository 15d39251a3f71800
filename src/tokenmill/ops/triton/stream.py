"""Products of 17 to 256 rows with a large weight, which streams through shared memory by the copy engine of sm_90.

What no library's product does: its first blocks of the weight are on their way before the kernel that makes the rows
has ended, also while a normalisation runs in between. And a tile has all rows, if their sums fit into registers, so
that a weight is read into multiprocessors once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenmill.ops.triton.activation import gated
from tokenmill.ops.triton.gemv import appended
from tokenmill.ops.triton.launch import pdl_options
from tokenmill.spec import Activation

PIECES = (256, 128, 64, 32, 16)  # of a tile's rows
MAX_PIECES = 3


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """How a product is computed: a program makes a tile of [rows, lines] results, block_k inputs at a time.

    `rows` is a sum of up to three of `PIECES`; `lines`, of the weight, are 64, 128 or 256, half of the gate and half of
    up if there is a gate. Of the weight and of x that many blocks, two or more, are there or on their way. With
    `splits` the result is float32 parts, each of that part of the inputs.
    """

    rows: int
    lines: int
    num_warps: int
    stages: int
    x_stages: int
    block_k: int = 64
    splits: int = 0


def pieces_of(rows: int) -> tuple[int, ...]:
    """The pieces, one of a size, whose sum is so many rows."""
    return tuple(piece for piece in PIECES if rows & piece)


@gluon.constexpr_function
def _accumulator(lines, piece, num_warps):
    down = min(num_warps, lines // 16)
    return gl.NVMMADistributedLayout([3, 0], [down, num_warps // down], [16, piece // (num_warps // down), 16])


@gluon.constexpr_function
def _along_lines(lines, num_warps):
    threads = min(lines // 8, 32)
    return gl.BlockedLayout([8, 1], [threads, 32 // threads], [1, num_warps], [0, 1])


@gluon.jit
def _zeros(LINES: gl.constexpr, PIECE: gl.constexpr, NUM_WARPS: gl.constexpr):
    LAYOUT: gl.constexpr = _accumulator(LINES, PIECE, NUM_WARPS)
    return gl.full([LINES, PIECE], 0.0, gl.float32, LAYOUT)


@gluon.jit
def _room(sources, STAGES: gl.constexpr):
    """A place for so many blocks of each source, and a barrier for each stage."""
    buffers = ()
    BLOCK_K: gl.constexpr = sources[0].block_shape[1]
    for i in gl.static_range(len(sources)):
        block = gl.allocate_shared_memory(
            sources[i].dtype, [STAGES, sources[i].block_shape[0], BLOCK_K], sources[i].layout
        )
        buffers = appended(buffers, block)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    return buffers, ready


@gluon.jit
def _request(sources, buffers, ready, step, places, block, is_wanted, STAGES: gl.constexpr, HEIGHT: gl.constexpr):
    """Have a block copied from each source, of `HEIGHT` lines in all, over the block that was there."""
    BLOCK_K: gl.constexpr = sources[0].block_shape[1]
    stage = step % STAGES
    mbarrier.expect(ready.index(stage), HEIGHT * BLOCK_K * 2, pred=is_wanted)
    for i in gl.static_range(len(sources)):
        at = [places[i], block * BLOCK_K]
        tma.async_copy_global_to_shared(sources[i], at, ready.index(stage), buffers[i].index(stage), pred=is_wanted)


@gluon.jit
def _wait(MOST: gl.constexpr, sums):
    found = warpgroup_mma_wait(MOST, deps=sums)
    if len(sums) == 1:
        found = (found,)
    return found


@gluon.jit(do_not_specialize=["rows", "blocks", "each"])
def _stream_kernel(
    x, x_more, x_most, weight, bias, out, rows, lines, blocks, each,
    ROWS: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr, GATE: gl.constexpr, PDL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    BOX: gl.constexpr = weight.block_shape[0]
    PARTS: gl.constexpr = 1 if GATE is None else 2
    row, line, outputs = gl.program_id(0) * ROWS, gl.program_id(1) * BOX, lines // PARTS
    values, weights, places = (x,), (weight,), (line,)
    if x_more is not None:
        values = appended(values, x_more)
    if x_most is not None:
        values = appended(values, x_most)
    if PARTS == 2:
        weights, places = appended(weights, weight), appended(places, line + outputs)
    x_places, sums = (), ()
    for i in gl.static_range(len(values)):
        x_places = appended(x_places, row)
        row += values[i].block_shape[0]
        for _ in gl.static_range(PARTS):
            sums = appended(sums, _zeros(BOX, values[i].block_shape[0], num_warps))
    DOTS: gl.constexpr = len(sums)
    split = gl.program_id(2)
    first = split * each
    steps = gl.minimum(each, blocks - first)
    if PDL:
        gdc_launch_dependents()
    w_room, w_ready = _room(weights, STAGES)
    x_room, x_ready = _room(values, X_STAGES)
    for step in gl.static_range(STAGES):
        _request(weights, w_room, w_ready, step, places, first + step, step < steps, STAGES, PARTS * BOX)
    if PDL:
        gdc_wait()
    for step in gl.static_range(X_STAGES):
        _request(values, x_room, x_ready, step, x_places, first + step, step < steps, X_STAGES, ROWS)
    for step in range(steps):
        mbarrier.wait(w_ready.index(step % STAGES), step // STAGES & 1)
        mbarrier.wait(x_ready.index(step % X_STAGES), step // X_STAGES & 1)
        begun = ()
        for dot in gl.static_range(DOTS):
            value = x_room[dot // PARTS].index(step % X_STAGES).permute([1, 0])
            w = w_room[dot % PARTS].index(step % STAGES)
            begun = appended(begun, warpgroup_mma(w, value, sums[dot], is_async=True))
        sums = _wait(DOTS, begun)  # the step before is done: what it read may be overwritten
        ahead = step + STAGES - 1
        is_wanted = (step > 0) & (ahead < steps)
        _request(weights, w_room, w_ready, ahead, places, first + ahead, is_wanted, STAGES, PARTS * BOX)
        ahead = step + X_STAGES - 1
        is_wanted = (step > 0) & (ahead < steps)
        _request(values, x_room, x_ready, ahead, x_places, first + ahead, is_wanted, X_STAGES, ROWS)
    sums = _wait(0, sums)
    LAYOUT: gl.constexpr = _along_lines(BOX, num_warps)
    at_line = line + gl.arange(0, BOX, gl.SliceLayout(1, LAYOUT))[:, None]  # [BOX, 1]
    for i in gl.static_range(len(values)):
        at_row = x_places[i] + gl.arange(0, values[i].block_shape[0], gl.SliceLayout(0, LAYOUT))[None, :]
        total = sums[i * PARTS]
        if GATE is not None:
            total = gated(total, sums[i * PARTS + 1], GATE)
        if bias is None:
            total = total.to(out.dtype.element_ty)
        total = gl.convert_layout(total, LAYOUT)
        if bias is not None:
            total += gl.load(bias + at_line, mask=at_line < outputs, other=0.0).to(gl.float32)
        place = (split * rows + at_row).to(gl.int64) * outputs + at_line  # [BOX, piece]
        gl.store(out + place, total.to(out.dtype.element_ty), mask=(at_row < rows) & (at_line < outputs))


def stream(
    x: Tensor,
    weight: Tensor,
    config: StreamConfig,
    *,
    bias: Tensor | None = None,
    gate: Activation | None = None,
    pdl: bool = False,
) -> Tensor:
    """Multiply x [rows, inputs] by weight [lines, inputs] transposed; both contiguous, 16 bits an element.

    Inputs are a multiple of 8. `bias` [lines] is added. With `gate`, an activation, the outputs are (gate, up) and the
    result activation(gate) * up. With `config.splits` the result is [splits, rows, lines] float32, to be summed.

    Raises:
        ValueError: a bias together with a gate, or either with splits.
    """
    (rows, inputs), lines, splits = x.shape, weight.shape[0], max(config.splits, 1)
    if (bias is not None) + (gate is not None) + (config.splits > 0) > 1:
        raise ValueError(f"{config}: only one of a bias, a gate, and splits")
    shape = (splits, rows, lines) if config.splits else (rows, lines // 2 if gate else lines)
    out = x.new_empty(shape, dtype=torch.float32 if config.splits else x.dtype)
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    heights = [config.lines // 2 if gate else config.lines, *pieces_of(config.rows)]
    w, *values = (
        TensorDescriptor.from_tensor(weight if i == 0 else x, [height, config.block_k], layout)
        for i, height in enumerate(heights)
    )
    values += [None] * (MAX_PIECES - len(values))
    blocks = triton.cdiv(inputs, config.block_k)
    _stream_kernel[triton.cdiv(rows, config.rows), triton.cdiv(lines, config.lines), splits](
        *values, w, bias, out, rows, lines, blocks, triton.cdiv(blocks, splits), ROWS=config.rows,
        STAGES=config.stages, X_STAGES=config.x_stages, GATE=gate, PDL=pdl, num_warps=config.num_warps,
        **pdl_options(pdl),
    )  # fmt: skip
    return out
