"""`tokenmill bench kernels`: each operation at the model's shapes, as the engine calls it, beside a copy of memory."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch

from tokenmill.attention.select import make_backend
from tokenmill.bench.operations import Operations
from tokenmill.bench.options import KernelOptions
from tokenmill.bench.report import Cell, Report, describe
from tokenmill.config import RunConfig, resolve, resolve_dtype
from tokenmill.engine.device import CpuDevice, CudaDevice, measure_hardware, open_device
from tokenmill.engine.event_clock import EventClock
from tokenmill.errors import ConfigError
from tokenmill.hub import resolve_model
from tokenmill.ops.select import make_ops
from tokenmill.trace import Clock, HostClock
from tokenmill.weights.checkpoint import open_checkpoint
from tokenmill.weights.hf_folder import read_spec

TRIALS = 5
COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}
PROMPT = {"cpu": 1024, "cuda": 8192}
COLUMNS = ("operation", "rows", "us", "MB", "GB/s", "% of copy", "TFLOP/s")


class Timer:
    """Times calls on a device: captured ones in a CUDA graph, where there are any."""

    def __init__(self, device: CpuDevice | CudaDevice) -> None:
        self._stream = device.stream if isinstance(device, CudaDevice) else None
        self._clock: Clock = HostClock() if self._stream is None else EventClock()

    def micros(self, calls: Sequence[Callable[[], object]], *, is_captured: bool) -> float:
        """The median time of one of `calls`, in microseconds; all are done once before that."""
        if self._stream is None:
            return self._median(calls)
        with torch.cuda.stream(self._stream):
            if not is_captured:
                return self._median(calls)
            _all(calls)
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._stream):
                _all(calls)
            return self._median([graph.replay]) / len(calls)

    def _median(self, calls: Sequence[Callable[[], object]]) -> float:
        _all(calls)
        stamps = [self._clock.stamp()]
        for _ in range(TRIALS):
            _all(calls)
            stamps.append(self._clock.stamp())
        times = self._clock.nanoseconds(stamps)
        return statistics.median(end - begin for begin, end in pairwise(times)) / len(calls) / 1000


def _all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


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
    place = torch.device(hardware.device)
    dtype = getattr(torch, resolve_dtype(run_config, hardware))
    attention = make_backend(run_config.engine.attention, spec, dtype, place)
    ops = make_ops("triton" if place.type == "cuda" else "reference", place)
    config = dataclasses.replace(resolve(run_config, hardware, spec), attention=attention.name)
    torch.set_num_threads(config.threads)
    device = open_device(config)
    report = Report(describe(files.name, config), as_json=as_json)
    timer = Timer(device)
    with torch.inference_mode():
        source, target = torch.ones(2, COPY_BYTES[place.type], dtype=torch.uint8, device=place)
        num_bytes = 2 * source.nbytes
        peak = 1e-3 * num_bytes / timer.micros([partial(target.copy_, source)], is_captured=False)
        report.line(operation="copy", bytes=num_bytes, gb_s=peak)
        table: list[Sequence[Cell]] = [("copy", None, None, 1e-6 * num_bytes, peak, 100.0, None)]
        del source, target
        operations = Operations(spec, ops, attention, dtype, place, page_size=config.page_size, upload=device.upload)
        for case in operations.cases(options.rows, options.context, options.prompt or PROMPT[place.type]):
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
    device.close()
    report.table(COLUMNS, table)
