"""`tokenmill bench kernels`: each operation at the model's shapes, as the engine calls it, beside a copy of memory."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise
from typing import TypeVar

import torch

from tokenmill.attention.select import make_backend
from tokenmill.bench.operations import Call, Case, Operations
from tokenmill.bench.options import KernelOptions
from tokenmill.bench.report import Cell, Report, describe
from tokenmill.config import RunConfig, resolve
from tokenmill.engine.device import CpuDevice, CudaDevice, measure_hardware, open_device
from tokenmill.engine.event_clock import EventClock
from tokenmill.errors import ConfigError
from tokenmill.hub import resolve_model
from tokenmill.ops.select import make_ops
from tokenmill.trace import Clock, HostClock
from tokenmill.weights.checkpoint import open_checkpoint
from tokenmill.weights.hf_folder import read_spec

T = TypeVar("T")

TRIALS = 5
COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}
PROMPT = {"cpu": 1024, "cuda": 8192}
COLUMNS = ("operation", "rows", "us", "MB", "GB/s", "% of copy", "TFLOP/s")


class Timer:
    """Times calls on a device, captured ones in a CUDA graph where there are any. For use in submitted work."""

    def __init__(self, device: CpuDevice | CudaDevice) -> None:
        self._device = device
        self._clock: Clock = HostClock() if isinstance(device, CpuDevice) else EventClock()

    def micros(self, calls: Sequence[Call], *, is_captured: bool) -> float:
        """The median time of one of `calls`, in microseconds; all are done once before that."""
        if is_captured and isinstance(self._device, CudaDevice):
            return self._median([self._device.capture(partial(_all, calls)).replay]) / len(calls)
        return self._median(calls)

    def _median(self, calls: Sequence[Callable[[], object]]) -> float:
        _all(calls)
        stamps = [self._clock.stamp()]
        for _ in range(TRIALS):
            _all(calls)
            stamps.append(self._clock.stamp())
        times = self._clock.nanoseconds(stamps)
        return statistics.median(end - begin for begin, end in pairwise(times)) / len(calls) / 1000


def _all(calls: Sequence[Callable[[], T]]) -> T:
    return [call() for call in calls][-1]


def run(run_config: RunConfig, options: KernelOptions, *, as_json: bool) -> None:
    """Measure and print. No weights are loaded.

    Raises:
        TokenmillError: a size is below 1; the model cannot be found or read, or a setting cannot work.
    """
    sizes = (("--rows", min(options.rows, default=0)), ("--context", options.context), ("--prompt", options.prompt))
    for flag, size in sizes:
        if size is not None and size < 1:
            raise ConfigError(f"{flag} must be at least 1, not {size}")
    files = resolve_model(run_config.model.model, needs_weights=False)
    spec = read_spec(files.path) if files.path.is_dir() else open_checkpoint(files.path).spec
    hardware = measure_hardware(run_config.engine.device)
    config = resolve(run_config, hardware, spec)
    place, dtype = torch.device(config.device), getattr(torch, config.dtype)
    attention = make_backend(run_config.engine.attention, spec, dtype, place)
    ops = make_ops("triton" if config.device == "cuda" else "reference", place)
    report = Report(describe(files.name, dataclasses.replace(config, attention=attention.name)), as_json=as_json)
    device = open_device(config)
    operations = Operations(spec, ops, attention, dtype, place, page_size=config.page_size, upload=device.upload)
    cases = operations.cases(options.rows, options.context, options.prompt or PROMPT[config.device])
    with closing(device):
        device.submit(partial(_measure, device, cases, report)).wait()


def _measure(device: CpuDevice | CudaDevice, cases: Iterator[Case], report: Report) -> None:
    timer = Timer(device)
    source, target = torch.ones(2, COPY_BYTES[device.torch_device.type], dtype=torch.uint8, device=device.torch_device)
    num_bytes = 2 * source.nbytes
    peak = 1e-3 * num_bytes / timer.micros([partial(target.copy_, source)], is_captured=False)
    report.line(operation="copy", bytes=num_bytes, gb_s=peak)
    table: list[Sequence[Cell]] = [("copy", None, None, 1e-6 * num_bytes, peak, 100.0, None)]
    del source, target
    for case in cases:
        micros = timer.micros(case.calls, is_captured=case.is_captured)
        rate, flops = 1e-3 * case.num_bytes / micros, 1e-6 * case.num_flops / micros
        table.append((case.name, str(case.rows), micros, 1e-6 * case.num_bytes, rate, 100 * rate / peak, flops))
        report.line(
            operation=case.name,
            rows=case.rows,
            us=micros,
            bytes=case.num_bytes,
            gb_s=rate,
            share_of_copy=rate / peak,
            tflop_s=flops,
        )
    report.table(COLUMNS, table)
