"""Paged attention in Triton: decode rows, prefill rows and long prefill rows each in the way that suits them."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain

import torch
from torch import Tensor

from tokenmill.attention.base import KVCache, RowLayout
from tokenmill.attention.triton_decode import DecodePlan, decode_attention, decode_settings, plan_decode
from tokenmill.attention.triton_prefill import (
    WORK_COLUMNS,
    PrefillRow,
    PrefillSettings,
    can_gather,
    gathered_attention,
    make_work,
    prefill_attention,
    prefill_settings,
)
from tokenmill.ops.api import HeadNorms, Rotation

ALIGNED_INTS = 4  # tables start at multiples of 16 bytes: kernels are compiled anew for other alignments


@dataclass(frozen=True, slots=True)
class TritonMetadata:
    """What is the same for all layers."""

    page_table: Tensor  # [slots, pages]
    page_size: int
    decode: DecodePlan | None  # of the rows of one query each
    work: Tensor | None  # [items, 4] int32
    settings: PrefillSettings  # of the work
    gathered: tuple[PrefillRow, ...]


class TritonAttention:
    """`attention.base.AttentionBackend` in Triton, and in cuDNN for rows of `gather_from` queries or more.

    Args:
        scale: multiplies the scores.
        window: positions that a token attends to, its own the last; 0: all.
        cap: bound of the scores, cap * tanh(score / cap); 0: none.
        num_heads, num_kv_heads: of this rank.
        dtype: of queries, keys and values.
        num_sms: multiprocessors of the device.
        gather_from: shortest row for cuDNN, which takes no float32, no heads over 128 dimensions, no window and no cap.
        pdl: launch decode kernels while the kernel before still runs (needs compute capability 9).
    """

    name = "triton"

    def __init__(
        self,
        *,
        scale: float,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        num_sms: int,
        window: int = 0,
        cap: float = 0.0,
        gather_from: int = 3072,
        pdl: bool = False,
    ) -> None:
        self._scale, self._window = scale, window
        self._decode = partial(decode_attention, scale=scale, window=window, cap=cap, pdl=pdl)
        self._prefill = partial(prefill_attention, scale=scale, window=window, cap=cap)
        self._num_heads, self._num_kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._num_sms, self._element_size = num_sms, dtype.itemsize
        self._gather_from = max(2, gather_from) if can_gather(head_dim, dtype) and not cap else sys.maxsize
        self.longest_row = self._gather_from - 1

    def plan(self, layout: RowLayout, page_table: Tensor, page_size: int) -> TritonMetadata:
        """See `AttentionBackend.plan`. At most one copy to the device, and no wait for it."""
        rows, singles = _rows_of(layout)
        gathered = tuple(row for row in rows if self._is_gathered(row))
        settings, block_queries = self._tiles(sum(layout.lengths))
        work = make_work((row for row in rows if row.length > 1 and row not in gathered), block_queries)
        num_rows = -(-len(singles) // ALIGNED_INTS) * ALIGNED_INTS
        numbers = _numbers(singles, num_rows, work, len(work))
        # The pinned memory is kept until the copy is done by torch's allocator, which notes the stream that reads it.
        packed = torch.tensor(numbers, dtype=torch.int32, pin_memory=page_table.is_cuda)
        packed = packed.to(page_table.device, non_blocking=True)
        tokens, slots, positions = packed[: 3 * num_rows].view(3, num_rows)[:, : len(singles)]
        decode = self._cut(slots, positions, tokens) if singles else None
        items = packed[3 * num_rows :].view(-1, WORK_COLUMNS) if work else None
        return TritonMetadata(page_table, page_size, decode, items, settings, gathered)

    def _is_gathered(self, row: PrefillRow) -> bool:
        is_inside = not self._window or row.start + row.length <= self._window
        return row.length >= self._gather_from and is_inside

    def plan_decode(self, slots: Tensor, positions: Tensor, page_table: Tensor, page_size: int) -> TritonMetadata:
        """See `GraphAttention.plan_decode`. Rows read fastest when long contexts come first."""
        return TritonMetadata(page_table, page_size, self._cut(slots, positions), None, self._tiles(0)[0], ())

    def table_length(self, num_tokens: int, num_rows: int) -> int:
        """See `TableAttention.table_length`."""
        return 3 * num_rows + WORK_COLUMNS * self._num_items(num_tokens, num_rows)

    def tables(self, layout: RowLayout, num_tokens: int, num_rows: int, spare_slot: int) -> array[int] | None:
        """See `TableAttention.tables`: which tokens, slots and positions are single; then work."""
        rows, singles = _rows_of(layout)
        work = make_work((row for row in rows if row.length > 1), self._tiles(num_tokens)[1])
        num_items = self._num_items(num_tokens, num_rows)
        if len(singles) > num_rows or len(work) > num_items or max(layout.lengths) > self.longest_row:
            return None
        return _numbers(singles, num_rows, work, num_items, spare_slot)

    def plan_tables(
        self, tables: Tensor, num_tokens: int, num_rows: int, page_table: Tensor, page_size: int
    ) -> TritonMetadata:
        """See `TableAttention.plan_tables`."""
        tokens, slots, positions = tables[: 3 * num_rows].view(3, num_rows)
        work = tables[3 * num_rows :].view(-1, WORK_COLUMNS)
        decode = self._cut(slots, positions, tokens)
        return TritonMetadata(page_table, page_size, decode, work, self._tiles(num_tokens)[0], ())

    def _num_items(self, num_tokens: int, num_rows: int) -> int:
        """Work of chunks that draw, one begun block each, and of a few that do not."""
        return num_tokens // self._tiles(num_tokens)[1] + num_rows + 8

    def _tiles(self, num_tokens: int) -> tuple[PrefillSettings, int]:
        """The tiles for a step of so many tokens, and how many tokens one covers."""
        group, num_queries = self._num_heads // self._num_kv_heads, num_tokens * self._num_heads
        settings = prefill_settings(group, self._head_dim, self._element_size, num_queries, self._num_sms)
        return settings, settings.block_m // group

    def prepares(self, metadata: TritonMetadata) -> bool:
        """See `FusedAttention.prepares`: where all rows are of one query each."""
        return metadata.work is None and not metadata.gathered

    def prepare_and_run(
        self,
        qkv: Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        kv: KVCache,
        layer: int,
        metadata: TritonMetadata,
    ) -> Tensor:
        """See `FusedAttention.prepare_and_run`."""
        out = qkv.new_empty((qkv.shape[0], self._num_heads, self._head_dim))
        keys, values, table, plan = kv.keys[layer], kv.values[layer], metadata.page_table, metadata.decode
        assert plan is not None
        self._decode(qkv, keys, values, table, plan, out, page_size=metadata.page_size, rotation=rotation, norms=norms)
        return out

    def run(self, query: Tensor, kv: KVCache, layer: int, metadata: TritonMetadata) -> Tensor:
        """See `AttentionBackend.run`."""
        keys, values = kv.keys[layer], kv.values[layer]  # [kv_slots, kv_heads, head_dim]
        table, page_size = metadata.page_table, metadata.page_size
        gather = partial(gathered_attention, query, keys, values, table, page_size=page_size, scale=self._scale)
        if len(metadata.gathered) == 1 and metadata.gathered[0].length == query.shape[0]:
            return gather(metadata.gathered[0])
        out = query.new_empty(query.shape)  # [tokens, heads, head_dim]
        for row in metadata.gathered:
            out[row.first_token : row.first_token + row.length] = gather(row)
        if metadata.work is not None:
            work, settings = metadata.work, metadata.settings
            self._prefill(query, keys, values, table, work, out, settings, page_size=page_size)
        if metadata.decode is not None:
            self._decode(query, keys, values, table, metadata.decode, out, page_size=page_size)
        return out

    def _cut(self, slots: Tensor, positions: Tensor, tokens: Tensor | None = None) -> DecodePlan:
        rows, kv_heads, dim = slots.shape[0], self._num_kv_heads, self._head_dim
        settings = decode_settings(rows, kv_heads, dim, self._element_size, self._num_sms)
        return plan_decode(slots, positions, settings, self._num_heads, kv_heads, dim, tokens, window=self._window)


def _rows_of(layout: RowLayout) -> tuple[list[PrefillRow], list[PrefillRow]]:
    """All rows; and those of one query, longest context first."""
    columns = zip(layout.slots, layout.starts, layout.lengths, accumulate(layout.lengths), strict=True)
    rows = [PrefillRow(end - length, slot, start, length) for slot, start, length, end in columns]
    return rows, sorted((row for row in rows if row.length == 1), key=lambda row: row.start, reverse=True)


def _numbers(
    singles: Sequence[PrefillRow], num_rows: int, work: Sequence[Sequence[int]], num_items: int, spare_slot: int = 0
) -> array[int]:
    """Tokens, slots and positions of `num_rows` rows of one query; then `num_items` of work, the last of them empty."""
    spare = (0, spare_slot, -1)  # no context: no program computes such a row
    rows = [(row.first_token, row.slot, row.start) for row in singles] + [spare] * (num_rows - len(singles))
    numbers = array("i", chain(*zip(*rows, strict=True), *work))
    numbers.extend([0] * (WORK_COLUMNS * (num_items - len(work))))
    return numbers
