"""`tokenmill bench offline`: `LLM.generate` on seeded workloads, end ids ignored."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from tokenmill.bench.options import OfflineOptions
from tokenmill.bench.profile import check_file, profiled
from tokenmill.bench.report import Report, describe
from tokenmill.bench.workload import SHAPES, Shape
from tokenmill.errors import ConfigError
from tokenmill.llm import LLM
from tokenmill.types import SamplingParams


def run(options: OfflineOptions) -> None:
    """Load the model, run the shapes and print medians, with least and greatest, over the rounds.

    Raises:
        TokenmillError: there is no such shape, or no round to measure; what loading a model raises.
    """
    for name in options.shape:
        if name not in SHAPES:
            raise ConfigError(f"there is no shape {name!r}; known: {', '.join(SHAPES)}")
    if options.rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, not {options.rounds}")
    check_file(options.profile)
    with LLM(options.run) as llm:
        report = Report(describe(options.run.model.model, llm.scheduler.config), as_json=options.json)
        with profiled(options.profile, llm.scheduler.config.device, report) as tracer:
            for name in options.shape:
                shape = SHAPES[name]
                measure(llm, shape, options.seed, 0)
                llm.trace(tracer)
                rounds = [measure(llm, shape, options.seed, index + 1) for index in range(options.rounds)]
                llm.trace(None)
                spreads = {figure: _spread([its[figure] for its in rounds]) for figure in rounds[0]}
                report.line(shape=name, requests=shape.requests, rounds=options.rounds, **spreads)
            report.table()


def measure(llm: LLM, shape: Shape, seed: int, round_index: int) -> dict[str, float]:
    """One round: all jobs, at most `shape.concurrency` at a time.

    Returns:
        Rates in tokens a second over the whole time, and that time in seconds. Where all requests run at once also
        `ttft_s`, when the last of them had its first token; where they get it in one step, `decode_tok_s` from then on.
    """
    jobs = shape.jobs(llm.vocab_size, seed, round_index)
    prompts = [job.token_ids for job in jobs]
    params = [SamplingParams(temperature=shape.temperature, max_tokens=job.max_tokens, ignore_eos=True) for job in jobs]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, progress=False, concurrency=shape.concurrency)
    ended = time.perf_counter()
    num_prompt, num_output = sum(map(len, prompts)), sum(job.max_tokens for job in jobs)
    seconds = ended - began
    figures = {"output_tok_s": num_output / seconds, "prompt_tok_s": num_prompt / seconds, "total_s": seconds}
    config = llm.scheduler.config
    if len(jobs) <= min(shape.concurrency, config.max_running):
        first_at = max(output.first_token_at for output in outputs if output.first_token_at is not None)
        figures["ttft_s"] = first_at - began
        if num_output > len(jobs) and (len(jobs) == 1 or num_prompt <= config.prefill_budget):
            figures["decode_tok_s"] = (num_output - len(jobs)) / (ended - first_at)
    return figures


def _spread(values: Sequence[float]) -> list[float]:
    return [pick(values) for pick in (statistics.median, min, max)]
