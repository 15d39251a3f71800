"""What a step starts with: the tokens' ids, their places in the K/V pool, their angles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.ops.api import Rotation
from tokenmill.ops.triton.launch import pdl_options, start_and_wait

TOKENS = 32  # of one program
UPDATES = 128  # looked through at a time
ANGLES = 256  # of one program


@triton.jit(
    do_not_specialize=["tokens", "updates", "table_stride", "slots"],
    do_not_specialize_on_alignment=["columns", "page_updates"],
)
def _stage_kernel(
    columns,
    page_updates,
    last_tokens,
    page_table,
    input_ids,
    kv_slots,
    tokens,
    updates,
    table_stride,
    slots,
    PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    UPDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program, kind = tl.program_id(0), tl.program_id(1)
    at = program * TOKENS + tl.arange(0, TOKENS)
    is_token = at < tokens
    token = tl.load(columns + at, mask=is_token, other=0)  # [TOKENS]
    position = tl.load(columns + tokens + at, mask=is_token, other=0)
    slot = tl.load(columns + 2 * tokens + at, mask=is_token, other=0)
    last = tl.load(last_tokens + slot, mask=is_token & (token < 0), other=0)
    tl.store(input_ids + at, tl.where(token < 0, last.to(tl.int32), token), mask=is_token)
    index = position // PAGE_SIZE
    slot += kind * slots  # the row of this kind's table
    page = tl.load(page_table + slot.to(tl.int64) * table_stride + index, mask=is_token, other=0).to(tl.int32)
    for start in range(0, updates, UPDATES):
        each = start + tl.arange(0, UPDATES)
        is_update = each < updates
        slot_to = tl.load(page_updates + 3 * each, mask=is_update, other=-1)  # [UPDATES]
        index_to = tl.load(page_updates + 3 * each + 1, mask=is_update, other=-1)
        page_to = tl.load(page_updates + 3 * each + 2, mask=is_update, other=-1)
        # Programs write the table while others read it: a token whose page is updated takes it from the update.
        is_own = (slot[:, None] == slot_to[None, :]) & (index[:, None] == index_to[None, :])  # [TOKENS, UPDATES]
        entered = tl.max(tl.where(is_own, page_to[None, :], -1), 1)
        page = tl.where(entered >= 0, entered, page)
        is_written = is_update & ((start // UPDATES) % tl.num_programs(0) == program) & (kind == 0)
        place = page_table + slot_to.to(tl.int64) * table_stride + index_to
        tl.store(place, page_to.to(page_table.dtype.element_ty), mask=is_written)
    tl.store(kv_slots + kind * tokens + at, page * PAGE_SIZE + position % PAGE_SIZE, mask=is_token)


@triton.jit(do_not_specialize=["angles"], do_not_specialize_on_alignment=["positions"])
def _rotation_kernel(
    positions, frequencies, cos, sin, factor, angles, HALF: tl.constexpr, ANGLES: tl.constexpr, PDL: tl.constexpr
):
    start_and_wait(PDL)
    at = tl.program_id(0) * ANGLES + tl.arange(0, ANGLES)
    is_angle = at < angles
    token, pair = at // HALF, at % HALF
    position = tl.load(positions + token, mask=is_angle, other=0).to(tl.float32)  # [ANGLES]
    angle = position * tl.load(frequencies + pair, mask=is_angle, other=0.0)
    cosine, sine = tl.cos(angle) * factor, tl.sin(angle) * factor
    first = token.to(tl.int64) * 2 * HALF + pair
    tl.store(cos + first, cosine, mask=is_angle)
    tl.store(cos + first + HALF, cosine, mask=is_angle)
    tl.store(sin + first, -sine, mask=is_angle)
    tl.store(sin + first + HALF, sine, mask=is_angle)


def stage_tokens(
    columns: Tensor, updates: Tensor, last_tokens: Tensor, page_tables: Tensor, page_size: int, *, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """`Ops.stage_tokens`, in one launch; ids and places are int32. With `pdl`, the next kernel may start at once."""
    tokens, (kinds, slots, _) = columns.shape[1], page_tables.shape
    input_ids, kv_slots = (columns.new_empty(shape) for shape in (tokens, (kinds, tokens)))
    if tokens or len(updates):
        _stage_kernel[(max(1, triton.cdiv(tokens, TOKENS)), kinds)](
            columns,
            updates,
            last_tokens,
            page_tables,
            input_ids,
            kv_slots,
            tokens,
            len(updates),
            page_tables.stride(1),
            slots,
            PAGE_SIZE=page_size,
            TOKENS=TOKENS,
            UPDATES=UPDATES,
            PDL=pdl,
            num_warps=4,
        )
    return input_ids, kv_slots


def make_rotation(positions: Tensor, frequencies: Tensor, factor: float, *, pdl: bool = False) -> Rotation:
    """`Ops.rotation`, in one launch; `pdl`: see `launch`."""
    tokens, half = positions.shape[0], frequencies.shape[0]
    cos, sin = torch.empty((2, tokens, 1, 2 * half), dtype=torch.float32, device=positions.device)
    if tokens:
        _rotation_kernel[(triton.cdiv(tokens * half, ANGLES),)](
            positions,
            frequencies,
            cos,
            sin,
            factor,
            tokens * half,
            HALF=half,
            ANGLES=ANGLES,
            PDL=pdl,
            num_warps=4,
            **pdl_options(pdl),
        )
    return Rotation(cos, sin)
