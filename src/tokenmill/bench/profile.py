"""What a trace says about the steps: the host's time by phase, and the share of time the device waits for it."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenmill.bench.report import Report
from tokenmill.engine.event_clock import EventClock
from tokenmill.errors import ConfigError
from tokenmill.trace import DEVICE, Clock, Span, Tracer

ROW_BOUNDS = (1, 8, 64, 192, 256)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step, in microseconds.

    `phases` are plan, stage, launch, commit, host and device. "stage" is the host's part of it: on a CPU the device's
    thread stages. "launch" is the rest of launching, "host" all that the host does. `gap` is how long the device waits
    between the step before and this one; None unless both are decode steps.
    """

    rows: int
    is_decode: bool
    phases: dict[str, float]
    gap: float | None


def check_file(path: Path | None) -> None:
    """Refuse a trace file that cannot be written, before anything is measured.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        if path is not None:
            is_new = not path.exists()
            path.touch()
            if is_new:
                path.unlink()
    except OSError as error:
        raise ConfigError(f"--profile {path} cannot be written: {error.strerror}") from None


@contextmanager
def profiled(path: Path | None, device: str, report: Report) -> Iterator[Tracer | None]:
    """A tracer, which at the end is written to `path` and summed up; None without a path."""
    if path is None:
        yield None
        return
    tracer = Tracer(Clock() if device == "cpu" else EventClock())
    yield tracer
    tracer.write(path)
    show_summary(step_times(tracer.spans(), tracer.sizes), report)


def step_times(spans: Sequence[Span], sizes: dict[int, tuple[int, int]]) -> list[StepTimes]:
    """The steps that were launched, computed and committed, in order. `sizes` are rows and tokens by step."""
    host = next((span.track for span in spans if span.name == "launch"), "")
    times: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    device: dict[int, Span] = {}
    for span in spans:
        if span.track == DEVICE:
            device[span.step] = span
        elif span.track == host:
            times[span.step][span.name] += (span.end - span.begin) / 1000
    decodes = {step for step, (rows, tokens) in sizes.items() if rows == tokens}
    found = []
    for step, (rows, _) in sizes.items():
        phases, own, before = times[step], device.get(step), device.get(step - 1)
        if own is None or "commit" not in phases:
            continue
        parts = {name: phases[name] for name in ("plan", "stage", "launch", "commit")}
        parts["launch"] -= parts["stage"]
        parts |= {"host": sum(parts.values()), "device": (own.end - own.begin) / 1000}
        gap = None
        if before is not None and {step - 1, step} <= decodes:
            gap = max(0, own.begin - before.end) / 1000
        found.append(StepTimes(rows, step in decodes, parts, gap))
    return found


def idle_share(steps: Sequence[StepTimes]) -> float | None:
    """The share of decode steps' time in which the device waits for the host; None when none follows another."""
    following = [(its.gap, its.phases["device"]) for its in steps if its.gap is not None]
    waited = sum(gap for gap, _ in following)
    return waited / (waited + sum(device for _, device in following)) if following else None


def show_summary(steps: Sequence[StepTimes], report: Report) -> None:
    """Print medians in microseconds by kind and size of the steps; idle time is told of decode steps only."""
    classes: defaultdict[tuple[str, int], list[StepTimes]] = defaultdict(list)
    for its in steps:
        classes["decode" if its.is_decode else "mixed", bisect_left(ROW_BOUNDS, its.rows)].append(its)
    bounds = (0, *ROW_BOUNDS, max((its.rows for its in steps), default=0))
    for (kind, size), chosen in sorted(classes.items()):
        medians = {name: statistics.median(its.phases[name] for its in chosen) for name in chosen[0].phases}
        rows = [bounds[size] + 1, bounds[size + 1]]
        report.line(profile=kind, rows=rows, steps=len(chosen), us=medians, idle_share=idle_share(chosen))
    report.table()
