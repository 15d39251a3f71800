"""Spans of a run: what the host does for each step, and when the device computes it.

A tracer is given to the loop and to the engine while they are to be watched; without one they pay one `if` a span.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

DEVICE = "device"
NO_STEP = -1


class Clock(Protocol):
    """Marks points in the device's work."""

    def stamp(self) -> Any:
        """A mark behind all work given to the device so far."""

    def nanoseconds(self, stamps: Sequence[Any]) -> list[int]:
        """When the device came to these marks, which are in its order, on the scale of `time.perf_counter_ns`."""


class HostClock:
    """For devices that work in the thread that marks."""

    def stamp(self) -> int:
        """Now."""
        return time.perf_counter_ns()

    def nanoseconds(self, stamps: Sequence[int]) -> list[int]:
        """The marks themselves."""
        return list(stamps)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time on a thread, or on the track `DEVICE`. Times are in nanoseconds since the start."""

    track: str
    name: str
    step: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a step computes; `at` is when it was launched, in nanoseconds since the start."""

    step: int
    rows: int
    tokens: int
    at: int


class Tracer:
    """Collects spans. Phases of a thread follow one another; those of `watch` lie inside the phase that is open.

    `clock` marks the device's work: from phase "forward" to the end of what is watched.
    """

    def __init__(self, clock: Clock, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self.sizes: list[StepSize] = []
        self._clock, self._now, self._start = clock, now, now()
        self._open: dict[str, list[tuple[str, int, int]]] = {}  # by thread: name, step, begin; the innermost last
        self._closed: list[Span] = []
        self._device: list[tuple[int, Any, Any]] = []

    def enter(self, name: str, step: int = NO_STEP) -> None:
        """End this thread's innermost phase and begin the next. One without a step belongs to the next one's step."""
        track = threading.current_thread().name
        phases = self._open.setdefault(track, [])
        at = self._now()
        if phases:
            ended, its_step, begin = phases.pop()
            self._closed.append(Span(track, ended, step if its_step == NO_STEP else its_step, begin, at))
        phases.append((name, step, at))

    def leave(self) -> None:
        """End this thread's innermost phase."""
        track = threading.current_thread().name
        name, step, begin = self._open[track].pop()
        self._closed.append(Span(track, name, step, begin, self._now()))

    def launch(self, step: int, rows: int, tokens: int) -> None:
        """Enter the phase "launch" of a step of this size."""
        self.enter("launch", step)
        self.sizes.append(StepSize(step, rows, tokens, self._now() - self._start))

    def watch(self, step: int, work: Callable[[], T]) -> Callable[[], T]:
        """`work` with phases of its own, of which "stage" is the first and "forward" the first on the device."""

        def watched() -> T:
            self._open.setdefault(threading.current_thread().name, []).append(("stage", step, self._now()))
            try:
                return work()
            finally:
                self.leave()
                if self._device and self._device[-1][0] == step:
                    self._device[-1] = (step, self._device[-1][1], self._clock.stamp())

        return watched

    def forward(self, step: int) -> None:
        """Enter the phase "forward": the device's work begins."""
        self.enter("forward", step)
        self._device.append((step, self._clock.stamp(), None))

    def spans(self) -> list[Span]:
        """Everything that has ended, in order of begin; waits for the device."""
        done = [(step, begin, end) for step, begin, end in self._device if end is not None]
        times = iter(self._clock.nanoseconds([mark for _, begin, end in done for mark in (begin, end)]))
        device = [Span(DEVICE, "step", step, next(times), next(times)) for step, _, _ in done]
        found = [
            Span(span.track, span.name, span.step, span.begin - self._start, span.end - self._start)
            for span in (*self._closed, *device)
        ]
        return sorted(found, key=lambda span: (span.begin, -span.end))

    def write(self, path: Path) -> None:
        """Write the spans in Chrome's trace format, which Perfetto (ui.perfetto.dev) shows."""
        spans = self.spans()
        tracks = {name: number for number, name in enumerate(dict.fromkeys(span.track for span in spans), 1)}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": name}}
            for name, number in tracks.items()
        ]
        for span in spans:
            times = {"ts": span.begin / 1000, "dur": (span.end - span.begin) / 1000}
            place = {"pid": 1, "tid": tracks[span.track]}
            events.append({"ph": "X", "name": span.name, **times, **place, "args": {"step": span.step}})
        for size in self.sizes:
            counts = {"rows": size.rows, "tokens": size.tokens}
            events.append({"ph": "C", "name": "step", "pid": 1, "ts": size.at / 1000, "args": counts})
        path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))
