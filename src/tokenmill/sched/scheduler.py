"""Every decision about requests and pages, behind four verbs: add, abort, plan, commit.

Deterministic: the same calls give the same plans, in any process; times and rates come as data. At most two plans may
be out at a time (the device computes one while the next is planned); they are committed in the order in which they
were planned.
"""

from __future__ import annotations

from bisect import insort
from heapq import heapify, heappop, heappush

from tokenmill.config import ResolvedConfig
from tokenmill.errors import InvalidRequest, RequestTooLong
from tokenmill.sched import policy
from tokenmill.sched.admission import Admission
from tokenmill.sched.cache import PrefixCache
from tokenmill.sched.plan import Counters, Ending, Outcome, PageUpdate, Row, SlotOpening, StepPlan, StepResult
from tokenmill.sched.policy_file import load_policy
from tokenmill.sched.request import Request, Status, seniority
from tokenmill.types import FinishReason


class Scheduler:
    """Requests from waiting to finished. The owner of every Request."""

    def __init__(self, config: ResolvedConfig) -> None:
        self.config = config
        self.cache = PrefixCache(
            config.num_pages,
            config.page_size,
            is_enabled=config.prefix_cache,
            eviction=config.eviction,
            window=config.window,
            num_window_pages=config.num_window_pages,
        )
        self._longest_row = config.longest_row
        self._has_full_kind, self._window_kind = config.has_full_kind, int(config.has_full_kind)
        self.counters = Counters()
        self._policy = load_policy(config.policy)
        self._requests: dict[int, Request] = {}
        self._running: list[Request] = []  # in the order in which they keep their pages
        self._computing: dict[int, Request] = {}  # running ones whose prompt is not in the tree yet
        self._admission = Admission(config, self.cache, self._policy, self._running, self._computing)
        self._queue = self._admission.queue
        self._free_slots = list(range(config.max_running - 1, -1, -1))
        self._deadlines: list[tuple[int, int, Request]] = []
        self._arrivals = 0
        self._last_planned = -1
        self._was_prefill = False
        self._openings: list[SlotOpening] = []
        self._updates: list[PageUpdate] = []
        self._admitted: list[tuple[int, int]] = []
        self._ended: list[Ending] = []

    @property
    def num_waiting(self) -> int:
        """Requests that hold no pages."""
        return len(self._queue)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt and generated tokens of the requests that hold no pages."""
        return self._queue.num_tokens

    @property
    def num_running(self) -> int:
        """Requests that hold a slot and pages, those that end after a step in flight included."""
        return len(self._requests) - len(self._queue)

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished or still named by a step in flight."""
        return bool(self._requests)

    def add(self, request: Request, now: int = 0, rate: int = 0) -> None:
        """Put a request into the queue.

        `now` is the time in milliseconds; `rate` how many tokens a second, prompt and output together, this server is
        known to reach when it is busy, 0 if that is not known.

        Raises:
            InvalidRequest: it has no prompt, or its uid is taken.
            RequestTooLong: it could never run, even alone.
            DeadlinePassed: its deadline is not after `now`.
            Overloaded: the queue is full, or the request's deadline cannot be met.
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
        self._arrivals += 1
        request.arrival = self._arrivals
        self._admission.check_load(request, now, rate)
        request.rank = self._policy.keep(request, self._admission.ledger)
        self._requests[request.uid] = request
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, request.arrival, request))
        self._admission.ledger.enter(request.tenant)
        self._admission.enqueue(request)

    def abort(self, uid: int) -> bool:
        """End a request in whatever state it is; False when it is unknown or already ended.

        Its row and pages are free at once, or when the steps in flight that name it are committed.
        """
        request = self._requests.get(uid)
        if request is None or request.status is Status.FINISHED:
            return False
        if request.status is Status.WAITING:
            self._queue.remove(request)
            self._admission.ledger.leave(request.tenant)
            self._admission.try_again()
            request.status = Status.FINISHED
            del self._requests[uid]
        else:
            self._end(request)
        return True

    def plan(self, now: int = 0) -> StepPlan | None:
        """The next step, or None when nothing can be computed before a step in flight is committed.

        Requests whose deadline is not after `now`, in milliseconds, end first (see `take_ended`).
        """
        self._admission.ledger.now = now
        self._expire(now)
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

    def take_ended(self) -> list[Ending]:
        """Requests that `plan` ended. They also come with the next step's Outcome if they are not taken before."""
        ended, self._ended = self._ended, []
        return ended

    def commit(self, plan: StepPlan, result: StepResult) -> Outcome:
        """Take in what a step drew. Plans are committed in the order in which they were made."""
        outcome = Outcome(admitted=self._admitted, finished=self.take_ended())
        self._admitted = []
        requests, computing, tokens = self._requests, self._computing, outcome.tokens
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
            if computing and row.uid in computing:
                self._share(request, row.start + row.length)
                if row.is_sampled:
                    del computing[row.uid]
            if row.uid in result.endings:
                error = result.endings[row.uid]
                reason = FinishReason.STOP if error is None else FinishReason.ERROR
                outcome.finished.append(Ending(row.uid, reason, error=error))
                self._end(request)
            elif row.is_sampled:
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
        assert {r.uid for r in held if r.status is Status.RUNNING} == {r.uid for r in self._running}
        assert self._running == sorted(self._running, key=seniority)
        assert all(self._requests[uid].status is Status.RUNNING for uid in self._computing)
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
        """Decode rows and prompt chunks: running requests in their order, then newly admitted ones."""
        decodes: list[Row] = []
        chunks: list[tuple[Request, int]] = []
        budget, is_contended = self._prompt_budget(beside_decode=decode) if prefill else (0, False)
        left = budget
        page_size, running = self.config.page_size, Status.RUNNING
        for request in list(self._running):
            start = request.computed_len
            known = len(request.token_ids)
            end = known + request.num_pending
            if end == start or end >= request.max_len or request.status is not running:
                continue
            if end - start == 1:
                if not decode or (
                    end > len(request.lease.pages) * page_size and not self._get_pages(request, end, may_retract=True)
                ):
                    continue
                token_ids = request.token_ids[start:end] if start < known else None
                decodes.append(Row(request.uid, request.slot, start, 1, token_ids, True))
                request.computed_len = end
                request.num_in_flight += 1
                request.num_pending += 1
            elif left:
                needed = min(end - start, request.longest_row, self._longest_row)
                length = policy.chunk_length(left, budget, needed, is_contended=is_contended)
                if self._get_pages(request, start + length, may_retract=True):
                    chunks.append((request, length))
                    left -= length
        if left and self._queue and self._free_slots:
            left = self._admit_waiting(left, budget, chunks)
        return decodes, self._make_chunks(chunks, left)

    def _prompt_budget(self, *, beside_decode: bool) -> tuple[int, bool]:
        """Prompt tokens that this step may compute, and whether several requests want them."""
        most = self.config.prefill_budget
        needed = [length for request in self._computing.values() if (length := request.num_uncomputed) > 1]
        is_contended = len(needed) + (len(self._queue) if self._free_slots and self._admission.may_admit else 0) > 1
        if beside_decode and len(needed) < len(self._running):
            return policy.prompt_budget(most, sum(needed) + self._queue.num_tokens), is_contended
        return most, is_contended

    def _make_chunks(self, chunks: list[tuple[Request, int]], left: int) -> list[Row]:
        """Rows of prompts; what is left of the budget goes to those that were cut short for others."""
        rows = []
        for request, length in chunks:
            start, known = request.computed_len, len(request.token_ids)
            extra = min(left, known - start - length, min(request.longest_row, self._longest_row) - length)
            if extra > 0 and self._get_pages(request, start + length + extra, may_retract=False):
                length += extra
                left -= extra
            end = start + length
            rows.append(Row(request.uid, request.slot, start, length, request.token_ids[start:end], end == known))
            request.computed_len = end
            request.num_in_flight += 1
            request.num_pending += end == known
        return rows

    def _get_pages(self, request: Request, length: int, *, may_retract: bool) -> bool:
        """Pages for `length` tokens, taken from requests behind it if there is no other way."""
        if length <= len(request.lease.pages) * self.config.page_size:
            return True
        while True:
            first = len(request.lease.pages)
            pages = self.cache.extend(request.lease, length, request.computed_len, self._last_planned)
            if pages is not None:
                self._update(request, first, first + len(pages))
                return True
            # Fenced pages, and those of requests that left but are in a step in flight, come back when it is done.
            if not may_retract or self.num_running > len(self._running) or self.cache.has_fenced:
                return False
            victim = self._running[-1]
            self._leave(victim)
            victim.status = Status.RETRACTING
            self.counters.retractions += 1
            self._admission.estimate.learn_from_retraction(victim)
            self._release_when_idle(victim)
            if victim is request:
                return False

    def _admit_waiting(self, left: int, budget: int, chunks: list[tuple[Request, int]]) -> int:
        """Begin waiting requests; returns what is left of the prompt budget."""
        admission = self._admission
        admission.begin_step()
        while left and self._free_slots and (request := admission.choose()):
            self._begin(request)
            needed = min(request.num_uncomputed, request.longest_row, self._longest_row)
            length = policy.chunk_length(left, budget, needed, is_contended=len(self._queue) > 0)
            if not self._get_pages(request, request.computed_len + length, may_retract=False):
                break
            admission.began(request)
            chunks.append((request, length))
            left -= length
        return left

    def _begin(self, request: Request) -> None:
        """Give a request that was waiting a slot, and the pages of its hit."""
        request.lease = self.cache.open(request.uid, request.prefix_ids, request.salt, request.priority)
        request.slot = self._free_slots.pop()
        request.status = Status.RUNNING
        request.computed_len = request.hit_len
        if request.cached_len < 0:
            request.cached_len = request.hit_len
            self._admitted.append((request.uid, request.hit_len))
            self.counters.prompt_tokens += request.prompt_len
            self.counters.cached_tokens += request.hit_len
        expected = request.total_len - request.cached_len + self._admission.estimate.remaining(request)
        self._admission.ledger.charge(request, expected)
        insort(self._running, request, key=seniority)
        self._computing[request.uid] = request
        blocked = tuple(sorted(request.stop_ids)) if request.params.min_tokens else ()
        history = request.token_ids.tobytes() if request.params.needs_history else b""
        opening = SlotOpening(request.slot, request.uid, request.params, request.prompt_len, blocked, history)
        self._openings.append(opening)
        if request.lease.pages:
            self._update(request, 0, len(request.lease.pages))

    def _expire(self, now: int) -> None:
        """End what is over its deadline."""
        self.cache.expire(now)
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            _, _, request = heappop(deadlines)
            if self._requests.get(request.uid) is request and self.abort(request.uid):
                self._ended.append(Ending(request.uid, FinishReason.DEADLINE))
        if len(deadlines) > 2 * len(self._requests) + 64:
            self._deadlines = [entry for entry in deadlines if entry[2].status is not Status.FINISHED]
            heapify(self._deadlines)

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
        if changed is not None:
            self._update(request, *changed)
        self._admission.try_again()

    def _update(self, request: Request, start: int, stop: int) -> None:
        """Tell the engine pages start .. stop - 1 of a request, of each kind."""
        lease = request.lease
        if self._has_full_kind:
            self._updates.append(PageUpdate(request.slot, start, tuple(lease.pages[start:stop])))
        if lease.window and (first := max(start, lease.first)) < stop:
            self._updates.append(PageUpdate(request.slot, first, tuple(lease.window[first:stop]), self._window_kind))

    def _leave(self, request: Request) -> None:
        """Take a request out of those that run; its tenant pays for what it has drawn."""
        self._running.remove(request)
        self._computing.pop(request.uid, None)
        self._admission.ledger.charge(request, request.total_len - request.cached_len)

    def _end(self, request: Request) -> None:
        if request.status is Status.RUNNING:
            self._leave(request)
        request.status = Status.FINISHED
        self._admission.estimate.learn(request)
        self._admission.ledger.leave(request.tenant)
        self._release_when_idle(request)

    def _release_when_idle(self, request: Request) -> None:
        """Free slot and pages of a request that left `_running`, once no step in flight names it."""
        if request.num_in_flight:
            return
        known = min(request.computed_len, request.total_len)
        self.cache.close(request.uid, request.token_ids.tobytes(), known)
        self._admission.try_again()
        self._free_slots.append(request.slot)
        request.slot = -1
        if request.status is Status.FINISHED:
            del self._requests[request.uid]
        else:
            request.status = Status.WAITING
            request.computed_len = 0
            self._admission.enqueue(request)
