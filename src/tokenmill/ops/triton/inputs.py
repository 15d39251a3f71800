"""What a step starts with: page updates, embeddings, and where its tokens stand."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.ops.api import Rotation
from tokenmill.ops.triton.launch import pdl_options, start_and_wait

BLOCK = 1024
UPDATES_BLOCK = 128


@triton.jit
def _gather_inputs_kernel(tokens, slots, last_tokens, embedding, out, hidden, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < hidden
    start_and_wait(PDL)
    token = tl.load(tokens + row).to(tl.int64)
    if token < 0:
        token = tl.load(last_tokens + tl.load(slots + row)).to(tl.int64)
    value = tl.load(embedding + token * hidden + columns, mask=is_column)  # [BLOCK]
    tl.store(out + row * hidden + columns, value, mask=is_column)


@triton.jit
def _apply_page_updates_kernel(page_table, updates, count, pages_per_slot, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_update = index < tl.load(count)
    slot = tl.load(updates + index * 3, mask=is_update, other=0).to(tl.int64)  # [BLOCK]
    place = tl.load(updates + index * 3 + 1, mask=is_update, other=0)
    page = tl.load(updates + index * 3 + 2, mask=is_update, other=0)
    tl.store(page_table + slot * pages_per_slot + place, page, mask=is_update)


@triton.jit
def _locate_tokens_kernel(
    positions,
    slots,
    page_table,
    angles,
    kv_slots,
    cos,
    sin,
    pages_per_slot,
    PAGE_SIZE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    half: tl.constexpr = ROTARY_DIM // 2
    is_column = column < ROTARY_DIM
    position = tl.load(positions + token).to(tl.int64)
    page = tl.load(page_table + tl.load(slots + token).to(tl.int64) * pages_per_slot + position // PAGE_SIZE)
    tl.store(kv_slots + token, page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE)
    row = angles + position * ROTARY_DIM + column % half
    cosine = tl.load(row, mask=is_column)  # [BLOCK]
    sine = tl.load(row + half, mask=is_column)
    tl.store(cos + token * ROTARY_DIM + column, cosine, mask=is_column)
    tl.store(sin + token * ROTARY_DIM + column, tl.where(column < half, -sine, sine), mask=is_column)


def gather_inputs(
    tokens: Tensor, slots: Tensor, last_tokens: Tensor, embedding: Tensor, out: Tensor, *, pdl: bool = False
) -> Tensor:
    """The embeddings of tokens; a token under 0 stands for the one that its slot drew last.

    Args:
        tokens, slots: [rows] int32. Every id must be inside the table: it is not checked.
        last_tokens: [slots], any integer type.
        embedding: [vocab, hidden], contiguous.
        out: [rows, hidden], contiguous; written and returned.
        pdl: see `launch`.
    """
    rows, hidden = out.shape
    if rows:
        block = min(BLOCK, triton.next_power_of_2(hidden))
        _gather_inputs_kernel[(rows, triton.cdiv(hidden, block))](
            tokens, slots, last_tokens, embedding, out, hidden, BLOCK=block, PDL=pdl, num_warps=4, **pdl_options(pdl)
        )
    return out


def apply_page_updates(page_table: Tensor, updates: Tensor, count: Tensor) -> None:
    """Enter pages into the page table.

    No two of the updates may have one place: which of them would win is not defined.

    Args:
        page_table: [slots, pages_per_slot] int32, contiguous.
        updates: [room, 3] int32, contiguous, each (slot, place in the slot's row, page).
        count: [1] int32 on the device, how many of the updates there are.
    """
    if updates.shape[0]:
        _apply_page_updates_kernel[(triton.cdiv(updates.shape[0], UPDATES_BLOCK),)](
            page_table, updates, count, page_table.shape[1], BLOCK=UPDATES_BLOCK, num_warps=4
        )


def angle_table(frequencies: Tensor, factor: float, max_position: int) -> Tensor:
    """Cosines, then sines, of all positions, times `factor`: [max_position, 2 * frequencies] float32.

    Angles reach 1e5 radians, where fast sine instructions are far off; torch's are exact to the last bits.
    """
    positions = torch.arange(max_position, dtype=torch.float32, device=frequencies.device)
    angles = positions[:, None] * frequencies  # [max_position, rotary_dim / 2]
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=1)


def locate_tokens(
    positions: Tensor,
    slots: Tensor,
    page_table: Tensor,
    page_size: int,
    angles: Tensor,
    rotation: Rotation,
    kv_slots: Tensor,
) -> None:
    """Where the tokens' K and V go, and the angles of their positions, for all layers of a step.

    Args:
        positions: [tokens] integers, each inside `angles`.
        slots: [tokens] integers, the page table's row of each token.
        page_table: [slots, pages_per_slot] integers, contiguous.
        page_size: tokens a page.
        angles: [max_position, rotary_dim] float32, from `angle_table`.
        rotation: its tensors, [tokens, 1, rotary_dim] float32, are written.
        kv_slots: [tokens] integers, written.
    """
    tokens, rotary_dim = positions.shape[0], angles.shape[1]
    if tokens:
        _locate_tokens_kernel[(tokens,)](
            positions,
            slots,
            page_table,
            angles,
            kv_slots,
            rotation.cos,
            rotation.sin,
            page_table.shape[1],
            PAGE_SIZE=page_size,
            ROTARY_DIM=rotary_dim,
            BLOCK=triton.next_power_of_2(rotary_dim),
            num_warps=1,
        )
