"""Every decision about requests and pages, behind four verbs: add, abort, plan, commit.

Deterministic: the same calls give the same plans, in any process. At most two plans may be out at a time
(the device computes one while the next is planned); they are committed in the order in which they were planned.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from tokenmill.config import ResolvedConfig
from tokenmill.errors import InvalidRequest, Overloaded, RequestTooLong
from tokenmill.sched import policy
from tokenmill.sched.cache import PrefixCache
from tokenmill.sched.plan import PageUpdate, Row, SlotOpening, StepPlan, StepResult
from tokenmill.sched.request import Request, Status
from tokenmill.types import FinishReason

MAX_RESERVED_OUTPUT = 4096


@dataclass(slots=True)
class Outcome:
    """What a step brought: (uid, token) drawn, (uid, cached tokens) first admitted, and requests that ended."""

    tokens: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[tuple[int, int]] = field(default_factory=list)
    finished: list[Ending] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a request ended; `token` is the id that stopped it, if one did, and `is_end_id` if it was the model's own."""

    uid: int
    reason: FinishReason
    token: int | None = None
    is_end_id: bool = False


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    retractions: int = 0


class Scheduler:
    """Requests from waiting to finished. The owner of every Request."""

    def __init__(self, config: ResolvedConfig) -> None:
        self.config = config
        self.cache = PrefixCache(
            config.num_pages, config.page_size, is_enabled=config.prefix_cache, eviction=config.eviction
        )
        self.counters = Counters()
        self._requests: dict[int, Request] = {}
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._free_slots = list(range(config.max_running - 1, -1, -1))
        self._arrivals = 0
        self._last_planned = -1
        self._was_prefill = False
        self._openings: list[SlotOpening] = []
        self._updates: list[PageUpdate] = []
        self._admitted: list[tuple[int, int]] = []

    @property
    def num_waiting(self) -> int:
        """Requests that hold no pages."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot and pages, those that end after a step in flight included."""
        return len(self._requests) - len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished or still named by a step in flight."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Put a request into the queue.

        Raises:
            InvalidRequest: it has no prompt, or its uid is taken.
            RequestTooLong: it could never run, even alone.
            Overloaded: the queue is full.
        """
        config = self.config
        if request.prompt_len < 1:
            raise InvalidRequest("the prompt is empty: it has no tokens", "prompt")
        if request.uid in self._requests:
            raise InvalidRequest(f"request {request.uid} is already here: give each request an id of its own")
        if request.max_len > min(config.max_model_len, config.pool_tokens) or request.prompt_len >= request.max_len:
            raise RequestTooLong(
                f"{request.prompt_len} prompt tokens and {request.max_len - request.prompt_len} output tokens do not "
                f"fit: the server holds {min(config.max_model_len, config.pool_tokens)} tokens a request",
                "max_tokens",
            )
        if len(self._waiting) >= config.max_waiting:
            raise Overloaded(f"the queue is full ({config.max_waiting} requests are waiting); try again later")
        self._arrivals += 1
        request.arrival = self._arrivals
        self._requests[request.uid] = request
        insort(self._waiting, request, key=policy.first_come)

    def abort(self, uid: int) -> bool:
        """End a request in whatever state it is; False when it is unknown or already ended.

        Its row and pages are free at once, or when the steps in flight that name it are committed.
        """
        request = self._requests.get(uid)
        if request is None or request.status is Status.FINISHED:
            return False
        if request.status is Status.WAITING:
            self._waiting.remove(request)
            del self._requests[uid]
        else:
            self._end(request)
        return True

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed before a step in flight is committed."""
        decodes, chunks = self._plan_mixed() if self.config.batch_policy == "mixed" else self._plan_alternating()
        if not decodes and not chunks:
            return None
        self._was_prefill = bool(chunks)
        rows = (*decodes, *chunks)
        self._last_planned += 1
        plan = StepPlan(self._last_planned, rows, tuple(self._openings), tuple(self._updates), is_decode=not chunks)
        self._openings.clear()
        self._updates.clear()
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> Outcome:
        """Take in what a step drew. Plans are committed in the order in which they were made."""
        outcome = Outcome(admitted=self._admitted)
        self._admitted = []
        requests, tokens = self._requests, outcome.tokens
        finished, retracting = Status.FINISHED, Status.RETRACTING
        drawn = iter(result.token_ids)
        for row in plan.rows:
            request = requests[row.uid]
            request.num_in_flight -= 1
            token = -1
            if row.is_sampled:
                request.num_pending -= 1
                token = next(drawn)
            if request.status is finished:
                self._release_when_idle(request)
                continue
            if row.start < request.prompt_len or row.length > 1:
                self._share(request, row.start + row.length)
            if row.is_sampled:
                request.token_ids.append(token)
                tokens.append((row.uid, token))
                if token in request.stop_ids or len(request.token_ids) >= request.max_len:
                    self._finish(request, token, outcome)
            if request.status is retracting:
                self._release_when_idle(request)
        self.cache.retire(plan.step)
        self.counters.steps += 1
        self.counters.generated_tokens += len(tokens)
        return outcome

    def check(self) -> None:
        """Assert that pages, slots and lengths are consistent; for tests and debug runs."""
        self.cache.check()
        held = [r for r in self._requests.values() if r.status is not Status.WAITING]
        assert sorted([r.slot for r in held] + self._free_slots) == list(range(self.config.max_running))
        assert [r for r in held if r.status is Status.RUNNING] == self._running
        for request in held:
            assert len(request.lease.pages) * self.config.page_size >= request.computed_len
            assert 0 <= request.num_pending <= request.num_in_flight <= 2

    def _plan_mixed(self) -> tuple[list[Row], list[Row]]:
        return self._plan_rows(decode=True, prefill=True)

    def _plan_alternating(self) -> tuple[list[Row], list[Row]]:
        """Prompts first, but after each step of prompt chunks one of decode rows."""
        for prefill in (False, True) if self._was_prefill else (True, False):
            decodes, chunks = self._plan_rows(decode=not prefill, prefill=prefill)
            if decodes or chunks:
                return decodes, chunks
        return [], []

    def _plan_rows(self, *, decode: bool, prefill: bool) -> tuple[list[Row], list[Row]]:
        """Decode rows and prompt chunks: running requests, oldest first, then newly admitted ones."""
        decodes: list[Row] = []
        chunks: list[Row] = []
        budget = self._prompt_budget(beside_decode=decode) if prefill else 0
        page_size, running = self.config.page_size, Status.RUNNING
        for request in list(self._running):
            start = request.computed_len
            expected = len(request.token_ids) + request.num_pending
            if expected == start or expected >= request.max_len or request.status is not running:
                continue
            is_decode = expected - start == 1
            length = int(decode) if is_decode else min(budget, expected - start)
            if not length:
                continue
            end = start + length
            if end > len(request.lease.pages) * page_size and not self._get_pages(request, end, may_retract=True):
                continue
            if is_decode:
                decodes.append(self._make_row(request, start, end))
            else:
                chunks.append(self._make_row(request, start, end))
                budget -= length
        if prefill and budget > 0 and self._waiting and self._free_slots:
            self._admit_waiting(budget, chunks)
        return decodes, chunks

    def _admit_waiting(self, budget: int, chunks: list[Row]) -> None:
        """Begin waiting requests, while they fit beside what the running ones are expected to take."""
        reserved = sum(self._expected_pages(request) - len(request.lease.pages) for request in self._running)
        while budget > 0 and self._waiting and self._free_slots:
            request = self._waiting[0]
            if not self._admit(request, reserved):
                return
            start = request.computed_len
            length = min(budget, request.num_uncomputed)
            if not self._get_pages(request, start + length, may_retract=False):
                return
            reserved += self._expected_pages(request) - len(request.lease.pages)
            chunks.append(self._make_row(request, start, start + length))
            budget -= length

    def _prompt_budget(self, *, beside_decode: bool) -> int:
        most = self.config.prefill_budget
        has_prompts = self._waiting or self._was_prefill
        if not beside_decode or not has_prompts or all(request.num_uncomputed > 1 for request in self._running):
            return most
        outstanding = sum(request.num_uncomputed for request in self._running if request.num_uncomputed > 1)
        for request in self._waiting:
            if outstanding >= 4 * most:
                break
            outstanding += request.num_uncomputed
        return policy.prompt_budget(most, outstanding)

    def _make_row(self, request: Request, start: int, end: int) -> Row:
        known = len(request.token_ids)
        token_ids = request.token_ids[start:end] if start < known else None
        is_sampled = end == known + request.num_pending
        request.computed_len = end
        request.num_in_flight += 1
        request.num_pending += is_sampled
        return Row(request.uid, request.slot, start, end - start, token_ids, is_sampled)

    def _get_pages(self, request: Request, length: int, *, may_retract: bool) -> bool:
        """Pages for `length` tokens, taken from newer requests if there is no other way."""
        if length <= len(request.lease.pages) * self.config.page_size:
            return True
        while True:
            first = len(request.lease.pages)
            pages = self.cache.extend(request.lease, length)
            if pages is not None:
                self._updates.append(PageUpdate(request.slot, first, tuple(pages)))
                return True
            # Requests that left, but are named by a step in flight, give their pages back when it is committed.
            if not may_retract or self.num_running > len(self._running):
                return False
            victim = min(self._running, key=policy.newest_first)
            self._running.remove(victim)
            victim.status = Status.RETRACTING
            self.counters.retractions += 1
            self._release_when_idle(victim)
            if victim is request:
                return False

    def _admit(self, request: Request, reserved: int) -> bool:
        """Give a waiting request a slot, if it fits beside the pages reserved."""
        token_ids = request.token_ids.tobytes()
        hit, from_available = self.cache.hit(token_ids, request.salt)
        needed = self._expected_pages(request) - hit // self.config.page_size + from_available
        if needed + reserved > self.cache.num_available:
            return False
        self._waiting.pop(0)
        request.lease = self.cache.open(request.uid, token_ids, request.salt)
        request.slot = self._free_slots.pop()
        request.status = Status.RUNNING
        request.computed_len = hit
        if request.cached_len < 0:
            request.cached_len = hit
            self._admitted.append((request.uid, hit))
            self.counters.prompt_tokens += request.prompt_len
            self.counters.cached_tokens += hit
        insort(self._running, request, key=policy.first_come)
        blocked = tuple(sorted(request.stop_ids)) if request.params.min_tokens else ()
        self._openings.append(SlotOpening(request.slot, request.uid, request.params, request.prompt_len, blocked))
        if request.lease.pages:
            self._updates.append(PageUpdate(request.slot, 0, tuple(request.lease.pages)))
        return True

    def _expected_pages(self, request: Request) -> int:
        """Pages that a request is expected to take in all: prompt in full, output by the ratio, one token at least."""
        remaining = request.num_remaining
        output = int(min(remaining, MAX_RESERVED_OUTPUT) * self.config.reserve_ratio)
        return self.cache.num_pages_for(request.max_len - remaining + min(remaining, max(output, 1)))

    def _finish(self, request: Request, token: int, outcome: Outcome) -> None:
        """End a request that drew a token which stops it, or its last one."""
        if token in request.stop_ids:
            outcome.finished.append(Ending(request.uid, FinishReason.STOP, token, token in request.end_ids))
        else:
            outcome.finished.append(Ending(request.uid, FinishReason.LENGTH))
        self._end(request)

    def _share(self, request: Request, length: int) -> None:
        """Make a computed chunk of a prompt known to the prefix tree."""
        changed = self.cache.share(request.lease, request.token_ids.tobytes(), length, self._last_planned)
        if changed:
            self._updates.append(PageUpdate(request.slot, changed[0], tuple(changed[1])))

    def _end(self, request: Request) -> None:
        if request.status is Status.RUNNING:
            self._running.remove(request)
        request.status = Status.FINISHED
        self._release_when_idle(request)

    def _release_when_idle(self, request: Request) -> None:
        """Free slot and pages of a request that left `_running`, once no step in flight names it."""
        if request.num_in_flight:
            return
        known = min(request.computed_len, request.total_len)
        self.cache.close(request.uid, request.token_ids.tobytes(), known)
        self._free_slots.append(request.slot)
        request.slot = -1
        if request.status is Status.FINISHED:
            del self._requests[request.uid]
        else:
            request.status = Status.WAITING
            request.computed_len = 0
            insort(self._waiting, request, key=policy.first_come)
