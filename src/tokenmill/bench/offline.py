"""`tokenmill bench`: the offline engine on seeded workloads, greedy, end ids ignored."""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tokenmill.bench.workload import SHAPES, Shape, make_jobs
from tokenmill.errors import ConfigError
from tokenmill.llm import LLM
from tokenmill.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Round:
    """One round's figures. Rates are in tokens a second; times in seconds."""

    seconds: float
    output_rate: float
    time_to_first: float | None
    decode_rate: float | None


def check(names: tuple[str, ...], rounds: int) -> None:
    """Refuse what cannot be run before a model is loaded.

    Raises:
        ConfigError: there is no such shape, or no round to measure.
    """
    for name in names:
        if name not in SHAPES:
            raise ConfigError(f"there is no shape {name!r}; known: {', '.join(SHAPES)}")
    if rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, not {rounds}")


def run(llm: LLM, names: tuple[str, ...], rounds: int, seed: int, *, as_json: bool) -> None:
    """Run the shapes and print medians, with least and greatest, over `rounds` rounds after one warm-up."""
    table = Table("shape", "requests", "output tok/s", "first s", "decode tok/s", "total s", box=SIMPLE_HEAD)
    for name in names:
        measured = [measure(llm, SHAPES[name], seed, index) for index in range(rounds + 1)][1:]
        columns = {
            "output_tok_s": _spread([its.output_rate for its in measured]),
            "ttft_s": _spread([its.time_to_first for its in measured]),
            "decode_tok_s": _spread([its.decode_rate for its in measured]),
            "total_s": _spread([its.seconds for its in measured]),
        }
        if as_json:
            print(json.dumps({"shape": name, "rounds": rounds, **columns}), flush=True)
        table.add_row(name, str(SHAPES[name].requests), *(_words(values) for values in columns.values()))
    Console(file=sys.stderr if as_json else sys.stdout).print(table)


def measure(llm: LLM, shape: Shape, seed: int, round_index: int) -> Round:
    """One round: all jobs, at most `shape.concurrency` at a time."""
    jobs = make_jobs(shape, llm.vocab_size, seed, round_index)
    params = [SamplingParams(temperature=0, max_tokens=job.max_tokens, ignore_eos=True) for job in jobs]
    began = time.perf_counter()
    if shape.requests == 1:
        times = [time.perf_counter() for delta in llm.stream(jobs[0].token_ids, params[0]) if delta.token_ids]
        seconds = times[-1] - began
        decode = (jobs[0].max_tokens - 1) / max(times[-1] - times[0], 1e-9)
        return Round(seconds, jobs[0].max_tokens / seconds, times[0] - began, decode)
    prompts = [job.token_ids for job in jobs]
    llm.generate(prompts, params, progress=False, concurrency=shape.concurrency)
    seconds = time.perf_counter() - began
    return Round(seconds, sum(job.max_tokens for job in jobs) / seconds, None, None)


def _spread(values: list[float | None]) -> list[float] | None:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    return [round(pick(numbers), 4) for pick in (statistics.median, min, max)]


def _words(values: list[float] | None) -> str:
    if values is None:
        return "-"
    middle, least, most = (f"{value:.0f}" if value >= 1000 else f"{value:.3g}" for value in values)
    return f"{middle}\n{least}–{most}"
