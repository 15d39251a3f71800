"""What the benchmarks are told. Flags are made from these fields: a field's docstring is its help text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class OfflineOptions:
    """Which workloads, how often."""

    shape: tuple[str, ...] = ("single", "mixed8", "mixed32", "prefix")
    """Workloads to run, of: single, mixed8, mixed32, prefix, batch1, batch8, batch64, prefill, offline256."""
    rounds: int = 3
    """Measured rounds, after one warm-up."""
    seed: int = 0
    """Decides lengths and contents of the prompts."""
    profile: Path | None = None
    """File for a trace of the measured rounds, which ui.perfetto.dev shows; its summary is printed."""


@dataclass(frozen=True)
class KernelOptions:
    """Sizes of the operations."""

    rows: tuple[int, ...] = (1, 8, 64, 256)
    """Rows of the decode steps."""
    context: int = 1024
    """Tokens that each row of a decode step attends to."""
    prompt: int | None = None
    """Tokens of the prompt that is prefilled; auto is 8192, on a CPU 1024."""


@dataclass(frozen=True)
class OnlineOptions:
    """How many requests, how fast."""

    requests: int = 512
    """Requests in all, with prompts and outputs of 100 to 1024 tokens."""
    rate: float | None = None
    """Requests a second; auto is by --share."""
    share: float = 0.8
    """Share of the peak throughput, which is measured first."""
    seed: int = 0
    """Decides lengths, contents and arrivals."""
    profile: Path | None = None
    """File for a trace of the measured run, which ui.perfetto.dev shows; its summary is printed."""
