"""`tokenmill bench online`: requests that come by chance to a scheduler and an engine in this process.

Their prompts are ids, and their tokens count as served when their step is committed: no text, no sockets.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from tokenmill.bench.options import OnlineOptions
from tokenmill.bench.profile import check_file, profiled
from tokenmill.bench.report import Report, describe
from tokenmill.bench.workload import Job, Shape
from tokenmill.config import ResolvedConfig
from tokenmill.engine.base import Engine
from tokenmill.engine.load import load_engine
from tokenmill.errors import ConfigError, TokenmillError
from tokenmill.hub import resolve_model
from tokenmill.parallel.group import Group
from tokenmill.sched.scheduler import Scheduler
from tokenmill.trace import Tracer
from tokenmill.types import SamplingParams
from tokenmill.wire.channel import NullSender
from tokenmill.wire.messages import GenerateJob, Stop, TextOptions, ToDetokenizer, TokenBatch, ToScheduler, pack_ids
from tokenmill.worker.core import Core
from tokenmill.worker.loop import make_loop

LENGTHS = (100, 1024)
WARM_UP_REQUESTS, WARM_UP_TOKENS = 8, 16


@dataclass(frozen=True, slots=True)
class Served:
    """When a request came, and when each of its tokens did: seconds since the begin."""

    arrived: float
    tokens: list[float] = field(default_factory=list)


class Clients:
    """Both ends of a scheduler: an inbox that holds each request back until its time, and what takes the tokens.

    The inbox ends with Stop when the last request is served. `now` and `sleep` are in seconds.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        times: Sequence[float],
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.served = [Served(at) for at in times]
        self._jobs, self._now, self._sleep, self._begin = jobs, now, sleep, now()
        self._num_sent = 0

    def receive(self, timeout: float | None = None) -> list[ToScheduler]:
        """Requests that are due; without a timeout waits until one is."""
        sent, now = self._num_sent, self._now() - self._begin
        if timeout is None:
            if sent == len(self._jobs):
                return [Stop()]
            if self.served[sent].arrived > now:
                self._sleep(self.served[sent].arrived - now)
                now = self.served[sent].arrived
        while self._num_sent < len(self._jobs) and self.served[self._num_sent].arrived <= now:
            self._num_sent += 1
        return [_message(uid, self._jobs[uid]) for uid in range(sent, self._num_sent)]

    def send(self, message: ToDetokenizer, /) -> None:
        """Note the time of each token.

        Raises:
            TokenmillError: a request was refused.
        """
        if isinstance(message, TokenBatch):
            for finish in message.finished:
                if finish.error is not None:
                    raise TokenmillError(finish.error.message)
            now = self._now() - self._begin
            for uid in message.uids:
                self.served[uid].tokens.append(now)

    def close(self) -> None:
        """Nothing to do."""


def drive(engine: Engine, config: ResolvedConfig, clients: Clients, tracer: Tracer | None = None) -> list[Served]:
    """Serve the clients with a scheduler of their own."""
    loop = make_loop(Core(Scheduler(config), clients, clients, NullSender()), engine)
    loop.steps.tracer = tracer
    while loop.turn():
        pass
    return clients.served


def poisson(requests: int, rate: float, seed: int) -> list[float]:
    """Arrival times of a Poisson process, in seconds: `rate` requests a second on average."""
    draw = random.Random(f"{seed}/arrivals")
    return list(accumulate(draw.expovariate(rate) for _ in range(requests)))


def peak_rate(served: Sequence[Served], max_running: int) -> float:
    """Output tokens a second of requests that all came at once, while as many ran as may.

    That is from when the first `max_running` have a token until so many are left; of fewer requests, the whole time.
    """
    firsts = sorted(its.tokens[0] for its in served)
    ends = sorted(its.tokens[-1] for its in served)
    begin, end = 0.0, ends[-1]
    if len(served) > max_running and firsts[max_running - 1] < ends[-max_running - 1]:
        begin, end = firsts[max_running - 1], ends[-max_running - 1]
    return sum(begin < at <= end for its in served for at in its.tokens) / (end - begin)


def run(options: OnlineOptions) -> None:
    """Requests at a rate; or all at once, twice, of which the first is the warm-up, then at a share of that peak.

    Raises:
        TokenmillError: a number cannot work; what loading a model raises.
    """
    for flag, number in (("--requests", options.requests), ("--rate", options.rate), ("--share", options.share)):
        if number is not None and not 0 < number < float("inf"):
            raise ConfigError(f"{flag} must be over 0, not {number}")
    check_file(options.profile)
    config = options.run
    path = resolve_model(config.model.model, needs_weights=not config.model.random_weights)
    engine, resolved, spec = load_engine(config, path, Group.solo())
    with closing(engine):
        report = Report(describe(config.model.model, resolved), as_json=options.json)
        shape = Shape(options.requests, LENGTHS, LENGTHS, options.requests)
        first, second, third = (shape.jobs(spec.vocab_size, options.seed, index) for index in range(3))
        if options.rate is not None:
            few = [dataclasses.replace(job, max_tokens=WARM_UP_TOKENS) for job in first[:WARM_UP_REQUESTS]]
            drive(engine, resolved, Clients(few, [0.0] * len(few)))
            rate = options.rate
        else:
            at_once = [0.0] * options.requests
            drive(engine, resolved, Clients(first, at_once))
            served = drive(engine, resolved, Clients(second, at_once))
            peak = peak_rate(served, resolved.max_running) / statistics.mean(job.max_tokens for job in third)
            _show("peak", peak, served, report)
            rate = options.share * peak
        with profiled(options.profile, resolved.device, report) as tracer:
            engine.tracer = tracer
            times = poisson(options.requests, rate, options.seed)
            served = drive(engine, resolved, Clients(third, times), tracer)
            engine.tracer = None
            _show("poisson", rate, served, report)
            report.table()


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that at least `share` of the values do not exceed. `values` must not be empty."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _show(name: str, rate: float, served: Sequence[Served], report: Report) -> None:
    first = [its.tokens[0] - its.arrived for its in served]
    between = [after - before for its in served for before, after in pairwise(its.tokens)]
    latencies = {
        f"{kind}_p{round(100 * share)}_ms": 1000 * percentile(values, share)
        for kind, values in (("ttft", first), ("itl", between))
        for share in (0.5, 0.99)
    }
    output_rate = sum(len(its.tokens) for its in served) / max(its.tokens[-1] for its in served)
    found = {"requests": len(served), "request_rate": rate, "output_tok_s": output_rate, **latencies}
    report.line(load=name, **found, p99_over_p50=latencies["itl_p99_ms"] / latencies["itl_p50_ms"])


def _message(uid: int, job: Job) -> GenerateJob:
    return GenerateJob(
        uid=uid,
        token_ids=pack_ids(job.token_ids),
        params=SamplingParams(temperature=0.6, max_tokens=job.max_tokens, seed=uid),
        max_tokens=job.max_tokens,
        end_ids=[],
        text=TextOptions(),
    )
