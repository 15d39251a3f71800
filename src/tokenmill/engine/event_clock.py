"""A tracer's clock on CUDA: events in the stream, read when the run is over."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch


class EventClock:
    """See `trace.Clock`. Marks lie in the stream that is current; nothing waits for one until it is read."""

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
        found, before, at = [], self._origin, float(self._origin_at)
        for stamp in stamps:
            at += before.elapsed_time(stamp) * 1e6
            found.append(round(at))
            before = stamp
        return found
