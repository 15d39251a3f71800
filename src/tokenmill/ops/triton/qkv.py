"""All that happens between the query-key-value product and attention, in one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenmill.ops.api import HeadNorms, Rotation
from tokenmill.ops.triton.launch import pdl_options

FEW_TOKENS = 64
HEADS_A_PROGRAM = 8


@triton.jit
def _prepare_qkv_kernel(
    qkv, cos, sin, kv_slots, query_weight, key_weight, query_out, keys, values, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]  # [BLOCK_HEADS, 1]
    column = tl.arange(0, BLOCK_DIM)[None, :]  # [1, BLOCK_DIM]
    is_column = column < HEAD_DIM
    is_query, is_key = head < HEADS, (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(kv_slots + token).to(tl.int64)
    partner, own_factor, partner_factor = rotation_of(cos, sin, token, column, ROTARY_DIM)
    own_weight, partner_weight = 1.0, 1.0
    if HAS_NORM:
        own_weight = _head_weight(query_weight, key_weight, column, is_query, is_column)
        partner_weight = _head_weight(query_weight, key_weight, partner, is_query, is_column)
    if PDL:
        tl.extra.cuda.gdc_wait()
    start = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM
    is_loaded = is_column & (head < HEADS + 2 * KV_HEADS)
    raw = tl.load(start + column, mask=is_loaded, other=0.0)  # [BLOCK_HEADS, BLOCK_DIM]
    other = tl.load(start + partner, mask=is_loaded, other=0.0)
    turned = prepared(raw, other, own_factor, partner_factor, own_weight, partner_weight, eps, HEAD_DIM, HAS_NORM)
    query_at = query_out + (token * HEADS + head) * HEAD_DIM + column
    tl.store(query_at, turned.to(query_out.dtype.element_ty), mask=is_query & is_column)
    # Two tokens of a step never have one slot, except padding rows, whose page nobody reads.
    slot_at = slot * KV_HEADS * HEAD_DIM + column
    key_at = keys + slot_at + (head - HEADS) * HEAD_DIM
    tl.store(key_at, turned.to(keys.dtype.element_ty), mask=is_key & is_column)
    value_at = values + slot_at + (head - HEADS - KV_HEADS) * HEAD_DIM
    tl.store(value_at, raw.to(values.dtype.element_ty), mask=is_value & is_column)


@triton.jit
def rotation_of(cos, sin, token, column, ROTARY_DIM: tl.constexpr):
    """The column that each column is turned with, and what both are multiplied by; all like column [1, dim]."""
    half: tl.constexpr = ROTARY_DIM // 2
    is_turned = column < ROTARY_DIM
    partner = tl.where(column < half, column + half, tl.where(is_turned, column - half, column))
    own_factor = tl.load(cos + token * ROTARY_DIM + column, mask=is_turned, other=1.0)
    partner_factor = tl.load(sin + token * ROTARY_DIM + column, mask=is_turned, other=0.0)
    return partner, own_factor, partner_factor


@triton.jit
def prepared(
    raw, other, own_factor, partner_factor, own_weight, partner_weight, eps,
    HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Heads [heads, dim] normalised and turned, in float32; `other` are the columns that they are turned with."""
    own, other = raw.to(tl.float32), other.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(own * own, 1, keep_dims=True) / HEAD_DIM + eps)
        own *= scale * own_weight
        other *= scale * partner_weight
    return own * own_factor + other * partner_factor


@triton.jit
def _head_weight(query_weight, key_weight, column, is_query, is_column):
    of_query = tl.load(query_weight + column, mask=is_column, other=0.0).to(tl.float32)
    of_key = tl.load(key_weight + column, mask=is_column, other=0.0).to(tl.float32)
    return tl.where(is_query, of_query, of_key)  # [BLOCK_HEADS, BLOCK_DIM]


def prepare_qkv(
    qkv: Tensor,
    rotation: Rotation,
    norms: HeadNorms | None,
    keys: Tensor,
    values: Tensor,
    kv_slots: Tensor,
    *,
    pdl: bool = False,
) -> Tensor:
    """Normalise queries and keys by head, turn them, store keys and values: `Ops.prepare_qkv`.

    All tensors are contiguous. With `pdl` (see `launch`), `rotation` and `kv_slots` must not be written by a kernel
    since the last ordinary launch.

    Args:
        qkv: [tokens, heads + 2 * kv_heads, head_dim].
        rotation: the tokens' angles; the halves of the first rotary_dim dimensions are turned.
        norms: weights of the normalisation, or None.
        keys, values: [kv slots, kv_heads, head_dim], one layer's; written to.
        kv_slots: [tokens], any integer type.
        pdl: see `launch`.

    Returns:
        The turned queries, [tokens, heads, head_dim].
    """
    tokens, all_heads, head_dim = qkv.shape
    kv_heads = keys.shape[1]
    heads = all_heads - 2 * kv_heads
    query = qkv.new_empty((tokens, heads, head_dim))
    if not tokens:
        return query
    block_heads = 1 if tokens <= FEW_TOKENS else HEADS_A_PROGRAM
    query_weight, key_weight, eps = (qkv, qkv, 0.0) if norms is None else (norms.query, norms.key, norms.eps)
    _prepare_qkv_kernel[(tokens, triton.cdiv(all_heads, block_heads))](
        qkv, rotation.cos, rotation.sin, kv_slots, query_weight, key_weight, query, keys, values, eps,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, ROTARY_DIM=rotation.cos.shape[-1],
        BLOCK_HEADS=block_heads, BLOCK_DIM=triton.next_power_of_2(head_dim), HAS_NORM=norms is not None, PDL=pdl,
        num_warps=1 if block_heads == 1 else 4, **pdl_options(pdl),
    )  # fmt: skip
    return query
