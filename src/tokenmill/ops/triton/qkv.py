"""All that happens between the query-key-value product and attention, in one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenmill.ops.api import HeadNorms, Rotation
from tokenmill.ops.triton.launch import pdl_options

FEW_TOKENS = 64
NUMBERS = 4096  # a program's, where there are many tokens
REGISTERS = 80  # a thread's; left to itself, the compiler saves registers by waiting for one load after the other


@triton.jit
def _prepare_qkv_kernel(
    qkv, cos, sin, kv_slots, query_weight, key_weight, query_out, keys, values, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]  # [head, 1]
    pair, half = tl.arange(0, BLOCK_PAIRS)[None, :], ROTARY_DIM // 2  # [1, pair]
    is_turned, is_pair = pair < half, pair < HEAD_DIM // 2
    left, right = pair, pair + half
    if ROTARY_DIM < HEAD_DIM:  # the dimensions that are not turned make pairs of angle zero
        left, right = tl.where(is_turned, left, right), tl.where(is_turned, right, pair + HEAD_DIM // 2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(kv_slots + token).to(tl.int64)
    cosine = tl.load(cos + token * ROTARY_DIM + pair, mask=is_turned, other=1.0)
    sine = tl.load(sin + token * ROTARY_DIM + half + pair, mask=is_turned, other=0.0)
    if HAS_NORM:
        weight = tl.where(head < HEADS, query_weight, key_weight)
        left_weight = tl.load(weight + left, mask=is_pair, other=0.0).to(tl.float32)  # [head, pair]
        right_weight = tl.load(weight + right, mask=is_pair, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    is_query, is_key = is_pair & (head < HEADS), is_pair & (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = is_pair & (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    start = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM
    is_loaded = is_pair & (head < HEADS + 2 * KV_HEADS)
    raw_left = tl.load(start + left, mask=is_loaded, other=0.0)  # [head, pair]
    raw_right = tl.load(start + right, mask=is_loaded, other=0.0)
    x, y = raw_left.to(tl.float32), raw_right.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x + y * y, 1, keep_dims=True) / HEAD_DIM + eps)
        x *= scale * left_weight
        y *= scale * right_weight
    # Two tokens of a step never have one slot, except padding rows, whose page nobody reads.
    query_at = query_out + (token * HEADS + head) * HEAD_DIM
    key_at = keys + (slot * KV_HEADS + head - HEADS) * HEAD_DIM
    value_at = values + (slot * KV_HEADS + head - HEADS - KV_HEADS) * HEAD_DIM
    turned_left, turned_right = x * cosine - y * sine, y * cosine + x * sine
    tl.store(query_at + left, turned_left, mask=is_query)
    tl.store(query_at + right, turned_right, mask=is_query)
    tl.store(key_at + left, turned_left, mask=is_key)
    tl.store(key_at + right, turned_right, mask=is_key)
    tl.store(value_at + left, raw_left, mask=is_value)
    tl.store(value_at + right, raw_right, mask=is_value)


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
    block_pairs, is_small = triton.next_power_of_2(head_dim // 2), tokens <= FEW_TOKENS
    block_heads = 1 if is_small else min(NUMBERS // 2 // block_pairs, triton.next_power_of_2(all_heads))
    query_weight, key_weight, eps = (qkv, qkv, 0.0) if norms is None else (norms.query, norms.key, norms.eps)
    _prepare_qkv_kernel[(tokens, triton.cdiv(all_heads, block_heads))](
        qkv, rotation.cos, rotation.sin, kv_slots, query_weight, key_weight, query, keys, values, eps,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, ROTARY_DIM=rotation.cos.shape[-1],
        BLOCK_HEADS=block_heads, BLOCK_PAIRS=block_pairs, HAS_NORM=norms is not None, PDL=pdl,
        num_warps=1 if is_small else 4, maxnreg=None if is_small else REGISTERS, **pdl_options(pdl),
    )  # fmt: skip
    return query
