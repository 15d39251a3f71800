"""What a trace says about the steps: the host's time by phase, and the share of time the device waits for it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from tokenmill.bench.report import Cell, Report
from tokenmill.engine.event_clock import EventClock
from tokenmill.errors import ConfigError
from tokenmill.trace import DEVICE, HostClock, Span, StepSize, Tracer

ROW_BOUNDS = (1, 8, 64, 192, 256)
COLUMNS = ("steps", "rows", "count", "plan", "stage", "launch", "commit", "host", "device", "idle %")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step in microseconds. `stage` is the host's part of it; on a CPU the device's thread stages.

    `launch` is the rest of launching. `gap` is how long the device waits between the step before and this one; None
    unless both are decode steps.
    """

    size: StepSize
    plan: float
    stage: float
    launch: float
    commit: float
    device: float
    gap: float | None

    @property
    def host(self) -> float:
        """All that the host does for the step."""
        return self.plan + self.stage + self.launch + self.commit

    @property
    def is_decode(self) -> bool:
        """Whether every row computes one token."""
        return self.size.rows == self.size.tokens


def check_file(path: Path | None) -> None:
    """Refuse a trace file that cannot be written, before anything is measured.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        if path is not None:
            path.touch()
    except OSError as error:
        raise ConfigError(f"--profile {path} cannot be written: {error.strerror}") from None


@contextmanager
def profiled(path: Path | None, device: Literal["cpu", "cuda"], report: Report) -> Iterator[Tracer | None]:
    """A tracer, which at the end is written to `path` and summed up; None without a path."""
    if path is None:
        yield None
        return
    tracer = Tracer(HostClock() if device == "cpu" else EventClock())
    yield tracer
    tracer.write(path)
    show_summary(tracer, report)


def step_times(spans: Sequence[Span], sizes: Sequence[StepSize]) -> list[StepTimes]:
    """The steps that were launched, computed and committed, in order."""
    host = next((span.track for span in spans if span.name == "launch"), "")
    times: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    device: dict[int, Span] = {}
    for span in spans:
        if span.track == DEVICE:
            device[span.step] = span
        elif span.track == host:
            times[span.name][span.step] += (span.end - span.begin) / 1000
    decodes = {size.step for size in sizes if size.rows == size.tokens}
    found = []
    for size in sizes:
        step, own, before = size.step, device.get(size.step), device.get(size.step - 1)
        if own is None or step not in times["commit"]:
            continue
        follows = {step, step - 1} <= decodes
        found.append(
            StepTimes(
                size=size,
                plan=times["plan"][step],
                stage=times["stage"][step],
                launch=times["launch"][step] - times["stage"][step],
                commit=times["commit"][step],
                device=(own.end - own.begin) / 1000,
                gap=max(0, own.begin - before.end) / 1000 if before is not None and follows else None,
            )
        )
    return found


def idle_share(steps: Sequence[StepTimes]) -> float | None:
    """The share of decode steps' time in which the device waits for the host; None when none follows another."""
    following = [(its.gap, its.device) for its in steps if its.gap is not None]
    waited = sum(gap for gap, _ in following)
    return waited / (waited + sum(device for _, device in following)) if following else None


def show_summary(tracer: Tracer, report: Report) -> None:
    """Print medians in microseconds by kind and size of the steps; idle time is told of decode steps only."""
    steps = step_times(tracer.spans(), tracer.sizes)
    rows: list[Sequence[Cell]] = []
    for kind, least, most, chosen in _classes(steps):
        medians = {name: statistics.median(getattr(its, name) for its in chosen) for name in COLUMNS[3:9]}
        idle = idle_share(chosen)
        report.line(profile=kind, rows=[least, most], steps=len(chosen), us=medians, idle_share=idle)
        span = str(least) if least == most else f"{least}–{most}"
        rows.append((kind, span, str(len(chosen)), *medians.values(), None if idle is None else 100 * idle))
    report.table(COLUMNS, rows)


def _classes(steps: Sequence[StepTimes]) -> Iterator[tuple[str, int, int, list[StepTimes]]]:
    """Steps by kind and number of rows: name, least and most rows, the steps."""
    bounds = (0, *ROW_BOUNDS, max([ROW_BOUNDS[-1] + 1, *(its.size.rows for its in steps)]))
    for kind, is_decode in (("decode", True), ("mixed", False)):
        for below, most in pairwise(bounds):
            chosen = [its for its in steps if its.is_decode is is_decode and below < its.size.rows <= most]
            if chosen:
                yield kind, below + 1, most, chosen
