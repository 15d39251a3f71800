"""Which waiting request may begin: whose turn it is, whether there is room, and whether it does better to wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenmill.config import ResolvedConfig
from tokenmill.errors import DeadlinePassed, Overloaded
from tokenmill.sched import policy
from tokenmill.sched.cache import PrefixCache
from tokenmill.sched.forecast import Forecast, OutputEstimate
from tokenmill.sched.policy import Policy
from tokenmill.sched.queue import Ledger, WaitingQueue
from tokenmill.sched.request import Request

MAX_RETRY_AFTER = 60


class Admission:
    """The queue, and what is asked before a request leaves it. Called only by the scheduler.

    `running` and `computing` are the scheduler's, and only read here: requests that run, and those of them that compute
    a prompt that is not in the tree yet, by uid.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        cache: PrefixCache,
        order: Policy,
        running: Sequence[Request],
        computing: Mapping[int, Request],
    ) -> None:
        self.ledger = Ledger()
        self.queue = WaitingQueue(order, self.ledger, self._look_up)
        self.estimate = OutputEstimate(config.reserve_ratio)
        self._config = config
        self._cache = cache
        self._running = running
        self._computing = computing
        self._forecast: Forecast | None = None
        self._room_when_full: int | None = None

    @property
    def may_admit(self) -> bool:
        """Whether a request waits, and more pages can be had than when the queue's first found no room, if it did."""
        full = self._room_when_full
        return len(self.queue) > 0 and (full is None or self._cache.room > full)

    def enqueue(self, request: Request) -> None:
        """Let a request wait, or wait again."""
        if self.queue.add(request):
            self.try_again()

    def try_again(self) -> None:
        """Pages were freed or shared, or the queue has another first: a refusal may be out of date."""
        self._room_when_full = None

    def begin_step(self) -> None:
        """Requests have grown or left since the last call of `choose`."""
        self._forecast = None

    def choose(self) -> Request | None:
        """The next request to begin, taken out of the queue; None while there is none, or no room for it.

        One that finds no room is not passed by others. `began` must follow before the next call.
        """
        request = self.queue.first(self._is_held) if self.may_admit else None
        if request is None:
            return None
        request.hit_len, from_available = self._cache.hit(request.prefix_ids, request.salt)
        available = self._cache.num_available
        if self._forecast is None:
            self._forecast = Forecast(self._config.page_size, self.estimate, self._cache.num_released)
            self._forecast.add(self._running)
        has_room = self._forecast.has_room(request, request.hit_len, from_available, available)
        if not has_room or not self._has_window_room(request):
            self._room_when_full = self._cache.room
            return None
        self.queue.take(request)
        return request

    def _has_window_room(self, request: Request) -> bool:
        """Whether running requests and this one find the window pages that they may need at once."""
        windows = self._cache.windows
        if windows is None or not self._running:
            return True
        growth = windows.growth(0, *self._end_and_row(request, request.total_len - request.hit_len))
        for its in self._running:
            end_and_row = self._end_and_row(its, its.num_uncomputed)
            growth += windows.growth(its.lease.num_window_pages, *end_and_row)
        return growth <= windows.num_available

    def _end_and_row(self, request: Request, uncomputed: int) -> tuple[int, int]:
        config = self._config
        row = min(max(uncomputed, 1), config.prefill_budget, config.longest_row)
        return request.total_len + request.num_pending + self.estimate.remaining(request), row

    def began(self, request: Request) -> None:
        """A chosen request has its pages for this step."""
        if self._forecast is not None:
            self._forecast.add([request])

    def check_load(self, request: Request, now: int, rate: int) -> None:
        """Refuse a request while the queue is full, or if its deadline cannot be met.

        Its first token can come once what is certain to run before it is done, at `rate` tokens a second.

        Raises:
            DeadlinePassed: it came too late.
            Overloaded: with the reason, and when to try again.
        """
        config, queue = self._config, self.queue
        full = reason = ""
        if len(queue) >= config.max_waiting:
            full, reason = f"{config.max_waiting} requests", "requests"
        elif len(queue) and queue.num_tokens + request.total_len > config.max_waiting_tokens:
            full, reason = f"{queue.num_tokens} tokens, of at most {config.max_waiting_tokens},", "tokens"
        if full:
            seconds = -(-queue.num_tokens // (8 * rate)) if rate else 1  # an eighth of the queue is gone by then
            raise Overloaded(f"the queue is full ({full} are waiting); try again later", _bounded(seconds), reason)
        if request.deadline is None:
            return
        late = now - request.deadline
        if late >= 0:
            raise DeadlinePassed
        late += 1000 * self._tokens_before(request) // rate if rate else 0
        if late >= 0:
            raise Overloaded(
                f"the deadline cannot be met: the first token is expected {late} ms after it; "
                "try again later, or allow more time",
                _bounded(-(-late // 1000)),
                "deadline",
            )

    def _is_held(self, request: Request) -> bool:
        """Whether a request does better to wait for a running one that computes a prefix of its prompt.

        It waits until that part is in the tree or the other is gone, and never for one that is behind it.
        """
        size, ids = self._config.page_size, request.token_ids
        leader = self._computing.get(request.leader)
        if leader is not None and leader.lease.shared * size < request.held_until:
            return True
        request.leader = -1
        alike = [r for r in self._computing.values() if r.salt == request.salt and r.token_ids[:size] == ids[:size]]
        if not alike or not self._config.prefix_cache or not request.prefix_ids:
            return False
        self._look_up(request)
        request.held_until = request.hit_len + policy.shared_gain(size, self._config.prefill_budget)
        prefix = ids[: request.held_until]
        for leader in alike if len(prefix) < len(ids) else ():
            if leader.rank <= request.rank and leader.token_ids[: len(prefix)] == prefix:
                request.leader = leader.uid
                return True
        return False

    def _tokens_before(self, request: Request) -> int:
        """Tokens to compute before a request's first one: the prompts ahead and its own, less what is cached of them.

        Of outputs, only those count that must end before there is a slot.
        """
        ahead, counters = self.queue.ahead(request), self._cache.counters
        prompts = sum([its.total_len for its in ahead])
        cached = prompts * counters.hit_tokens // max(counters.lookup_tokens, 1)
        num_ends = max(0, len(ahead) + len(self._running) + 1 - self._config.max_running)
        self._look_up(request)
        own = request.total_len - request.hit_len
        return prompts - cached + sum([self.estimate.remaining(its) for its in ahead[:num_ends]]) + own

    def _look_up(self, request: Request) -> None:
        request.hit_len, _ = self._cache.hit(request.prefix_ids, request.salt)


def _bounded(seconds: int) -> int:
    return min(max(seconds, 1), MAX_RETRY_AFTER)
