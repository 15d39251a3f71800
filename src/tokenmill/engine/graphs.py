"""CUDA graphs of decode steps: one for each batch size and way of drawing, replayed over the same buffers."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.engine.device import CudaDevice

SPARE_UPDATES = 64  # page updates beyond one a row that a graph has room for


class Draw(enum.Enum):
    """What a graph ends with."""

    PLAIN = "ids, no row has top_k or top_p"
    FILTERED = "ids"
    LOGITS = "logits, for rows whose logits are adjusted before the draw"


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """A captured step of `batch` rows. `numbers` and `output` are its input and output, the same in every replay."""

    graph: torch.cuda.CUDAGraph
    batch: int
    numbers: Tensor  # int32: [3, batch] token ids, positions, slots; then [batch + SPARE_UPDATES, 3] page updates
    output: Tensor  # [batch] int64, or [batch, vocab] in the model's type


Body = Callable[[Tensor, Tensor, Draw], Tensor]  # columns [3, batch], page updates [n, 3], how to draw; gives `output`


def batch_sizes(most: int) -> list[int]:
    """Batch sizes that are captured: 1, 2, 4, 8, then every 8."""
    return [size for size in (1, 2, 4, *range(8, most + 8, 8)) if size <= most or size - most < 8] if most else []


class DecodeGraphs:
    """Graphs by batch size. Rows that a step lacks are filled with the spare slot, updates with its page."""

    def __init__(self, body: Body, most: int, device: CudaDevice, *, spare_slot: int, spare_page: int) -> None:
        self._body = body
        self._sizes = batch_sizes(most)
        self._most = most
        self._device = device
        self._spare_row = (0, 0, spare_slot)
        self._spare_update = array("i", [spare_slot, 0, spare_page])
        self._graphs: dict[tuple[int, Draw], DecodeGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def get(self, rows: int, draw: Draw) -> DecodeGraph:
        """The graph for so many rows, at most the greatest batch; captured now if it was not."""
        size = next(size for size in self._sizes if size >= rows)
        found = self._graphs.get((size, draw))
        if found is None:
            found = self._graphs[size, draw] = self._capture(size, draw)
        return found

    def capture_all(self, draw: Draw) -> None:
        """Capture every size, largest first, so that the smaller ones fit into its memory."""
        for size in reversed(self._sizes):
            self.get(min(size, self._most), draw)

    def replay(self, graph: DecodeGraph, columns: Sequence[array[int]], updates: array[int]) -> Tensor:
        """Run a step: one copy to the device, one launch.

        Args:
            graph: of at least as many rows.
            columns: token ids or -1, positions, slots, one number a row.
            updates: page updates as (slot, index, page); at most `room(graph)`.
        """
        numbers = array("i")
        spare = graph.batch - len(columns[0])
        for column, filler in zip(columns, self._spare_row, strict=True):
            numbers += column + array("i", [filler]) * spare
        numbers += updates + self._spare_update * (room(graph) - len(updates) // 3)
        graph.numbers.copy_(self._device.stage(numbers), non_blocking=True)
        graph.graph.replay()
        return graph.output

    def _capture(self, size: int, draw: Draw) -> DecodeGraph:
        spare = array("i")
        for filler in self._spare_row:
            spare.extend([filler] * size)
        spare += self._spare_update * (size + SPARE_UPDATES)
        numbers = self._device.upload(spare)
        columns, updates = numbers[: 3 * size].view(3, size), numbers[3 * size :].view(-1, 3)
        self._body(columns, updates, draw)  # compiles kernels and makes library handles, which a capture must not
        self._device.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            output = self._body(columns, updates, draw)
        finally:
            graph.capture_end()
        return DecodeGraph(graph, size, numbers, output)


def room(graph: DecodeGraph) -> int:
    """Page updates that a replay takes."""
    return graph.batch + SPARE_UPDATES
