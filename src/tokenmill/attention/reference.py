"""Paged attention in plain torch: gather the pages, then attend. It runs anywhere and defines the truth.

Rows of like length and context are computed together, padded to the longest of their group. Padding repeats a row's
last query and last position, so that nothing is read that was not written: a NaN left in an unused page cannot spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmill.attention.base import KVCache, RowLayout
from tokenmill.ops.reference import kv_slots_of

PIECE_QUERIES = 256  # longer rows are cut, so that early queries do not score the positions after them
GATHER_COST = 8  # of one context position, in score computations
SPARE_COST = 2048  # padding worth less than one more group
GROUP_ELEMENTS = 400_000  # of K gathered for a group of several pieces: what stays in a core's cache


@dataclass(frozen=True, slots=True)
class Piece:
    """Some neighbouring queries of one row, and where their tokens stand in the step.

    The first of them attends to positions from `first_seen` on.
    """

    first_token: int
    slot: int
    start: int
    length: int
    first_seen: int = 0

    @property
    def context(self) -> int:
        """Positions that all queries together attend to."""
        return self.start + self.length - self.first_seen


@dataclass(frozen=True, slots=True)
class PieceGroup:
    """Pieces computed in one call, each padded to `queries` queries and `context` positions."""

    pieces: int
    queries: int
    context: int
    tokens: Tensor  # [pieces * queries] int64
    kv_slots: Tensor  # [pieces * context] int64
    mask: Tensor | None  # [pieces, 1, queries, context] bool, True where attended; None: everywhere


@dataclass(frozen=True, slots=True)
class ReferenceMetadata:
    """What is the same for all layers. `order` finds each token in the groups' results laid end to end.

    It is None when there is one group, without padded queries, whose tokens are the step's in order.
    """

    groups: tuple[PieceGroup, ...]
    order: Tensor | None  # [tokens] int64


class ReferenceAttention:
    """`attention.base.AttentionBackend` in plain torch.

    `scale` multiplies the scores, whose absolute values stay below `cap` if there is one; `token_elements` is the size
    of one token's K. With a `window`, a token attends to so many positions, its own the last.
    """

    name = "reference"

    def __init__(self, *, scale: float, token_elements: int, window: int = 0, cap: float = 0.0) -> None:
        self._scale, self._window, self._cap = scale, window, cap
        self._max_gathered = max(1, GROUP_ELEMENTS // token_elements)

    def plan(self, layout: RowLayout, page_table: Tensor, page_size: int) -> ReferenceMetadata:
        """See `AttentionBackend.plan`."""
        num_tokens = sum(layout.lengths)
        pieces = group_pieces(cut_rows(layout, self._window), self._max_gathered)
        planned = [_plan_group(group, page_table, page_size, self._window) for group in pieces]
        groups = tuple(group for group, _ in planned)
        is_in_order = len(groups) == 1 and groups[0].pieces * groups[0].queries == num_tokens
        order = None if is_in_order else _order(planned, num_tokens, page_table.device)
        return ReferenceMetadata(groups, order)

    def run(self, query: Tensor, kv: KVCache, layer: int, metadata: ReferenceMetadata) -> Tensor:
        """See `AttentionBackend.run`."""
        keys, values = kv.keys[layer], kv.values[layer]  # [kv slots, kv_heads, head_dim]
        if metadata.order is None:
            group = metadata.groups[0]
            mixed = self._attend(query[: len(group.tokens)], keys, values, group)
        else:
            parts = [self._attend(query.index_select(0, it.tokens), keys, values, it) for it in metadata.groups]
            mixed = torch.cat(parts).index_select(0, metadata.order)
        padding = len(query) - len(mixed)
        return F.pad(mixed, (0, 0, 0, 0, 0, padding)) if padding else mixed

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, group: PieceGroup) -> Tensor:
        heads, kv_heads, dim = query.shape[1], keys.shape[1], keys.shape[2]
        shape = (group.pieces, group.context, kv_heads, dim)
        key, value = (
            its.index_select(0, group.kv_slots).to(query.dtype).view(shape).transpose(1, 2) for its in (keys, values)
        )
        if group.queries == 1:  # a single query: the heads that share a K/V head become its queries
            query = query.view(group.pieces, kv_heads, heads // kv_heads, dim)
            mixed = self._mix(query, key, value, group.mask)
        else:
            query = query.view(group.pieces, group.queries, heads, dim).transpose(1, 2)
            mixed = self._mix(query, key, value, group.mask).transpose(1, 2)
        return mixed.reshape(-1, heads, dim)  # [pieces * queries, heads, head_dim]

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Query [pieces, heads, queries, head_dim]; key and value [pieces, kv_heads, context, head_dim]."""
        group = query.shape[1] // key.shape[1]
        if not self._cap:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=self._scale, enable_gqa=group > 1
            )
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = (query @ key.transpose(2, 3)).float().mul_(self._scale / self._cap).tanh_().mul_(self._cap)
        if mask is not None:
            scores.masked_fill_(~mask, -math.inf)
        return scores.softmax(-1).to(value.dtype) @ value


def group_pieces(pieces: Sequence[Piece], max_gathered: int) -> list[list[Piece]]:
    """Pieces in groups of like size, each group in the step's order.

    Padding costs at most an eighth of a group's own work, or less than one more group would. A group of several
    pieces gathers at most `max_gathered` context positions.
    """
    groups: list[list[Piece]] = []
    real = context = 0  # the last group's own work, and its longest context
    for piece in sorted(pieces, key=lambda piece: (piece.length, piece.context), reverse=True):
        cost = _cost(piece.length, piece.context)
        if groups:
            count, longest = len(groups[-1]) + 1, max(context, piece.context)
            wasted = count * _cost(groups[-1][0].length, longest) - (real + cost)
            if wasted <= (real + cost) // 8 + SPARE_COST and count * longest <= max_gathered:
                groups[-1].append(piece)
                real, context = real + cost, longest
                continue
        groups.append([piece])
        real, context = cost, piece.context
    return [sorted(group, key=lambda piece: piece.first_token) for group in groups]


def _cost(queries: int, context: int) -> int:
    return context * (queries + GATHER_COST)


def cut_rows(layout: RowLayout, window: int = 0) -> list[Piece]:
    """The rows in pieces of at most `PIECE_QUERIES` queries, in the step's order."""
    pieces: list[Piece] = []
    first = 0
    for slot, start, length in zip(layout.slots, layout.starts, layout.lengths, strict=True):
        for done in range(0, length, PIECE_QUERIES):
            first_seen = max(0, start + done + 1 - window) if window else 0
            pieces.append(Piece(first + done, slot, start + done, min(PIECE_QUERIES, length - done), first_seen))
        first += length
    return pieces


def _plan_group(pieces: list[Piece], page_table: Tensor, page_size: int, window: int) -> tuple[PieceGroup, Tensor]:
    """The group, and the indices of its pieces' own queries (not padding) among [pieces * queries]."""
    device = page_table.device
    queries, context = max(piece.length for piece in pieces), max(piece.context for piece in pieces)
    columns = [(its.first_token, its.slot, its.start, its.length, its.first_seen) for its in pieces]
    first_tokens, slots, starts, lengths, seen = torch.tensor(columns, device=device).T.unsqueeze(2)  # [pieces, 1] each
    steps = torch.arange(queries, device=device)
    offsets = torch.minimum(steps, lengths - 1)  # [pieces, queries]
    positions = seen + torch.arange(context, device=device)  # [pieces, context]
    attended = torch.minimum(positions, starts + lengths - 1)
    own = (starts + offsets).unsqueeze(2)  # [pieces, queries, 1]
    mask = positions.unsqueeze(1) <= own
    if window:
        mask &= positions.unsqueeze(1) > own - window
    needs_mask = queries > 1 or any(piece.context != context for piece in pieces)
    group = PieceGroup(
        pieces=len(pieces),
        queries=queries,
        context=context,
        tokens=(first_tokens + offsets).flatten(),
        kv_slots=kv_slots_of(slots, attended, page_table, page_size).flatten(),
        mask=mask.unsqueeze(1) if needs_mask else None,
    )
    return group, (steps < lengths).flatten().nonzero().flatten()


def _order(planned: Sequence[tuple[PieceGroup, Tensor]], num_tokens: int, device: torch.device) -> Tensor:
    order = torch.empty(num_tokens, dtype=torch.int64, device=device)
    first = 0
    for group, own in planned:
        order[group.tokens[own]] = own + first
        first += group.pieces * group.queries
    return order
