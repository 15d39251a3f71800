"""The scheduler's state in Prometheus' words; the names are those of vLLM, behind a prefix of our own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tokenmill.wire.messages import Pulse

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "tokenmill:"
Row = tuple[type[CounterMetricFamily] | type[GaugeMetricFamily], str, str, Callable[[Pulse], float]]
ROWS: tuple[Row, ...] = (
    (GaugeMetricFamily, "num_requests_running", "Requests that hold pages", lambda its: its.running),
    (GaugeMetricFamily, "num_requests_waiting", "Requests in the queue", lambda its: its.waiting),
    (
        GaugeMetricFamily,
        "kv_cache_usage_perc",
        "Share of pages in use",
        lambda its: 1 - its.available_pages / its.num_pages,
    ),
    (CounterMetricFamily, "prefix_cache_queries", "Prompt tokens looked up", lambda its: its.prompt_tokens),
    (CounterMetricFamily, "prefix_cache_hits", "Prompt tokens found cached", lambda its: its.cached_tokens),
    (CounterMetricFamily, "num_preemptions", "Running requests put back into the queue", lambda its: its.retractions),
    (CounterMetricFamily, "prompt_tokens", "Prompt tokens of admitted requests", lambda its: its.prompt_tokens),
    (CounterMetricFamily, "generation_tokens", "Tokens generated", lambda its: its.generated_tokens),
)

RANK_ROWS = (
    (CounterMetricFamily, "rank_turns", "Turns of each rank's loop"),
    (GaugeMetricFamily, "rank_memory_bytes", "Memory that each rank took at its start"),
)


class _State:
    """One Pulse as a collector."""

    def __init__(self, pulse: Pulse, model: str) -> None:
        self._pulse = pulse
        self._model = model

    def collect(self) -> Iterator[Metric]:
        for kind, name, words, value in ROWS:
            family = kind(PREFIX + name, words, labels=["model_name"])
            family.add_metric([self._model], value(self._pulse))
            yield family
        for number, (kind, name, words) in enumerate(RANK_ROWS):
            family = kind(PREFIX + name, words, labels=["model_name", "rank"])
            for rank, facts in enumerate(self._pulse.ranks):
                family.add_metric([self._model, str(rank)], facts[number])
            if self._pulse.ranks:
                yield family


def render(pulse: Pulse, model: str) -> bytes:
    """The metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_State(pulse, model))
    return generate_latest(registry)
