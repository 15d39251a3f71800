"""`tokenmill simulate`: a trace through the real scheduler in virtual time, for several settings side by side."""

from __future__ import annotations

import dataclasses
import platform
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from tokenmill import __version__
from tokenmill.bench.options import Compared, SimulateOptions, check_lengths
from tokenmill.bench.plot import Chart, Points, check_plot, write_plot
from tokenmill.bench.report import Report
from tokenmill.bench.traces import SYNTHETIC, open_trace
from tokenmill.config import EngineConfig, ResolvedConfig, RunConfig, SchedulerConfig, check_range, resolve
from tokenmill.errors import ConfigError
from tokenmill.hub import resolve_model
from tokenmill.sched.scheduler import Scheduler
from tokenmill.sched.simulate import MICROSECOND, CostModel, Served, Simulation, TraceRequest
from tokenmill.spec import HardwareInfo, ModelSpec

# SmolLM2-135M in bfloat16 on one core of an AMD EPYC, by `bench steps --threads 1`; `request` by a server that is idle.
DEFAULT_COSTS = CostModel(
    step=39800,
    prompt_token=1360,
    prompt_row=630,
    decode_row=3710,
    kv_token=5.1,
    pair=1.13,
    host_step=130,
    host_row=8,
    request=4500,
)
UNLIMITED = 2**31 - 1
NAMED = ("policy",)
SHARES = [*(share / 100 for share in range(100)), *(0.99 + share / 1000 for share in range(11))]
MOST_INTERVALS = 400
FAIRNESS_WINDOW = 60.0  # seconds


class Timeline:
    """Output tokens, and requests that wait and run, in at most MOST_INTERVALS intervals of time."""

    def __init__(self) -> None:
        self._width = 1e-3
        self._intervals: list[tuple[int, int, int]] = []  # tokens drawn in it; waiting and running at its end

    def add(self, now: float, tokens: int, scheduler: Scheduler) -> None:
        """Note what a step drew, and what is left after it."""
        index = int(now / self._width)
        while index >= MOST_INTERVALS:
            self._halve()
            index = int(now / self._width)
        intervals = self._intervals
        while len(intervals) <= index:
            intervals.append((0, *intervals[-1][1:]) if intervals else (0, 0, 0))
        intervals[index] = intervals[index][0] + tokens, scheduler.num_waiting, scheduler.num_running

    def points(self, column: int) -> Points:
        """Times in seconds, and output tokens a second (column 0), waiting (1) or running requests (2)."""
        scale = 1 / self._width if column == 0 else 1
        return [(index * self._width, its[column] * scale) for index, its in enumerate(self._intervals)]

    def _halve(self) -> None:
        self._width *= 2
        old = self._intervals
        self._intervals = [
            (sum(its[0] for its in old[at : at + 2]), *old[at : at + 2][-1][1:]) for at in range(0, len(old), 2)
        ]


class Outcomes:
    """What became of a trace's requests. Times are in seconds; `wait` is added to each for the way there and back."""

    def __init__(self, wait: float, ttft_target: float, itl_target: float) -> None:
        self.ttft, self.latency = array("d"), array("d")
        self.timeline = Timeline()
        self._wait, self._targets = wait, (ttft_target, itl_target)
        self._num_good = 0
        self._shares = 0.0, 0  # sum of tokens served in windows, times Jain's index; without that
        self._window_end = 0.0
        self._before: dict[str, int] = {}

    def add(self, served: Served) -> None:
        """Note a request that has ended."""
        output_len = served.request.output_len
        first, latency = (at - served.arrival + self._wait for at in (served.first, served.last))
        self.ttft.append(first)
        self.latency.append(latency)
        ttft_target, itl_target = self._targets
        self._num_good += first <= ttft_target and latency - first <= itl_target * (output_len - 1)

    def step(self, now: float, tokens: int, simulation: Simulation) -> None:
        """Note a step. Tenants are compared who have requests at the begin and at the end of a window."""
        self.timeline.add(now, tokens, simulation.scheduler)
        if now < self._window_end:
            return
        present = {name: its.served for name, its in simulation.tenants.items() if its.present}
        served = [total - self._before[name] for name, total in present.items() if name in self._before]
        if len(served) > 1:
            weighed, weight = self._shares
            self._shares = weighed + sum(served) * jain(served), weight + sum(served)
        self._before, self._window_end = present, now + FAIRNESS_WINDOW

    def figures(self, simulation: Simulation) -> dict[str, Any]:
        """The run in figures."""
        totals, counters = simulation.totals, simulation.scheduler.counters
        seconds = max(totals.end - totals.begin, MICROSECOND)
        found: dict[str, Any] = {
            "requests": len(self.ttft),
            "refused": totals.refused,
            "ended_early": totals.ended_early,
        }
        found |= {"output_tok_s": counters.generated_tokens / seconds, "request_s": len(self.ttft) / seconds}
        found |= {"goodput_request_s": self._num_good / seconds}
        if self.ttft:
            found |= {"ttft_mean_ms": 1000 * sum(self.ttft) / len(self.ttft)}
        for name, values, scale in (
            ("ttft_{}_ms", sorted_counts(self.ttft), 1000),
            ("itl_{}_ms", sorted(totals.gaps.items()), 1000 * MICROSECOND),
            ("e2e_{}_s", sorted_counts(self.latency), 1),
        ):
            chosen = quantiles(values, (0.5, 0.9, 0.99))
            found |= {name.format(f"p{p}"): scale * value for p, value in zip((50, 90, 99), chosen, strict=False)}
        found |= {"hit_rate": counters.cached_tokens / max(counters.prompt_tokens, 1)}
        weighed, weight = self._shares
        return found | {"retractions": counters.retractions, "fairness": weighed / weight if weight else None}


def run(options: SimulateOptions) -> None:
    """Simulate the trace once for each combination of settings; print a line each, and plot what was asked for.

    Raises:
        ConfigError: a number cannot work, a file cannot be read or written, a line of the trace is wrong.
    """
    _check(options)
    costs = load_costs(options.costs)
    setup = {"trace": options.trace, "costs": str(options.costs or "default"), "tokenmill": __version__}
    report = Report(setup | {"python": platform.python_version()}, as_json=options.json)
    count_tokens = _counter(options.tokenizer)
    found: dict[str, tuple[Simulation, Outcomes]] = {}
    rows: list[dict[str, Any]] = []
    for label, config in combinations(options.compared, options.device):
        outcomes = Outcomes(costs.request * MICROSECOND, options.ttft_target, options.itl_target)
        simulation = Simulation(
            config,
            costs,
            _faster(open_trace(options.trace, options.synthesis, count_tokens), options.speed),
            max_tokens=options.max_tokens,
            on_end=outcomes.add,
            on_step=outcomes.step,
        )
        simulation.run()
        rows.append(label | outcomes.figures(simulation))
        report.line(**rows[-1])
        found[", ".join(map(str, label.values()))] = simulation, outcomes
    report.table(side_by_side=True)
    if options.plot is not None:
        write_plot(options.plot, f"tokenmill simulate {options.trace}", rows, charts(found))


def load_costs(path: Path | None) -> CostModel:
    """The cost model of a file, or the default.

    Raises:
        ConfigError: it cannot be read.
    """
    if path is None:
        return DEFAULT_COSTS
    try:
        return msgspec.json.decode(path.read_bytes(), type=CostModel)
    except OSError as error:
        raise ConfigError(f"--costs {path} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"--costs {path}: {error}; tokenmill bench steps --save writes such a file") from None


def combinations(compared: Compared, device: str) -> Iterator[tuple[dict[str, Any], ResolvedConfig]]:
    """Each combination of the settings: what tells it from the others, and the configuration.

    Raises:
        ConfigError: a value cannot work.
    """
    hardware = HardwareInfo("cuda" if device == "cuda" else "cpu", 1, 2**62, "float32")
    spec = ModelSpec(
        "simulated", 1, 1, 1, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1, max_position=UNLIMITED
    )
    of_engine = {field.name for field in dataclasses.fields(EngineConfig)}
    given: Mapping[str, Sequence[Any]] = {name: values for name, values in vars(compared).items() if values}
    for values in product(*given.values()):
        chosen = dict(zip(given, values, strict=True))
        engine = EngineConfig(**{name: value for name, value in chosen.items() if name in of_engine})
        scheduler = SchedulerConfig(**{name: value for name, value in chosen.items() if name not in of_engine})
        label = {name: value for name, value in chosen.items() if name in NAMED or len(given[name]) > 1}
        yield label, resolve(RunConfig(engine=engine, scheduler=scheduler), hardware, spec)


def quantiles(counts: Sequence[tuple[float, int]], shares: Sequence[float]) -> list[float]:
    """For each share the least value that at least this share of all do not exceed; of sorted values and how many each.

    Shares go up. Without values there are none.
    """
    total, seen, at = sum(count for _, count in counts), 0, 0
    found = []
    for share in shares if total else ():
        while seen < share * total - 1e-9 or seen == 0:
            seen += counts[at][1]
            at += 1
        found.append(counts[at - 1][0])
    return found


def sorted_counts(values: Sequence[float]) -> list[tuple[float, int]]:
    """Values for `quantiles`."""
    return [(value, 1) for value in sorted(values)]


def jain(rates: Sequence[float]) -> float:
    """Jain's index of fairness: 1 when all rates are equal, 1 / n when one of n has everything (arXiv:cs/9809099)."""
    squares = len(rates) * sum(rate * rate for rate in rates)
    return sum(rates) ** 2 / squares if squares else 1.0


def charts(found: Mapping[str, tuple[Simulation, Outcomes]]) -> list[Chart]:
    """What a plot shows of the runs."""

    def lines(points: Callable[[Simulation, Outcomes], Points]) -> dict[str, Points]:
        return {name: points(*its) for name, its in found.items()}

    def spread(counts: Sequence[tuple[float, int]], scale: float = 1.0) -> Points:
        return [(value * scale, 100 * at) for at, value in zip(SHARES, quantiles(counts, SHARES), strict=False)]

    share, clock = "% of them at most", "seconds"
    return [
        Chart("Time to first token", clock, share, lines(lambda _, its: spread(sorted_counts(its.ttft))), is_log=True),
        Chart(
            "Time between tokens",
            clock,
            share,
            lines(lambda its, _: spread(sorted(its.totals.gaps.items()), MICROSECOND)),
            is_log=True,
        ),
        Chart("Whole request", clock, share, lines(lambda _, its: spread(sorted_counts(its.latency))), is_log=True),
        Chart("Output", clock, "tokens a second", lines(lambda _, its: its.timeline.points(0))),
        Chart("Queue", clock, "waiting requests", lines(lambda _, its: its.timeline.points(1))),
        Chart("Batch", clock, "running requests", lines(lambda _, its: its.timeline.points(2))),
    ]


def _check(options: SimulateOptions) -> None:
    synthesis = options.synthesis
    for name in ("requests", "groups", "burst", "turns", "tenants"):
        check_range(f"--{name}", getattr(synthesis, name), 1)
    check_range("--prefix", synthesis.prefix, 0)
    check_range("--max-tokens", options.max_tokens, 1)
    for name, number in (("rate", synthesis.rate), ("think", synthesis.think), ("speed", options.speed)):
        if not 0 < number < float("inf"):
            raise ConfigError(f"--{name} must be over 0, not {number}")
    check_lengths(prompt=synthesis.prompt, output=synthesis.output)
    if options.trace not in SYNTHETIC and not Path(options.trace).is_file():
        raise ConfigError(f"there is no trace {options.trace!r}: name a file, or one of {', '.join(SYNTHETIC)}")
    check_plot(options.plot)


def _counter(model: str | None) -> Callable[[str], int] | None:
    if model is None:
        return None
    from tokenmill.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(resolve_model(model, needs_weights=False))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def _faster(trace: Iterator[TraceRequest], speed: float) -> Iterator[TraceRequest]:
    for request in trace:
        request.arrival /= speed
        yield request
