"""A tracer's clock on CUDA: events in the stream, read when the run is over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from tokenmill.trace import Clock


class EventClock(Clock):
    """Marks lie in the stream that is current; nothing waits for one until it is read."""

    def __init__(self) -> None:
        self._origin = self.stamp()
        self._origin.synchronize()
        self._origin_at = time.perf_counter_ns()

    def stamp(self) -> torch.cuda.Event:
        """See `Clock.stamp`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def nanoseconds(self, stamps: Sequence[torch.cuda.Event]) -> list[int]:
        """See `Clock.nanoseconds`. Summed from mark to mark: over a whole run float32 milliseconds are too coarse."""
        if stamps:
            stamps[-1].synchronize()
        steps = (1e6 * before.elapsed_time(mark) for before, mark in pairwise([self._origin, *stamps]))
        return [round(at) for at in accumulate(steps, initial=self._origin_at)][1:]
