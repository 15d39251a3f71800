"""What the benchmarks are told. Flags are made from these fields: a field's docstring is its help text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from tokenmill.config import DEFAULT_MODEL, Eviction, RunConfig
from tokenmill.errors import ConfigError

Lengths = tuple[int, int]  # tokens, least and most


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


@dataclass(frozen=True)
class StepOptions(BenchOptions):
    """Measure how long steps take by what is in them, and fit the cost model of tokenmill simulate."""

    save: Path | None = None
    """File for the cost model, as JSON."""
    prompt: Lengths = (16, 1024)
    """Least and most tokens of a prompt; few are long."""
    output: Lengths = (8, 48)
    """Least and most tokens of an output; few are long."""
    seed: int = 0
    """Decides lengths and contents of the prompts."""


@dataclass(frozen=True)
class SchedOptions:
    """Measure the scheduler and the prefix tree alone, without a model."""

    json: bool = False
    """Print JSON lines to stdout, and the table to stderr."""


@dataclass(frozen=True)
class Compared:
    """What the scheduler is told. Of several values each is tried with each of the other flags' values."""

    policy: tuple[str, ...] = ("fcfs",)
    """Orders of the queue: fcfs, longest-prefix, priority, deadline, shortest, fair (between tenants), or your own as
    path.py:function."""
    batch_policy: tuple[Literal["mixed", "prefill-first"], ...] = ("mixed",)
    """mixed puts decode rows and prompt chunks into one step; prefill-first alternates."""
    eviction: tuple[Eviction, ...] = ("lru",)
    """Prefixes forgotten first: those used least recently, by fewest requests, or by requests of lowest priority."""
    num_pages: tuple[int, ...] = (4096,)
    """K/V pages."""
    page_size: tuple[int, ...] = (16,)
    """Tokens a K/V page."""
    max_running: tuple[int, ...] = ()
    """Most requests that run at once; default is that of --device."""
    prefill_budget: tuple[int, ...] = ()
    """Most prompt tokens a step; default is that of --device."""
    reserve_ratio: tuple[float, ...] = ()
    """Share of their max_tokens that requests are expected to draw, at first."""
    prefix_cache: tuple[bool, ...] = (True,)
    """Whether K/V of finished requests is kept."""
    max_waiting: tuple[int, ...] = ()
    """Most requests in the queue; more are refused. Default is by the size of the pool."""
    max_waiting_tokens: tuple[int, ...] = ()
    """Most prompt tokens in the queue. Default is by the size of the pool."""
    loop: tuple[Literal["overlap", "serial"], ...] = ("overlap",)
    """overlap plans the next step while the device computes this one; serial does not."""


@dataclass(frozen=True)
class Synthesis:
    """Requests of seeded traces; requests and rate are for files without arrivals too."""

    requests: int = 1000
    """Requests to read or make; an agent or a conversation counts as one."""
    rate: float = 1.0
    """Arrivals a second."""
    seed: int = 0
    """Decides lengths and arrivals."""
    prompt: Lengths = (32, 1024)
    """Least and most tokens of a prompt, prefix not counted; few are long."""
    output: Lengths = (16, 512)
    """Least and most tokens of an output; few are long."""
    prefix: int = 512
    """Tokens of a shared prefix (shared-prefixes, agents)."""
    groups: int = 8
    """Shared prefixes; the first are used most."""
    burst: int = 32
    """Requests that come at once (bursts)."""
    turns: int = 8
    """Calls of an agent."""
    think: float = 2.0
    """Seconds between an answer and the next call, on average."""
    tenants: int = 4
    """Tenants; the first send most."""


@dataclass(frozen=True)
class SimulateOptions:
    """Replay a trace through the real scheduler and prefix cache in virtual time, for several settings side by side."""

    trace: Positional[str] = "poisson"
    """A file (JSON lines of Mooncake or Qwen-Bailian, conversations as in ShareGPT, or CSV), or poisson, bursts,
    shared-prefixes, agents."""
    costs: Path | None = None
    """Cost model, as tokenmill bench steps --save writes it; default is SmolLM2-135M on one CPU core."""
    compared: Compared = field(default_factory=Compared)
    synthesis: Synthesis = field(default_factory=Synthesis)
    device: Literal["cpu", "cuda"] = "cpu"
    """Whose defaults to take for flags that are not given."""
    max_tokens: int = 1024
    """What requests give as max_tokens; those that draw more give that."""
    speed: float = 1.0
    """Arrivals of a file come this many times as fast."""
    tokenizer: str | None = None
    """Model whose tokenizer counts the tokens of conversations; default is 4 bytes a token."""
    ttft_target: float = 2.0
    """Seconds to the first token for a request to count as good."""
    itl_target: float = 0.2
    """Seconds from token to token, on average over a request, to count as good."""
    json: bool = False
    """Print JSON lines to stdout, and the table to stderr."""
    plot: Path | None = None
    """File for plots: .html, or .png if matplotlib is installed."""


def check_lengths(**flags: Lengths) -> None:
    """Raises ConfigError when one is not a least and a most number of tokens."""
    for name, (least, most) in flags.items():
        if not 1 <= least <= most:
            raise ConfigError(f"--{name} must be a least and a most number of tokens, not {least} {most}")


@dataclass(frozen=True)
class HttpOptions:
    """Measure what a streamed token costs in API server and detokenizer, with an engine that only keeps time."""

    model: str = DEFAULT_MODEL
    """The model whose tokenizer is used."""
    streams: tuple[int, ...] = (1, 16, 64, 256)
    """Streams at a time, one measurement each."""
    rate: float = 5000.0
    """Tokens a second, of all streams."""
    stream_rate: float = 200.0
    """Most tokens a second of one stream."""
    seconds: float = 10.0
    """Length of a measurement."""
    api_workers: int = 1
    """Processes that answer HTTP."""
    profile: bool = False
    """Print where the API server's time goes; that slows it down."""
    json: bool = False
    """Print JSON lines to stdout, and the table to stderr."""


BENCHES: Mapping[str, type[BenchOptions | SchedOptions | HttpOptions]] = {  # by module of this package
    "offline": OfflineOptions,
    "kernels": KernelOptions,
    "online": OnlineOptions,
    "steps": StepOptions,
    "sched": SchedOptions,
    "http": HttpOptions,
}
