"""The scheduler and its prefix cache in virtual time: what the requests of a trace would see.

`Scheduler` decides everything, as it does in the worker's loops; only the device is a cost model, and the tokens are
those that the trace tells.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import mul
from typing import Annotated, NamedTuple

import msgspec

from tokenmill.config import ResolvedConfig
from tokenmill.errors import InvalidRequest, Overloaded
from tokenmill.sched.pace import Pace
from tokenmill.sched.plan import StepPlan, StepResult
from tokenmill.sched.request import Request
from tokenmill.sched.scheduler import Scheduler
from tokenmill.types import SamplingParams

END_ID = 0
NEVER = -1.0
MICROSECOND = 1e-6
Micros = Annotated[float, msgspec.Meta(ge=0)]


class Work(NamedTuple):
    """What a step asks of the device. A pair is a prompt token and a token that it attends to."""

    steps: int
    prompt_tokens: int
    prompt_rows: int
    decode_rows: int
    kv_tokens: int
    pairs: int


class CostModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long things take, in microseconds.

    The device: each step, and in it each prompt token, prompt row, decode row, token whose K/V is read, and pair of a
    prompt token and a token that it attends to. The host: each step and each row of it. `request` is what a request
    waits outside of the scheduler in all: for the network, the tokenizer and its first text.
    """

    step: Micros
    prompt_token: Micros
    decode_row: Micros
    prompt_row: Micros = 0.0
    kv_token: Micros = 0.0
    pair: Micros = 0.0
    host_step: Micros = 0.0
    host_row: Micros = 0.0
    request: Micros = 0.0

    def device_seconds(self, work: Work) -> float:
        """How long the device computes a step."""
        costs = self.step, self.prompt_token, self.prompt_row, self.decode_row, self.kv_token, self.pair
        micros: float = sum(map(mul, costs, work))
        return MICROSECOND * micros

    def host_seconds(self, rows: int) -> float:
        """How long the host plans, launches and commits a step."""
        return MICROSECOND * (self.host_step + self.host_row * rows)


@dataclass(slots=True)
class TraceRequest:
    """One request of a trace. Times are in seconds.

    `arrival` is since the begin, and of a follow-up since the end of the request before it; `deadline` is since the
    arrival. `output_len` tokens are drawn: `output_id`, and at last an end id. `follow_up` makes the request that comes
    when this one has ended.
    """

    arrival: float
    token_ids: array[int]
    output_len: int
    output_id: int = 1
    tenant: str = ""
    priority: int = 0
    deadline: float | None = None
    follow_up: Callable[[], TraceRequest] | None = None


@dataclass(slots=True)
class Tenant:
    """Tokens served to a tenant, prompts when they are admitted but for what is cached; requests in the scheduler."""

    served: int = 0
    present: int = 0


@dataclass(slots=True)
class Served:
    """A request in the scheduler, and when its first and its last token came. Times are in seconds since the begin."""

    request: TraceRequest
    tenant: Tenant
    arrival: float
    output_id: int
    num_left: int
    first: float = NEVER
    last: float = NEVER


@dataclass(slots=True)
class Totals:
    """What a simulation saw of all requests. Times are in seconds: of the first arrival and of the end.

    `gaps` counts times between two tokens of a request by their microseconds.
    """

    refused: int = 0
    ended_early: int = 0
    begin: float = 0.0
    end: float = 0.0
    gaps: dict[int, int] = field(default_factory=dict)


class Simulation:
    """One run of a trace.

    Args:
        config: the scheduler's. Its `loop` decides whether the host's time hides behind the device's.
        costs: how long steps take.
        trace: requests in order of arrival; they are asked for one by one.
        max_tokens: what requests give as theirs, so that the scheduler does not know how much they will draw; one
            that draws more gives that.
        on_end: is called with each request that has drawn its last token.
        on_step: is called after each commit with the time, the number of tokens drawn, and this.

    Attributes:
        tenants: by name, all that have come.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        costs: CostModel,
        trace: Iterable[TraceRequest],
        *,
        max_tokens: int = 1,
        on_end: Callable[[Served], object] = lambda served: None,
        on_step: Callable[[float, int, Simulation], object] = lambda now, tokens, simulation: None,
    ) -> None:
        self.scheduler = Scheduler(config)
        self.totals = Totals()
        self.tenants: dict[str, Tenant] = {}
        self._costs, self._max_tokens, self._on_end, self._on_step = costs, max_tokens, on_end, on_step
        self._max_len = min(config.max_model_len, config.pool_tokens)
        self._is_overlap = config.loop == "overlap"
        self._trace = iter(trace)
        self._next = next(self._trace, None)
        self._follow_ups: list[tuple[float, int, TraceRequest]] = []
        self._served: dict[int, Served] = {}
        self._params, self._end_ids = SamplingParams(), frozenset((END_ID,))
        self._num_sent = 0
        self._now = 0.0
        self._device_free = 0.0
        self._pace = Pace()

    def run(self) -> Totals:
        """Serve the whole trace, with the turns of ``worker.loop``."""
        flight: tuple[StepPlan, float] | None = None
        is_idle = True
        self.totals.begin = self._next.arrival if self._next else 0.0
        while self._intake(is_idle):
            launched = self._launch()
            landing, flight = (flight, launched) if self._is_overlap else (launched, None)
            if landing is not None:
                self._land(*landing)
            is_idle = landing is None and launched is None
        self.totals.end = self._now
        return self.totals

    @property
    def _millis(self) -> int:
        return int(1000 * self._now)

    def _intake(self, is_idle: bool) -> bool:
        """Add what has arrived, when idle after waiting for it; False: nothing is left to do."""
        if is_idle:
            arrival = min(
                self._next.arrival if self._next else float("inf"),
                self._follow_ups[0][0] if self._follow_ups else float("inf"),
            )
            if arrival == float("inf"):
                if self._served:
                    raise AssertionError(f"{len(self._served)} requests are left, and nothing is planned for them")
                return False
            self._now = max(self._now, arrival)
        while self._follow_ups and self._follow_ups[0][0] <= self._now:
            arrival, _, request = heappop(self._follow_ups)
            self._add(request, arrival)
        while self._next is not None and self._next.arrival <= self._now:
            self._add(self._next, self._next.arrival)
            self._next = next(self._trace, None)
        return True

    def _add(self, request: TraceRequest, arrival: float) -> None:
        self._num_sent += 1
        prompt_len = len(request.token_ids)
        most = max(request.output_len, min(self._max_tokens, self._max_len - prompt_len))
        deadline = None if request.deadline is None else int(1000 * (arrival + request.deadline))
        job = Request(
            uid=self._num_sent,
            token_ids=request.token_ids[:],
            prompt_len=prompt_len,
            max_len=prompt_len + most,
            params=self._params,
            end_ids=self._end_ids,
            priority=request.priority,
            deadline=deadline,
            tenant=request.tenant,
        )
        try:
            self.scheduler.add(job, self._millis, self._pace.rate)
        except (Overloaded, InvalidRequest):
            self.totals.refused += 1
            return
        tenant = self.tenants.setdefault(request.tenant, Tenant())
        tenant.present += 1
        self._served[job.uid] = Served(request, tenant, arrival, request.output_id, request.output_len)

    def _launch(self) -> tuple[StepPlan, float] | None:
        """Plan a step; with the time at which the device has computed it."""
        millis = self._millis
        plan = self.scheduler.plan(millis)
        self._pace.planned(plan.num_tokens if plan else 0, millis, is_busy=self.scheduler.num_waiting > 0)
        for ending in self.scheduler.take_ended():
            self._end(self._served.pop(ending.uid))
        if plan is None:
            return None
        self._now += self._costs.host_seconds(len(plan.rows))
        begin = max(self._now, self._device_free)
        self._device_free = begin + self._costs.device_seconds(work_of(plan))
        return plan, self._device_free

    def _land(self, plan: StepPlan, done: float) -> None:
        """Wait for a step, draw what the trace tells, and commit it."""
        now = self._now = max(self._now, done)
        served, gaps = self._served, self.totals.gaps
        rows = [served.get(row.uid) for row in plan.rows if row.is_sampled]
        drawn = [END_ID if its is None or its.num_left == 1 else its.output_id for its in rows]
        outcome = self.scheduler.commit(plan, StepResult(plan.step, tuple(drawn)))
        for uid, cached in outcome.admitted:
            if uid in served:
                served[uid].tenant.served += len(served[uid].request.token_ids) - cached
        since: dict[float, int] = {}
        for uid, _ in outcome.tokens:
            its = served[uid]
            since[its.last] = since.get(its.last, 0) + 1
            its.num_left -= 1
            its.last = now
            its.tenant.served += 1
        for last, count in since.items():
            if last >= 0:
                gap = round((now - last) / MICROSECOND)
                gaps[gap] = gaps.get(gap, 0) + count
        if NEVER in since:
            for uid, _ in outcome.tokens:
                if served[uid].first == NEVER:
                    served[uid].first = now
        for ending in outcome.finished:
            self._end(served.pop(ending.uid))
        self._on_step(now, len(outcome.tokens), self)

    def _end(self, served: Served) -> None:
        request = served.request
        served.tenant.present -= 1
        if served.num_left:
            self.totals.ended_early += 1
            return
        self._on_end(served)
        if request.follow_up is not None:
            after = request.follow_up()
            heappush(self._follow_ups, (self._now + after.arrival, self._num_sent, after))


def work_of(plan: StepPlan) -> Work:
    """What a plan asks of the device."""
    rows = plan.rows
    if plan.is_decode:
        return Work(1, 0, 0, len(rows), sum([row.start for row in rows]) + len(rows), 0)
    prompt_tokens = prompt_rows = kv_tokens = pairs = 0
    for row in rows:
        length, end = row.length, row.start + row.length
        kv_tokens += end
        if length > 1:
            prompt_tokens += length
            prompt_rows += 1
            pairs += length * end - length * (length - 1) // 2
    return Work(1, prompt_tokens, prompt_rows, len(rows) - prompt_rows, kv_tokens, pairs)
