"""`tokenmill bench kernels`: each operation at the model's shapes, as the engine calls it, beside a copy of memory."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from tokenmill.attention.select import make_backends
from tokenmill.bench.operations import Call, Case, Operations
from tokenmill.bench.options import KernelOptions
from tokenmill.bench.report import Report, describe
from tokenmill.config import resolve
from tokenmill.engine.device import Device, GraphDevice, measure_hardware, open_device
from tokenmill.engine.event_clock import EventClock
from tokenmill.errors import ConfigError
from tokenmill.hub import resolve_model
from tokenmill.ops.select import make_ops
from tokenmill.trace import Clock
from tokenmill.weights.checkpoint import read_shape

TRIALS = 5
GRAPH_CALLS = 64  # at least, so that the start of a graph counts little
PROMPT = {"cpu": 1024, "cuda": 8192}


def run(options: KernelOptions) -> None:
    """Measure and print. No weights are loaded.

    Raises:
        TokenmillError: a size is below 1; the model cannot be found or read, or a setting cannot work.
    """
    sizes = (("--rows", min(options.rows, default=0)), ("--context", options.context), ("--prompt", options.prompt))
    for flag, size in sizes:
        if size is not None and size < 1:
            raise ConfigError(f"{flag} must be at least 1, not {size}")
    path = resolve_model(options.run.model.model, needs_weights=False)
    spec = read_shape(path)
    spec = spec.within(options.run.model.max_model_len)
    config = resolve(options.run, measure_hardware(options.run.engine.device), spec)
    place = torch.device(config.device)
    attention, *_ = make_backends(options.run.engine.attention, spec, getattr(torch, config.dtype), place)
    ops = make_ops("triton" if config.device == "cuda" else "reference", place)
    report = Report(
        describe(options.run.model.model, dataclasses.replace(config, attention=attention.name)), as_json=options.json
    )
    with closing(open_device(config)) as device:
        operations = Operations(spec, ops, attention, config, device.upload)
        cases = operations.cases(options.rows, options.context, options.prompt or PROMPT[config.device])
        device.submit(partial(_measure, device, cases, report)).wait()


def _measure(device: Device, cases: Iterator[Case], report: Report) -> None:
    peak = None
    for case in cases:
        micros = _micros(device, case)
        rate, flops = 1e-3 * case.num_bytes / micros, 1e-6 * case.num_flops / micros
        peak = peak or rate  # the first is the copy
        sizes = {"operation": case.name, "rows": case.rows, "us": micros, "bytes": case.num_bytes}
        report.line(**sizes, gb_s=rate, share_of_copy=rate / peak, tflop_s=flops)
    report.table()


def _micros(device: Device, case: Case) -> float:
    """The median time of one of the case's calls, in microseconds; all are done once before that."""
    calls = list(case.calls)
    work: Callable[[], object] = partial(_call_all, calls)
    if case.is_captured and isinstance(device, GraphDevice):
        calls *= -(-GRAPH_CALLS // len(calls))
        work = device.capture(partial(_call_all, calls)).replay
    clock = EventClock() if device.torch_device.type == "cuda" else Clock()
    stamps = []
    for _ in range(1 + TRIALS):
        work()
        stamps.append(clock.stamp())
    times = clock.nanoseconds(stamps)
    return statistics.median(end - begin for begin, end in pairwise(times)) / len(calls) / 1000


def _call_all(calls: Sequence[Call]) -> Tensor:
    for call in calls:
        output = call()
    return output
