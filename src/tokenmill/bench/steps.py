"""`tokenmill bench steps`: how long steps take by what is in them, and a cost model fitted to that."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import msgspec
import numpy as np

from tokenmill.bench.online import Clients, drive
from tokenmill.bench.options import StepOptions, Synthesis, check_lengths
from tokenmill.bench.report import Report, describe
from tokenmill.bench.traces import Maker
from tokenmill.bench.workload import Job
from tokenmill.engine.base import Engine, StepHandle
from tokenmill.engine.load import load_engine
from tokenmill.errors import ConfigError
from tokenmill.hub import resolve_model
from tokenmill.parallel.group import Group
from tokenmill.sched.plan import StepPlan, StepResult
from tokenmill.sched.simulate import MICROSECOND, CostModel, Work, work_of

ROW_BOUNDS = (1, 4, 16, 64)


@dataclass(slots=True)
class Measured:
    """A step. Times are in seconds: `device` is until its end, `host` since that of the one before."""

    work: Work
    rows: int
    device: float
    host: float | None


class Stopwatch:
    """An engine whose steps are timed, one after another, and each also a handle for itself."""

    def __init__(self, engine: Engine, now: Callable[[], float] = time.perf_counter) -> None:
        self.steps: list[Measured] = []
        self.prepare, self.close = engine.prepare, engine.close
        self._engine, self._now = engine, now
        self._ended: float | None = None

    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step. The one before must have been waited for."""
        begin = self._now()
        host = None if self._ended is None else begin - self._ended
        handle = self._engine.launch(plan)
        return _Timed(handle, lambda: self._note(plan, begin, host))

    def _note(self, plan: StepPlan, begin: float, host: float | None) -> None:
        self._ended = self._now()
        self.steps.append(Measured(work_of(plan), len(plan.rows), self._ended - begin, host))


@dataclass(frozen=True, slots=True)
class _Timed:
    handle: StepHandle
    on_end: Callable[[], None]

    def wait(self) -> StepResult:
        result = self.handle.wait()
        self.on_end()
        return result


def run(options: StepOptions) -> None:
    """Serve 1, 2, 4, .. requests at once in a serial loop, fit, print how well that fits, and save the cost model.

    Raises:
        TokenmillError: a number cannot work, or the file cannot be written; what loading a model raises.
    """
    check_lengths(prompt=options.prompt, output=options.output)
    path = resolve_model(options.run.model.model, needs_weights=not options.run.model.random_weights)
    engine, resolved, spec = load_engine(options.run, path, Group.solo())
    config = dataclasses.replace(resolved, loop="serial")
    sizes = [2**power for power in range(config.max_running.bit_length()) if 2**power <= config.max_running]
    report = Report(describe(options.run.model.model, config), as_json=options.json)
    with closing(engine):
        for _ in range(1 if config.device == "cpu" else 2):  # behind the first, CUDA graphs are captured
            steps = []
            for size in (1, *sizes):
                watch = Stopwatch(engine)
                drive(watch, config, Clients(_jobs(options, size, config.max_model_len, spec.vocab_size), [0.0] * size))
                steps.append(watch.steps)
    measured = [step for its in steps[1:] for step in its]
    costs = fit(measured)
    _show(measured, costs, report)
    if options.save is not None:
        try:
            options.save.write_bytes(msgspec.json.format(msgspec.json.encode(costs)) + b"\n")
        except OSError as error:
            raise ConfigError(f"--save {options.save} cannot be written: {error.strerror}") from None


def fit(steps: Sequence[Measured]) -> CostModel:
    """The cost model nearest to these steps: least squares, a step weighing as one over its time, nothing below 0."""
    device = _least_squares([step.work for step in steps], [step.device for step in steps])
    hosts = [(step.rows, step.host) for step in steps if step.host is not None]
    host = _least_squares([(1, rows) for rows, _ in hosts], [seconds for _, seconds in hosts])
    names = ("step", "prompt_token", "prompt_row", "decode_row", "kv_token", "pair", "host_step", "host_row")
    return CostModel(**dict(zip(names, (*device, *host), strict=True)))


def _least_squares(features: Sequence[Sequence[int]], seconds: Sequence[float]) -> list[float]:
    """Microseconds a feature; the least useful are left out until none is negative."""
    matrix, micros = np.array(features, float), np.array(seconds) / MICROSECOND
    weights = 1 / np.sqrt(micros)
    active = list(range(matrix.shape[1]))
    while True:
        found = np.linalg.lstsq(matrix[:, active] * weights[:, None], micros * weights, rcond=None)[0]
        if (found >= 0).all():
            break
        del active[int(found.argmin())]
    costs = [0.0] * matrix.shape[1]
    for index, cost in zip(active, found.tolist(), strict=True):
        costs[index] = cost
    return costs


def _jobs(options: StepOptions, size: int, max_model_len: int, vocab_size: int) -> list[Job]:
    make = Maker(Synthesis(seed=options.seed + size, prompt=options.prompt, output=options.output))
    draw = random.Random(f"{options.seed}/{size}")
    found = []
    for prompt, output in (make.lengths() for _ in range(size)):
        output = min(output, max_model_len - 1)
        found.append(Job([draw.randrange(vocab_size) for _ in range(min(prompt, max_model_len - output))], output))
    return found


def _show(steps: Sequence[Measured], costs: CostModel, report: Report) -> None:
    report.line(costs="us", **{name: cost for name, cost in msgspec.structs.asdict(costs).items() if cost})
    report.table()
    classes: defaultdict[tuple[str, int], list[Measured]] = defaultdict(list)
    for step in steps:
        classes["mixed" if step.work.prompt_tokens else "decode", bisect_left(ROW_BOUNDS, step.rows)].append(step)
    bounds = (0, *ROW_BOUNDS, max(step.rows for step in steps))
    for (kind, size), chosen in sorted(classes.items()):
        times = [(1000 * step.device, 1000 * costs.device_seconds(step.work)) for step in chosen]
        means = {"measured_ms": statistics.mean(a for a, _ in times), "model_ms": statistics.mean(b for _, b in times)}
        error = statistics.median(abs(b - a) / a for a, b in times)
        rows = [bounds[size] + 1, bounds[size + 1]]
        report.line(steps=kind, rows=rows, count=len(chosen), **means, median_error=error)
    report.table()
