"""Online load against FakeEngine, with a clock that only sleeping and computing move."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.sched.support import make_config
from tokenmill.bench.online import Clients, Served, drive, peak_rate, percentile, poisson
from tokenmill.bench.workload import Job
from tokenmill.engine.fake import FakeEngine
from tokenmill.errors import TokenmillError

STEP_SECONDS = 0.25


@dataclass
class FakeClock:
    """`slept` are the waits."""

    time: float = 1000.0

    def __post_init__(self) -> None:
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds


class TimedEngine(FakeEngine):
    """Each step takes STEP_SECONDS."""

    clock: FakeClock

    def compute_next(self) -> None:
        super().compute_next()
        self.clock.time += STEP_SECONDS


def serve(jobs: list[Job], times: list[float], **changes: object) -> tuple[list[Served], FakeClock]:
    config = make_config(**changes)
    engine, clock = TimedEngine(config), FakeClock()
    engine.clock = clock
    return drive(engine, config, Clients(jobs, times, clock.now, clock.sleep)), clock


@pytest.mark.parametrize("loop", ["serial", "overlap"])
def test_every_token_has_its_time_and_requests_wait_for_theirs(loop: str) -> None:
    jobs = [Job([1, 2, 3], 3), Job([4, 5], 2), Job([6], 1)]
    served, clock = serve(jobs, [0.5, 0.5, 100.0], loop=loop)
    assert [its.arrived for its in served] == [0.5, 0.5, 100.0]
    assert served[0].tokens == [0.75, 1.0, 1.25]
    assert served[1].tokens == [0.75, 1.0]
    assert served[2].tokens == [100.25]
    assert len(clock.slept) == 2


def test_a_request_that_comes_during_a_step_joins_the_next() -> None:
    served, _ = serve([Job([1, 2], 4), Job([3, 4], 1)], [0.0, 0.3])
    assert served[0].tokens == [0.25, 0.5, 0.75, 1.0]
    assert served[1].tokens == [0.75]


def test_a_refused_request_ends_the_run() -> None:
    with pytest.raises(TokenmillError, match="do not fit"):
        serve([Job([1] * 300, 10)], [0.0])


def test_poisson_arrivals_are_seeded_and_as_frequent_as_asked() -> None:
    times = poisson(4000, 20.0, seed=3)
    assert times == poisson(4000, 20.0, seed=3)
    assert times != poisson(4000, 20.0, seed=4)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(4000 / 20.0, rel=0.1)


def test_peak_counts_while_as_many_run_as_may() -> None:
    served = [Served(0.0, [1.0, 2.0]), Served(0.0, [1.0, 2.0, 3.0]), Served(0.0, [4.0, 5.0]), Served(0.0, [5.0, 9.0])]
    assert peak_rate(served, max_running=2) == 3 / (3.0 - 1.0)
    assert peak_rate(served, max_running=4) == 9 / 9.0


def test_percentiles_are_values_that_occur() -> None:
    assert [percentile([3.0, 1.0, 2.0, 4.0], share) for share in (0.0, 0.5, 0.99)] == [1.0, 2.0, 4.0]
    assert percentile([7.0], 0.5) == 7.0
