"""The protocol of attention backends: plan on the host, run on the device."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from tokenmill.ops.api import HeadNorms, Rotation


@dataclass(frozen=True, slots=True)
class KVCache:
    """K and V of all layers in pages. Owned by `engine.kv_pool`; backends write only the slots of their rows.

    Token t of page p stands at index p * page_size + t of the second dimension.
    """

    keys: Tensor  # [layers, num_pages * page_size, kv_heads, head_dim]
    values: Tensor  # [layers, num_pages * page_size, kv_heads, head_dim]
    page_size: int


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The rows of a step as plain ints. Row i computes positions starts[i] .. starts[i] + lengths[i] - 1 and
    attends to positions 0 .. of itself. Its tokens follow row i - 1's in every [tokens, ...] tensor.
    """

    slots: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]


AttentionMetadata = Any  # made by a backend's plan, read only by the same backend's run


class AttentionBackend(Protocol):
    """Causal attention over paged K/V with grouped heads."""

    name: str

    def plan(self, layout: RowLayout, page_table: Tensor, page_size: int) -> AttentionMetadata:
        """Everything that is the same for all layers of a step.

        `page_table` is [slots, pages_per_request] of integers on the device; the rows' pages are already entered,
        those of the tokens computed in this step included.
        """

    def run(self, query: Tensor, kv: KVCache, layer: int, metadata: AttentionMetadata) -> Tensor:
        """Attend to the K/V of the rows' tokens, which are stored already.

        Args:
            query: [tokens, heads, head_dim], rope applied; padding may follow the rows' tokens.
            kv: the K/V cache.
            layer: number of the layer.
            metadata: what `plan` made for this step.

        Returns:
            [tokens, heads, head_dim].
        """


@runtime_checkable
class GraphAttention(Protocol):
    """A backend whose decode steps can be captured as a CUDA graph."""

    def plan_decode(self, slots: Tensor, positions: Tensor, page_table: Tensor, page_size: int) -> AttentionMetadata:
        """Metadata of a step of decode rows only, over tensors whose contents change from replay to replay.

        It is part of what is captured. An ordinary launch must follow before layers run (see `ops.triton.launch`).

        Args:
            slots: [rows] int32; row i is token i.
            positions: [rows] int32; a row attends to all positions up to its own.
            page_table: [slots, pages] int32.
            page_size: tokens a page.
        """


@runtime_checkable
class TableAttention(Protocol):
    """A backend whose metadata of any step can be tables of a fixed length, so that steps alike in size share a graph.

    A step may have padding tokens behind its real ones, which no row names. Rows of more than `longest_row` queries
    have no tables.
    """

    longest_row: int

    def table_length(self, num_tokens: int, num_rows: int) -> int:
        """How many int32 tell of a step of so many tokens and so many rows that draw."""

    def tables(self, layout: RowLayout, num_tokens: int, num_rows: int, spare_slot: int) -> array[int] | None:
        """The tables of a step, `table_length` numbers; None: its rows do not fit."""

    def plan_tables(
        self, tables: Tensor, num_tokens: int, num_rows: int, page_table: Tensor, page_size: int
    ) -> AttentionMetadata:
        """Metadata over tables on the device, whose contents change from replay to replay; part of what is captured."""


@runtime_checkable
class FusedAttention(Protocol):
    """A backend that also does the work of `Ops.prepare_qkv` in some steps."""

    def prepares(self, metadata: AttentionMetadata) -> bool:
        """Whether `prepare_and_run` serves the step of this metadata."""

    def prepare_and_run(
        self,
        qkv: Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        kv: KVCache,
        layer: int,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """`Ops.prepare_qkv`, which stores the tokens' K and V, and `run`.

        Args:
            qkv: [tokens, heads + 2 * kv_heads, head_dim].
            rotation: the tokens' angles.
            norms: weights of the normalisation, or None.
            kv: the K/V cache.
            layer: number of the layer.
            metadata: of a step for which `prepares` is true.

        Returns:
            [tokens, heads, head_dim].
        """
