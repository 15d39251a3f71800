"""An engine without a model, for tests of the scheduler, the loops and the server.

Its "K/V" is the token id itself and a hash of all tokens so far, written and read through the page table of each kind;
the hash is the next token. A row reads all that it can see: a wrong page, a page reused too early or a lost token
changes the output or raises. Of sampling parameters and grammars it knows nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tokenmill.config import ResolvedConfig
from tokenmill.sched.plan import Row, StepPlan, StepResult

HASH_FACTOR = 1_000_003
START = 17


def next_token(token_ids: list[int], vocab_size: int) -> int:
    """The token that FakeEngine draws after `token_ids`."""
    state = START
    for token in token_ids:
        state = _after(state, token)
    return state % vocab_size


def _after(state: int, token: int) -> int:
    return (state * HASH_FACTOR + token + 1) % 2**61


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
    _pages: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # by kind and slot
    _last: dict[int, int] = field(default_factory=dict)
    _cache: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)  # position, token, hash
    _windows: list[int] = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        self._windows = [0] * config.has_full_kind + [config.window] * bool(config.window)

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
            for kind in range(len(self._windows)):
                self._pages[kind, opening.slot] = [-1] * self.config.pages_per_request
        for update in plan.page_updates:
            pages = self._pages[update.kind, update.slot]
            pages[update.first : update.first + len(update.pages)] = update.pages
        inputs = [self._store(row) for row in plan.rows]
        states = [self._read(row) for row in plan.rows]
        drawn = []
        for row, state in zip(plan.rows, states, strict=True):
            if row.is_sampled:
                self._last[row.slot] = state % self.vocab_size
                drawn.append(self._last[row.slot])
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

    def _index(self, kind: int, slot: int, position: int) -> tuple[int, int]:
        page = self._pages[kind, slot][position // self.config.page_size]
        if page < 0:
            raise AssertionError(f"slot {slot} has no page for position {position}")
        return kind, page * self.config.page_size + position % self.config.page_size

    def _store(self, row: Row) -> int:
        token_ids = (self._last[row.slot],) if row.token_ids is None else row.token_ids
        kinds = range(len(self._windows))
        state = self._cache[self._index(0, row.slot, row.start - 1)][2] if row.start else START
        for position, token in enumerate(token_ids, row.start):
            state = _after(state, token)
            for kind in kinds:
                self._cache[self._index(kind, row.slot, position)] = position, token, state
        return len(token_ids)

    def _read(self, row: Row) -> int:
        """The hash of all tokens, when what each kind's layers see of them is right."""
        state = START
        for kind, window in enumerate(self._windows):
            first = max(0, row.start + 1 - window) if window else 0
            before = START if first == 0 else None
            for position in range(first, row.start + row.length):
                written_for, token, state = self._cache[self._index(kind, row.slot, position)]
                if written_for != position or (before is not None and state != _after(before, token)):
                    raise AssertionError(f"slot {row.slot} reads position {written_for} at {position}")
                before = state
        return state
