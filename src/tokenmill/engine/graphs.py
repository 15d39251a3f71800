"""CUDA graphs of decode steps: one for each batch size and way of drawing, replayed over the same buffers.

Steps never wait for all of them: one whose size has no graph takes a larger one, or runs eagerly. A graph is captured
when a step asks for it, as long as captures take a small share of the time, and when there is nothing else to do.
"""

from __future__ import annotations

import enum
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tokenmill.engine.device import Captured, GraphDevice
from tokenmill.spec import ModelSpec

SPARE_UPDATES = 64  # page updates beyond one a row that a graph has room for
CAPTURE_SHARE = 0.15  # of the time, at most, that steps wait for captures
DRIVER_BYTES = 3 << 20  # about what the driver keeps for a graph
LONG_STEP = 1.5e12  # multiplications that keep a large GPU busy for longer than a host takes to launch them

log = logging.getLogger(__name__)


class Draw(enum.Enum):
    """What a graph ends with."""

    PLAIN = "ids, no row has top_k, top_p or min_p"
    FILTERED = "ids"
    LOGITS = "logits, for rows whose logits are adjusted before the draw"


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """A captured step of `batch` rows. `numbers` is its input, the same in every replay."""

    captured: Captured  # gives [batch] int64, or [batch, vocab] in the model's type
    batch: int
    numbers: Tensor  # int32: [3, batch] token ids, positions, slots; then [batch + SPARE_UPDATES, 3] page updates


Body = Callable[[Tensor, Tensor, Draw], Tensor]  # columns [3, batch], page updates [n, 3], how to draw; gives `output`


def batch_sizes(most: int, draw: Draw = Draw.PLAIN) -> list[int]:
    """Batch sizes that are captured: 1, 2, 4, 8, then every 8; of logits, which are large, powers of two."""
    sizes = [size for size in (1, 2, 4, *range(8, most + 8, 8)) if size <= most or size - most < 8] if most else []
    return [size for size in sizes if draw is not Draw.LOGITS or size & (size - 1) == 0 or size == sizes[-1]]


def graph_bytes(spec: ModelSpec, most: int, most_tokens: int, element_size: int) -> int:
    """About the memory of all graphs: the largest step's tensors, which all share; logits; what the driver keeps.

    `most` rows in a decode step, `most_tokens` in a step with prompts.
    """
    heads = spec.num_heads + 2 * spec.num_kv_heads
    widths = 4 * spec.hidden_size + 2 * heads * spec.head_dim + 3 * spec.intermediate_size
    if spec.experts is not None:  # their results, and those in between; a list of tokens for each
        widths += spec.experts.num_chosen * (spec.hidden_size + spec.experts.size) + 2 * spec.experts.num_experts
    logits = (most + sum(batch_sizes(most, Draw.LOGITS))) * spec.vocab_size
    count = sum(len(batch_sizes(most, draw)) for draw in Draw)
    return ((most_tokens * widths + logits) * element_size + count * DRIVER_BYTES) if most else 0


def most_graph_tokens(spec: ModelSpec, most_tokens: int) -> int:
    """The tokens of the largest step that a graph is made for, of at most `most_tokens`.

    A longer one computes for longer than its kernels take to launch, and a capture computes it once more.
    """
    return min(most_tokens, int(LONG_STEP / spec.weights_per_token()))


class CaptureBudget:
    """When graphs of one kind may be captured: while there is memory, and captures took a small share of the time.

    Nothing is captured while `is_open()` is false, or unless all ranks `agree`.
    """

    def __init__(
        self,
        device: GraphDevice,
        is_open: Callable[[], bool] = lambda: True,
        agree: Callable[[bool], bool] = lambda wish: wish,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._device = device
        self._is_open, self._agree = is_open, agree
        self._clock, self._began = clock, clock()
        self._waited = 0.0  # seconds that steps waited for captures
        self._has_room = True
        self.spent, self.count, self.num_bytes = 0.0, 0, 0  # seconds, graphs and bytes, all in all

    @property
    def has_room(self) -> bool:
        """Whether an idle moment may be used for a capture."""
        return self._has_room and self._agree(self._is_open())

    @property
    def is_due(self) -> bool:
        """Whether a step may wait for a capture."""
        is_cheap = self._waited < CAPTURE_SHARE * (self._clock() - self._began)
        return self._has_room and self._agree(self._is_open() and is_cheap)

    def capture(self, work: Callable[[], Tensor], what: str, *, step_waits: bool) -> Captured | None:
        """Capture `work`, which enqueues a step; None: there is no memory for it."""
        began = self._clock()
        captured = None
        try:
            captured = self._device.capture(work)
        except torch.OutOfMemoryError:
            log.debug("out of memory", exc_info=True)
        if self._agree(captured is not None) and captured is not None:
            self.count += 1
            self.num_bytes += captured.num_bytes
        else:
            self._has_room, captured = False, None
            log.warning(
                "no memory for a CUDA graph of %s: no more of its kind are captured, steps that lack one are slower; "
                "lower --memory-fraction or --graph-max-batch",
                what,
            )
        took = self._clock() - began
        self.spent += took
        self._waited += took if step_waits else 0.0
        return captured


class DecodeGraphs:
    """Graphs by batch size. Rows that a step lacks are filled with the spare slot, updates with its page."""

    def __init__(
        self,
        body: Body,
        most: int,
        device: GraphDevice,
        budget: CaptureBudget,
        *,
        spare_slot: int,
        spare_page: int,
    ) -> None:
        self._body = body
        self._device, self._budget = device, budget
        self._spare_row = (0, 0, spare_slot)
        self._spare_update = array("i", [spare_slot, 0, spare_page])
        self._sizes = {draw: batch_sizes(most, draw) for draw in Draw}
        self._graphs: dict[Draw, dict[int, DecodeGraph]] = {Draw.PLAIN: {}}  # of the ways of drawing asked for so far
        self._asked = self._sizes[Draw.PLAIN][-1], Draw.PLAIN

    def get(self, rows: int, draw: Draw) -> DecodeGraph | None:
        """A graph for at least so many rows, at most the greatest batch; captured now if that is due. None: not yet."""
        graphs = self._graphs.setdefault(draw, {})
        size = next(size for size in self._sizes[draw] if size >= rows)
        if size in graphs:
            return graphs[size]
        self._asked = size, draw
        if self._budget.is_due:
            # The largest first: its memory is enough for all others, and it can stand in for them.
            self._capture(size if graphs else self._sizes[draw][-1], draw, step_waits=True)
        return graphs.get(min((larger for larger in graphs if larger >= rows), default=0))

    def has_missing(self) -> bool:
        """Whether `capture_next` has anything to do."""
        has_room = self._budget.has_room
        return has_room and any(len(graphs) < len(self._sizes[draw]) for draw, graphs in self._graphs.items())

    def capture_next(self) -> None:
        """Capture a graph that is missing: the one last asked for, else the largest."""
        missing = [
            (size, draw) for draw in self._graphs for size in self._sizes[draw] if size not in self._graphs[draw]
        ]
        largest_first = sorted(missing, key=lambda its: -its[0])
        is_asked = self._asked in missing and self._graphs[self._asked[1]]
        self._capture(*(self._asked if is_asked else largest_first[0]), step_waits=False)
        budget = self._budget
        if budget.num_bytes and not self.has_missing():
            log.info("%d CUDA graphs captured in %.1f s, %d MiB", budget.count, budget.spent, budget.num_bytes >> 20)

    def replay(self, graph: DecodeGraph, columns: Sequence[array[int]], updates: array[int]) -> Tensor:
        """Run a step: one copy to the device, one launch.

        Args:
            graph: of at least as many rows.
            columns: token ids or -1, positions, slots, one number a row.
            updates: page updates as (slot, index, page); at most `room(graph)`.

        Returns:
            the graph's output, valid until the next replay.
        """
        numbers = array("i")
        spare = graph.batch - len(columns[0])
        for column, filler in zip(columns, self._spare_row, strict=True):
            numbers += column + array("i", [filler]) * spare
        numbers += updates + self._spare_update * (room(graph) - len(updates) // 3)
        graph.numbers.copy_(self._device.stage(numbers), non_blocking=True)
        graph.captured.replay()
        return graph.captured.output

    def _capture(self, size: int, draw: Draw, *, step_waits: bool) -> None:
        spare = array("i")
        for filler in self._spare_row:
            spare.extend([filler] * size)
        numbers = self._device.upload(spare + self._spare_update * (size + SPARE_UPDATES))
        columns, updates = numbers[: 3 * size].view(3, size), numbers[3 * size :].view(-1, 3)
        body = partial(self._body, columns, updates, draw)
        captured = self._budget.capture(body, f"{size} rows", step_waits=step_waits)
        if captured is not None:
            self._graphs[draw][size] = DecodeGraph(captured, size, numbers)


def room(graph: DecodeGraph) -> int:
    """Page updates that a replay takes."""
    return graph.batch + SPARE_UPDATES
