"""CUDA graphs of steps that compute prompts, alone or beside decode rows.

Launched one by one, the kernels of a small step take the host longer than the device. Steps are padded to a few sizes,
and captured for those sizes that steps ask for.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import product

from torch import Tensor

from tokenmill.engine.device import Captured, GraphDevice
from tokenmill.engine.graphs import SPARE_UPDATES, CaptureBudget, Draw

TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, *range(3072, 1 << 16, 1024))
ROWS = (8, 32, 64, 128, 192, 256)  # that draw


def sizes_below(most: int, sizes: Iterable[int]) -> list[int]:
    """Those of `sizes` below `most`, and `most`."""
    return [*(size for size in sizes if size < most), most]


@dataclass(frozen=True, slots=True, order=True)
class MixedSize:
    """What a graph has room for."""

    tokens: int
    rows: int

    @property
    def updates(self) -> int:
        """Page updates."""
        return self.tokens // 8 + self.rows + SPARE_UPDATES


@dataclass(frozen=True, slots=True)
class MixedGraph:
    """A captured step. `numbers` is its input, the same in every replay."""

    captured: Captured  # gives [rows] int64
    size: MixedSize
    numbers: Tensor  # int32, as the engine lays them out


class MixedGraphs:
    """Graphs by size and way of drawing."""

    def __init__(
        self,
        body: Callable[[Tensor, MixedSize, Draw], Tensor],
        spare_numbers: Callable[[MixedSize], array[int]],
        most: MixedSize,
        device: GraphDevice,
        budget: CaptureBudget,
    ) -> None:
        self._body, self._spare_numbers = body, spare_numbers
        self._device, self._budget = device, budget
        sizes = product(sizes_below(most.tokens, TOKENS), sizes_below(most.rows, ROWS))
        self._sizes = [MixedSize(*its) for its in sizes]
        self._graphs: dict[tuple[MixedSize, Draw], MixedGraph] = {}
        self._asked: dict[tuple[MixedSize, Draw], None] = {}  # and not captured yet

    def get(self, num_tokens: int, num_rows: int, draw: Draw) -> MixedGraph | None:
        """A graph with room for a step, not much larger than it; captured now if that is due. None: run it eagerly."""
        size = next((its for its in self._sizes if its.tokens >= num_tokens and its.rows >= num_rows), None)
        if size is None:
            return None
        key = size, draw
        if key not in self._graphs:
            self._asked[key] = None
            if self._budget.is_due:
                self._capture(key, step_waits=True)
        fitting = (
            (its, draw)
            for its in self._sizes
            if size.tokens <= its.tokens <= 2 * size.tokens and its.rows >= size.rows and (its, draw) in self._graphs
        )
        return self._graphs.get(next(fitting, key))

    def has_missing(self) -> bool:
        """Whether `capture_next` has anything to do."""
        return self._budget.has_room and bool(self._asked)

    def capture_next(self) -> None:
        """Capture the size that was asked for first."""
        self._capture(next(iter(self._asked)), step_waits=False)

    def replay(self, graph: MixedGraph, numbers: array[int]) -> Tensor:
        """Run a step: one copy to the device, one launch. The output is valid until the next replay."""
        graph.numbers.copy_(self._device.stage(numbers), non_blocking=True)
        graph.captured.replay()
        return graph.captured.output

    def _capture(self, key: tuple[MixedSize, Draw], *, step_waits: bool) -> None:
        size, draw = key
        del self._asked[key]
        numbers = self._device.upload(self._spare_numbers(size))
        body = partial(self._body, numbers, size, draw)
        captured = self._budget.capture(body, f"{size.tokens} tokens", step_waits=step_waits)
        if captured is not None:
            self._graphs[key] = MixedGraph(captured, size, numbers)
