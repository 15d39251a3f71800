"""What the benchmarks are told. Flags are made from these fields: a field's docstring is its help text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenmill.config import RunConfig


@dataclass(frozen=True)
class BenchOptions:
    """What every benchmark takes."""

    run: RunConfig = field(default_factory=RunConfig)
    json: bool = False
    """Print JSON lines to stdout, and the table to stderr."""


@dataclass(frozen=True)
class OfflineOptions(BenchOptions):
    """Measure LLM.generate on seeded workloads."""

    shape: tuple[str, ...] = ("single", "mixed8", "mixed32", "prefix")
    """Workloads to run, of: single, mixed8, mixed32, prefix, batch1, batch8, batch64, prefill, offline256."""
    rounds: int = 3
    """Measured rounds, after one warm-up."""
    seed: int = 0
    """Decides lengths and contents of the prompts."""
    profile: Path | None = None
    """File for a trace of the measured rounds, which ui.perfetto.dev shows; its summary is printed."""


@dataclass(frozen=True)
class KernelOptions(BenchOptions):
    """Measure each operation at the model's shapes, beside a copy of memory. Needs no weights."""

    rows: tuple[int, ...] = (1, 8, 64, 256)
    """Rows of the decode steps."""
    context: int = 1024
    """Tokens that each row of a decode step attends to."""
    prompt: int | None = None
    """Tokens of the prompt that is prefilled; auto is 8192, on a CPU 1024."""


@dataclass(frozen=True)
class OnlineOptions(BenchOptions):
    """Measure the latencies of requests that arrive by chance (a Poisson process)."""

    requests: int = 512
    """Requests in all, with prompts and outputs of 100 to 1024 tokens."""
    rate: float | None = None
    """Requests a second, after a short warm-up; auto is by --share."""
    share: float = 0.8
    """Share of the peak throughput, which is measured first, with all requests at once."""
    seed: int = 0
    """Decides lengths, contents and arrivals."""
    profile: Path | None = None
    """File for a trace of the measured run, which ui.perfetto.dev shows; its summary is printed."""


BENCHES: Mapping[str, type[BenchOptions]] = {  # by module of this package
    "offline": OfflineOptions,
    "kernels": KernelOptions,
    "online": OnlineOptions,
}
