"""An engine without a model, for tests of the scheduler, the loops and the server.

Its "K/V" is the token id itself, written and read through the page table, and the next token is a hash of all tokens
that a row can see. A wrong page, a page reused too early or a lost token changes the output or raises. Of sampling
parameters and grammars it knows nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tokenmill.config import ResolvedConfig
from tokenmill.sched.plan import Row, StepPlan, StepResult

HASH_FACTOR = 1_000_003


def next_token(token_ids: list[int], vocab_size: int) -> int:
    """The token that FakeEngine draws after `token_ids`."""
    state = 17
    for token in token_ids:
        state = (state * HASH_FACTOR + token + 1) % 2**61
    return state % vocab_size


@dataclass
class FakeHandle:
    """A step that is computed when it is waited for, or when a later one is."""

    engine: FakeEngine
    plan: StepPlan
    result: StepResult | None = None

    def wait(self) -> StepResult:
        """Compute all steps up to this one."""
        while self.result is None:
            self.engine.compute_next()
        return self.result


@dataclass
class FakeEngine:
    """Deterministic tokens below `vocab_size`; steps are computed as late as possible, in order."""

    config: ResolvedConfig
    vocab_size: int = 256
    num_steps: int = 0
    num_computed: int = 0
    num_preparations: int = 0  # left to be done
    _queue: deque[FakeHandle] = field(default_factory=deque)
    _pages: dict[int, list[int]] = field(default_factory=dict)
    _last: dict[int, int] = field(default_factory=dict)
    _cache: dict[int, tuple[int, int]] = field(default_factory=dict)

    def launch(self, plan: StepPlan) -> FakeHandle:
        """Queue a step."""
        handle = FakeHandle(self, plan)
        self._queue.append(handle)
        return handle

    def compute_next(self) -> None:
        """Compute the oldest queued step."""
        handle = self._queue.popleft()
        plan = handle.plan
        for opening in plan.openings:
            self._pages[opening.slot] = [-1] * self.config.pages_per_request
        for update in plan.page_updates:
            self._pages[update.slot][update.first : update.first + len(update.pages)] = update.pages
        inputs = [self._store(row) for row in plan.rows]
        drawn = [self._draw(row) for row in plan.rows if row.is_sampled]
        for row, token in zip([row for row in plan.rows if row.is_sampled], drawn, strict=True):
            self._last[row.slot] = token
        self.num_steps += 1
        self.num_computed += sum(inputs)
        handle.result = StepResult(plan.step, tuple(drawn))

    def prepare(self) -> bool:
        """Count one preparation down."""
        if self.num_preparations == 0:
            return False
        self.num_preparations -= 1
        return True

    def close(self) -> None:
        """Compute what is queued."""
        while self._queue:
            self.compute_next()

    def _index(self, slot: int, position: int) -> int:
        page = self._pages[slot][position // self.config.page_size]
        if page < 0:
            raise AssertionError(f"slot {slot} has no page for position {position}")
        return page * self.config.page_size + position % self.config.page_size

    def _store(self, row: Row) -> int:
        token_ids = (self._last[row.slot],) if row.token_ids is None else row.token_ids
        for position, token in enumerate(token_ids, row.start):
            self._cache[self._index(row.slot, position)] = (position, token)
        return len(token_ids)

    def _draw(self, row: Row) -> int:
        seen = []
        for position in range(row.start + row.length):
            written_for, token = self._cache[self._index(row.slot, position)]
            if written_for != position:
                raise AssertionError(f"slot {row.slot} reads position {written_for} at {position}")
            seen.append(token)
        return next_token(seen, self.vocab_size)
