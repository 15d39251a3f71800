"""Simulated runs, by hand and against the worker's loops with a clock that only the device moves."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from tests.sched.support import make_config
from tokenmill.bench.online import Clients, drive
from tokenmill.bench.workload import Job
from tokenmill.sched.plan import Row, StepPlan, StepResult
from tokenmill.sched.simulate import CostModel, Served, Simulation, TraceRequest, Work, work_of

MILLISECOND = 1000
STEP_ONLY = CostModel(step=1000 * MILLISECOND, prompt_token=0, decode_row=0)
COSTS = CostModel(step=1000, prompt_token=70, prompt_row=5, decode_row=30, kv_token=2, pair=0.5)


def ids(token: int, length: int) -> array[int]:
    return array("i", (token,)) * length


def simulate(
    trace: Sequence[TraceRequest], costs: CostModel = STEP_ONLY, max_tokens: int = 1, **changes: Any
) -> tuple[Simulation, list[Served]]:
    ended: list[Served] = []
    config = make_config(**changes)
    simulation = Simulation(config, costs, iter(trace), max_tokens=max_tokens, on_end=ended.append)
    simulation.run()
    simulation.scheduler.check()
    assert not simulation.scheduler.has_work
    return simulation, ended


@dataclass
class Script:
    """An engine and a clock: steps take what the cost model says, tokens are always the same."""

    costs: CostModel
    time: float = 0.0
    plans: list[StepPlan] = field(default_factory=list)

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def launch(self, plan: StepPlan) -> Script.Handle:
        return Script.Handle(self, plan)

    def prepare(self) -> bool:
        return False

    def close(self) -> None:
        pass

    @dataclass
    class Handle:
        script: Script
        plan: StepPlan

        def wait(self) -> StepResult:
            self.script.time += self.script.costs.device_seconds(work_of(self.plan))
            return StepResult(self.plan.step, (1,) * sum(row.is_sampled for row in self.plan.rows))


@pytest.mark.parametrize("loop", ["serial", "overlap"])
@pytest.mark.parametrize("batch_policy", ["mixed", "prefill-first"])
def test_requests_get_their_tokens_when_the_workers_loop_gives_them(loop: str, batch_policy: str) -> None:
    draw = random.Random(1)
    at = 0.0
    trace = []
    for number in range(60):
        at += draw.expovariate(200)
        prompt = ids(1 + number % 3, draw.randrange(12)) + ids(100 + number, draw.randint(1, 30))
        trace.append(TraceRequest(at, prompt, draw.randint(1, 20)))
    changes = {"loop": loop, "batch_policy": batch_policy, "num_pages": 24, "max_running": 6}
    simulation, ended = simulate(trace, COSTS, **changes)

    script = Script(COSTS)
    jobs = [Job(list(request.token_ids), request.output_len) for request in trace]
    clients = Clients(jobs, [request.arrival for request in trace], script.now, script.sleep)
    served = drive(script, make_config(**changes), clients)
    assert simulation.scheduler.counters.retractions > 0
    by_arrival = sorted(ended, key=lambda its: its.arrival)
    assert [its.arrival for its in by_arrival] == [its.arrived for its in served]
    assert [its.first for its in by_arrival] == pytest.approx([its.tokens[0] for its in served])
    assert [its.last for its in by_arrival] == pytest.approx([its.tokens[-1] for its in served])
    gaps = Counter(round((after - before) / 1e-6) for its in served for before, after in pairwise(its.tokens))
    assert simulation.totals.gaps == gaps


@pytest.mark.parametrize("loop", ["serial", "overlap"])
def test_time_passes_as_the_cost_model_says(loop: str) -> None:
    trace = [TraceRequest(0.5, ids(5, 3), 3), TraceRequest(0.5, ids(6, 3), 1), TraceRequest(9.0, ids(7, 3), 1)]
    simulation, ended = simulate(trace, loop=loop)
    assert [(its.request.token_ids[0], its.first, its.last) for its in ended] == [
        (6, 1.5, 1.5),
        (5, 1.5, 3.5),
        (7, 10.0, 10.0),
    ]
    assert simulation.totals.gaps == {1_000_000: 2}
    assert (simulation.totals.begin, simulation.totals.end) == (0.5, 10.0)


@pytest.mark.parametrize(("loop", "last"), [("serial", 4 * 1.25), ("overlap", 0.25 + 4 * 1.0)])
def test_overlap_hides_the_hosts_time_behind_the_device(loop: str, last: float) -> None:
    costs = CostModel(step=1e6, prompt_token=0, decode_row=0, host_step=200_000, host_row=50_000)
    _, (served,) = simulate([TraceRequest(0.0, ids(5, 3), 4)], costs, loop=loop)
    assert served.last == pytest.approx(last)


def test_an_output_ends_where_the_trace_says_whatever_max_tokens_is() -> None:
    trace = [TraceRequest(0.0, ids(5 + number, 10), 4 + number) for number in range(8)]
    for max_tokens in (1, 40, 1000):
        simulation, ended = simulate(trace, max_tokens=max_tokens)
        assert len(ended) == 8
        assert simulation.scheduler.counters.generated_tokens == sum(request.output_len for request in trace)


def test_a_follow_up_comes_after_the_answer_and_finds_it_in_the_cache() -> None:
    second = TraceRequest(2.0, ids(5, 8) + ids(9, 8) + ids(7, 4), 1, 11)
    first = TraceRequest(0.0, ids(5, 8), 9, 9, follow_up=lambda: second)
    simulation, ended = simulate([first])
    assert [its.request for its in ended] == [first, second]
    assert ended[1].arrival == ended[0].last + 2.0
    assert simulation.scheduler.counters.cached_tokens == 16


def test_what_is_refused_is_counted_and_not_waited_for() -> None:
    never: Callable[[], TraceRequest] = pytest.fail
    trace = [
        TraceRequest(0.0, ids(5, 8), 4),
        TraceRequest(0.5, ids(6, 8), 4),
        TraceRequest(0.6, ids(7, 8), 4, follow_up=never),
        TraceRequest(0.7, ids(8, 300), 4, follow_up=never),
    ]
    simulation, ended = simulate(trace, max_running=1, max_waiting=1)
    assert len(ended) == 2
    assert simulation.totals.refused == 2


def test_deadlines_end_requests_that_wait_and_that_run() -> None:
    trace = [
        TraceRequest(0.0, ids(5, 8), 9, deadline=4.5),
        TraceRequest(0.0, ids(6, 8), 9, deadline=2.25),
        TraceRequest(0.5, ids(7, 8), 3, deadline=60.0),
        TraceRequest(6.0, ids(8, 16), 16, deadline=1.0),
    ]
    for loop in ("serial", "overlap"):
        simulation, ended = simulate(trace, max_running=1, loop=loop)
        assert [its.request for its in ended] == [trace[2]]
        assert simulation.totals.ended_early == 2
        assert simulation.totals.refused == 1, "the last could not be in time at the rate seen so far"


def test_policies_see_priority_and_tenant() -> None:
    trace = [TraceRequest(0.1 * at, ids(5 + at, 8), 2, tenant="ab"[at == 3], priority=at) for at in range(4)]
    for policy, order in (("fcfs", [0, 1, 2, 3]), ("priority", [0, 3, 2, 1]), ("fair", [0, 3, 1, 2])):
        _, ended = simulate(trace, max_running=1, policy=policy)
        assert [its.request.priority for its in ended] == order


def test_work_tells_prompts_decode_rows_and_what_they_read() -> None:
    def plan(*rows: tuple[int, int]) -> StepPlan:
        made = [Row(uid, uid, start, length, None, True) for uid, (start, length) in enumerate(rows)]
        return StepPlan(0, tuple(made), is_decode=all(length == 1 for _, length in rows))

    assert work_of(plan((9, 1), (19, 1))) == Work(1, 0, 0, 2, 30, 0)
    assert work_of(plan((9, 1), (10, 3))) == Work(1, 3, 1, 1, 10 + 13, 11 + 12 + 13)
    assert COSTS.device_seconds(Work(1, 3, 1, 1, 23, 36)) == pytest.approx(
        1e-6 * (1000 + 3 * 70 + 5 + 30 + 2 * 23 + 18)
    )
