"""Mixtures of experts: rows are sorted by expert on the device, then each expert's rows are multiplied in tiles.

Three kernels and no wait of the host, so that a step can be captured: the choice of experts, with the list of tiles;
gate, up and activation; down, weighted. Few rows take as long as the chosen experts' weights take to read, so tiles are
made as high as most experts have rows, and each weight is read once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.ops.api import Experts
from tokenmill.ops.triton.launch import pdl_options, start_and_wait
from tokenmill.ops.triton.products import PROCESSORS
from tokenmill.ops.triton.rows import is_last_program

TOKENS = 4  # of one program that chooses
LOWEST = tl.constexpr(-3e38)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How one product is computed: a program makes a tile of [block_m, block_n] results, block_k inputs at a time.

    `swap` makes the weight the first operand. With `per_processor` so many programs on each multiprocessor take one
    tile after the other; else each tile has a program.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swap: bool = False
    per_processor: int = 0


@dataclass(frozen=True, slots=True)
class Routing:
    """Which tokens go to which experts; a pair is token * chosen + choice."""

    weights: Tensor  # [tokens, chosen] float32
    order: Tensor  # [experts, tokens] int32: each expert's pairs, as many as it has
    tiles: Tensor  # [1 + tiles, 4] int32: how many there are; expert, first row, and the expert's rows, of each


# Rows an expert on average, up to which the two products are computed in this way; the height of tiles is common.
EXACT = TileConfig(16, 32, 32, 4, 2)  # float32
SETTINGS = (
    (2, TileConfig(8, 64, 128, 4, 4, swap=True), TileConfig(8, 64, 128, 4, 4, swap=True)),
    (8, TileConfig(16, 64, 128, 4, 3, swap=True), TileConfig(16, 64, 128, 4, 3, swap=True)),
    (16, TileConfig(32, 64, 64, 4, 4, swap=True), TileConfig(32, 64, 128, 4, 3, swap=True)),
    (64, TileConfig(64, 64, 64, 4, 4), TileConfig(64, 128, 64, 4, 4)),
)
MANY = (TileConfig(128, 128, 64, 8, 3), TileConfig(128, 128, 64, 8, 4))


def choose_tiles(rows: int, num_experts: int, element_size: int) -> tuple[TileConfig, TileConfig]:
    """How the two products of so many pairs are computed: the fastest way found on an H200 for even routing."""
    if element_size > 2:  # no matrix unit multiplies float32 exactly
        return EXACT, EXACT
    return next(((first, second) for most, first, second in SETTINGS if rows <= most * num_experts), MANY)


@triton.jit(do_not_specialize=["tokens"])
def _route_kernel(
    scores, weights, order, tiles, counters, tokens,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
    TOKENS: tl.constexpr, TILE: tl.constexpr, IS_RENORMALISED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_and_wait(PDL)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    expert, choice = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_C)[None, :]
    is_score = (token < tokens) & (expert < EXPERTS)
    score = tl.zeros([TOKENS, BLOCK_E], tl.float32)
    for part in tl.static_range(PARTS):
        at = (tl.cast(part, tl.int64) * tokens + token) * EXPERTS + expert
        score += tl.load(scores + at, mask=is_score, other=0.0).to(tl.float32)
    # Scores that are not finite must not make an expert chosen twice, or one that is none: `order` has no room for it.
    score = tl.where(score > LOWEST, score, LOWEST)
    score = tl.where(expert < EXPERTS, score, float("-inf"))
    top = tl.max(score, 1)[:, None]
    total = tl.sum(tl.exp(score - top), 1)[:, None]
    chosen, weight = tl.zeros([TOKENS, BLOCK_C], tl.int32), tl.zeros([TOKENS, BLOCK_C], tl.float32)
    for step in tl.static_range(CHOSEN):
        best, at = tl.max(score, 1, return_indices=True)
        chosen = tl.where(choice == step, at[:, None], chosen)
        weight = tl.where(choice == step, tl.exp(best[:, None] - top), weight)
        score = tl.where(expert == at[:, None], float("-inf"), score)
    if IS_RENORMALISED:
        total = tl.sum(weight, 1)[:, None]
    pair = token * CHOSEN + choice  # [TOKENS, BLOCK_C]
    is_pair = (token < tokens) & (choice < CHOSEN)
    tl.store(weights + pair, weight / total, mask=is_pair)
    # The places of an expert's rows depend on which program is first, what is computed of them does not.
    place = tl.atomic_add(counters + chosen, 1, mask=is_pair, sem="relaxed")
    tl.store(order + chosen.to(tl.int64) * tokens + place, pair, mask=is_pair)
    if is_last_program(counters + EXPERTS, tl.num_programs(0)):
        each = tl.arange(0, BLOCK_E)
        count = tl.load(counters + each, mask=each < EXPERTS, other=0, cache_modifier=".cg")
        tl.store(counters + each, 0, mask=each < EXPERTS)
        num_tiles = (count + TILE - 1) // TILE
        first = 1 + tl.cumsum(num_tiles, 0) - num_tiles
        tl.store(tiles, tl.sum(num_tiles, 0))
        for number in range(tl.max(num_tiles, 0)):
            entry = tiles + 4 * (first + number)
            tl.store(entry, each, mask=number < num_tiles)
            tl.store(entry + 1, tl.zeros_like(each) + number * TILE, mask=number < num_tiles)
            tl.store(entry + 2, count, mask=number < num_tiles)


@triton.jit(do_not_specialize=["tokens"])
def _experts_kernel(
    x, weight, factors, order, tiles, out, tokens,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, CHOSEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SWAP: tl.constexpr, IS_GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_and_wait(PDL)
    IS_WHOLE: tl.constexpr = OUTPUTS % BLOCK_N == 0
    columns: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    lines: tl.constexpr = 2 * OUTPUTS if IS_GATED else OUTPUTS
    k = tl.arange(0, BLOCK_K)[None, :]
    for number in range(tl.program_id(0), tl.load(tiles) * columns, tl.num_programs(0)):
        entry = tiles + 4 * (1 + number // columns)
        expert, first, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        m = first + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        pair = tl.load(order + expert.to(tl.int64) * tokens + m, mask=m < count, other=0)
        line = number % columns * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        is_row, is_line = m[:, None] < count, line[:, None] < OUTPUTS
        row = x + (pair // CHOSEN if IS_GATED else pair).to(tl.int64)[:, None] * INPUTS
        its_weight = weight + expert.to(tl.int64) * lines * INPUTS + line[:, None] * INPUTS
        total = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros_like(total)
        for start in range(0, INPUTS, BLOCK_K):
            value = _load(row, is_row, start + k, INPUTS, BLOCK_K, False)
            total = _add(total, value, _load(its_weight, is_line, start + k, INPUTS, BLOCK_K, IS_WHOLE), SWAP)
            if IS_GATED:
                its_up = its_weight + OUTPUTS * INPUTS
                up = _add(up, value, _load(its_up, is_line, start + k, INPUTS, BLOCK_K, IS_WHOLE), SWAP)
        if IS_GATED:
            total = up * total / (1.0 + tl.exp(tl.minimum(-total, 80.0)))
        if SWAP:
            total = tl.trans(total)
        if not IS_GATED:
            total *= tl.load(factors + pair, mask=m < count, other=0.0)[:, None]
        place = pair if IS_GATED else pair % CHOSEN * tokens + pair // CHOSEN
        at = out + place.to(tl.int64)[:, None] * OUTPUTS + line[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=is_row & (line[None, :] < OUTPUTS))


@triton.jit
def _load(lines, is_line, at, INPUTS: tl.constexpr, BLOCK_K: tl.constexpr, IS_WHOLE: tl.constexpr):
    is_even: tl.constexpr = INPUTS % BLOCK_K == 0
    if is_even and IS_WHOLE:
        return tl.load(lines + at)
    return tl.load(lines + at, mask=is_line if is_even else is_line & (at < INPUTS), other=0.0)


@triton.jit
def _add(total, value, w, SWAP: tl.constexpr):
    first, second = value, w
    if SWAP:
        first, second = w, value
    return tl.dot(first, tl.trans(second), total, input_precision="ieee")


def route(scores: Tensor, experts: Experts, tile: int, *, pdl: bool = False) -> Routing:
    """Choose the experts of tokens, and cut each expert's rows into tiles of `tile`.

    Args:
        scores: [parts, tokens, experts], to be summed.
        experts: their counters are used, and zero again afterwards.
        tile: rows.
        pdl: see `launch`.
    """
    parts, tokens, num_experts = scores.shape
    pairs = tokens * experts.num_chosen
    used = min(num_experts, pairs)
    weights = scores.new_empty(tokens, experts.num_chosen, dtype=torch.float32)
    order = experts.counters.new_empty(num_experts, tokens)
    tiles = experts.counters.new_empty(1 + used + (pairs - used) // tile, 4)
    _route_kernel[(triton.cdiv(tokens, TOKENS),)](
        scores, weights, order, tiles, experts.counters, tokens, PARTS=parts, EXPERTS=num_experts,
        CHOSEN=experts.num_chosen, BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_C=triton.next_power_of_2(experts.num_chosen), TOKENS=TOKENS, TILE=tile,
        IS_RENORMALISED=experts.is_renormalised, PDL=pdl, num_warps=4, **pdl_options(pdl),
    )  # fmt: skip
    return Routing(weights, order, tiles)


def experts_parts(
    x: Tensor, scores: Tensor, experts: Experts, tiles: tuple[TileConfig, TileConfig], *, pdl: bool = False
) -> Tensor:
    """What the chosen experts make of tokens, weighted and to be summed: [chosen, tokens, hidden] of x's type.

    Args:
        x: [tokens, hidden], contiguous.
        scores: [parts, tokens, experts], to be summed.
        experts: contiguous; their counters are used.
        tiles: how the two products are computed; both have the same height.
        pdl: see `launch`.
    """
    (tokens, hidden), chosen = x.shape, experts.num_chosen
    routing = route(scores, experts, tiles[0].block_m, pdl=pdl)
    inner = x.new_empty(tokens * chosen, experts.down.shape[2])
    _multiply(x, experts.gate_up, routing, tiles[0], inner, is_gated=True, pdl=pdl)
    parts = x.new_empty(chosen, tokens, hidden)
    _multiply(inner, experts.down, routing, tiles[1], parts, is_gated=False, pdl=pdl)
    return parts


def _multiply(
    x: Tensor, weight: Tensor, routing: Routing, config: TileConfig, out: Tensor, *, is_gated: bool, pdl: bool
) -> None:
    tokens, chosen = routing.weights.shape
    num_tiles = (len(routing.tiles) - 1) * triton.cdiv(out.shape[-1], config.block_n)
    programs = min(num_tiles, config.per_processor * PROCESSORS) if config.per_processor else num_tiles
    _experts_kernel[(programs,)](
        x, weight, routing.weights, routing.order, routing.tiles, out, tokens, INPUTS=x.shape[1], OUTPUTS=out.shape[-1],
        CHOSEN=chosen, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SWAP=config.swap,
        IS_GATED=is_gated, PDL=pdl, num_warps=config.num_warps, num_stages=config.num_stages, **pdl_options(pdl),
    )  # fmt: skip
