"""Spans of a run: what the host does for each step, and when the device computes it.

A tracer is given to the loop and to the engine while they are to be watched; without one they pay one `if` a span.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

DEVICE = "device"
NO_STEP = -1


class Clock:
    """Marks points in the device's work: of one that works in the thread that marks."""

    def stamp(self) -> Any:
        """A mark behind all work given to the device so far."""
        return time.perf_counter_ns()

    def nanoseconds(self, stamps: Sequence[Any]) -> list[int]:
        """When the device came to these marks, which are in its order, on the scale of `time.perf_counter_ns`."""
        return list(stamps)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time on a thread, or on the track `DEVICE`. Times are in nanoseconds."""

    track: str
    name: str
    step: int
    begin: int
    end: int


class Tracer:
    """Collects spans. Phases of a thread follow one another; those of `watch` lie inside the phase that is open.

    `clock` marks the device's work: from phase "forward" to the end of what is watched. `sizes` has each step's rows
    and tokens.
    """

    def __init__(self, clock: Clock, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self.sizes: dict[int, tuple[int, int]] = {}
        self._clock, self._now = clock, now
        self._open: defaultdict[str, list[tuple[str, int, int]]] = defaultdict(list)  # by thread: name, step, begin
        self._closed: list[Span] = []
        self._device: list[tuple[int, Any, Any]] = []  # step, begin, end

    def enter(self, name: str, step: int = NO_STEP) -> None:
        """End this thread's innermost phase and begin the next. One without a step belongs to the next one's step."""
        at = self.leave(step) if self._open[threading.current_thread().name] else self._now()
        self._open[threading.current_thread().name].append((name, step, at))

    def leave(self, next_step: int = NO_STEP) -> int:
        """End this thread's innermost phase, now."""
        track, at = threading.current_thread().name, self._now()
        name, step, begin = self._open[track].pop()
        self._closed.append(Span(track, name, next_step if step == NO_STEP else step, begin, at))
        return at

    def launch(self, step: int, rows: int, tokens: int) -> None:
        """Enter the phase "launch" of a step of this size."""
        self.enter("launch", step)
        self.sizes[step] = rows, tokens

    def watch(self, step: int, work: Callable[[], T]) -> Callable[[], T]:
        """`work` with phases of its own, of which "stage" is the first and "forward" the first on the device."""

        def watched() -> T:
            self._open[threading.current_thread().name].append(("stage", step, self._now()))
            try:
                return work()
            finally:
                self.leave()
                if self._device and self._device[-1][0] == step:
                    self._device[-1] = (*self._device[-1][:2], self._clock.stamp())

        return watched

    def forward(self, step: int) -> None:
        """Enter the phase "forward": the device's work begins."""
        self.enter("forward", step)
        self._device.append((step, self._clock.stamp(), None))

    def spans(self) -> list[Span]:
        """Everything that has ended, in order of begin; waits for the device."""
        done = [entry for entry in self._device if entry[2] is not None]
        times = iter(self._clock.nanoseconds([mark for entry in done for mark in entry[1:]]))
        device = [Span(DEVICE, "step", step, next(times), next(times)) for step, _, _ in done]
        return sorted((*self._closed, *device), key=lambda span: (span.begin, -span.end))

    def write(self, path: Path) -> None:
        """Write the spans in Chrome's trace format, which Perfetto (ui.perfetto.dev) shows."""
        spans = self.spans()
        start = spans[0].begin if spans else 0
        tracks = list(dict.fromkeys(span.track for span in spans))
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": name}}
            for number, name in enumerate(tracks)
        ]
        for span in spans:
            at = {"pid": 1, "tid": tracks.index(span.track), "ts": (span.begin - start) / 1000}
            took, step = (span.end - span.begin) / 1000, {"step": span.step}
            events.append({"ph": "X", "name": span.name, **at, "dur": took, "args": step})
            if span.name == "launch":
                rows, tokens = self.sizes[span.step]
                events.append({"ph": "C", "name": "step", **at, "args": {"rows": rows, "tokens": tokens}})
        path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))
