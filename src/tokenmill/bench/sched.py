"""`tokenmill bench sched`: time and memory that the scheduler and the prefix tree take on the host, without a model."""

from __future__ import annotations

import gc
import platform
import statistics
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from itertools import count

from tokenmill import __version__
from tokenmill.bench.options import Compared, SchedOptions
from tokenmill.bench.report import Report
from tokenmill.bench.simulate import combinations
from tokenmill.sched.cache import PrefixCache
from tokenmill.sched.plan import StepPlan, StepResult
from tokenmill.sched.request import Request
from tokenmill.sched.scheduler import Scheduler
from tokenmill.types import SamplingParams

ROWS = (256, 1024)
PROMPT, STEPS, WARM_UP_STEPS = 100, 400, 100
FINISHED = 20_000  # requests that have come and gone before the last figures
PAGE_SIZE = 16
PREFIX, CHUNK = 8192, 512
TREE_TOKENS, TREE_REQUEST = 1_000_000, 1000
SHARED, OWN = 496, 512  # tokens of a request that is admitted: known ones, and others
TRIALS = 300


def run(options: SchedOptions) -> None:
    """Measure and print."""
    setup = {"machine": platform.processor() or platform.machine(), "tokenmill": __version__}
    report = Report(setup | {"python": platform.python_version()}, as_json=options.json)
    for rows in ROWS:
        scheduler = _running(rows)
        report.line(what="plan + commit of a decode step", size=f"{rows} rows", us=step_micros(scheduler, rows))
    scheduler = _running(ROWS[0], finished=FINISHED)
    what = f"plan + commit after {FINISHED} finished requests"
    report.line(what=what, size=f"{ROWS[0]} rows", us=step_micros(scheduler, ROWS[0]))
    report.line(what="prefix match", size=f"{PREFIX} tokens", us=match_micros())
    tree = f"{TREE_TOKENS} tokens in the tree"
    report.line(what="admission", size=tree, us=admission_micros(make_tree()))
    report.line(what="memory", size=tree, bytes_a_token=tree_bytes_a_token())
    report.table()


def step_micros(scheduler: Scheduler, rows: int) -> float:
    """Median time to plan a step of `rows` decode rows and commit the one before, as the overlap loop does."""
    times: list[float] = []
    flight = scheduler.plan()
    for _ in range(WARM_UP_STEPS + STEPS):
        begin = time.perf_counter_ns()
        launched = scheduler.plan()
        planned = time.perf_counter_ns()
        result = _result(flight)
        resumed = time.perf_counter_ns()
        if flight is not None:
            scheduler.commit(flight, result)
        times.append((time.perf_counter_ns() - resumed + planned - begin) / 1000)
        if launched is None or not launched.is_decode or len(launched.rows) != rows:
            raise AssertionError("the step that was measured was not one of decode rows alone")
        flight = launched
    return statistics.median(times[WARM_UP_STEPS:])


def match_micros() -> float:
    """Median time to find a prefix that became known chunk by chunk."""
    cache = PrefixCache(2 * PREFIX // PAGE_SIZE, PAGE_SIZE)
    for length in range(CHUNK, PREFIX + 1, CHUNK):
        _serve(cache, prompt(0, length))
    token_ids = (prompt(0, PREFIX) + prompt(1, 1)).tobytes()
    if cache.hit(token_ids, "")[0] != PREFIX:
        raise AssertionError("the prefix was not found")
    return _median_micros(lambda: cache.hit(token_ids, ""))


def admission_micros(cache: PrefixCache) -> float:
    """Median time to look up a request, lock what it shares with the tree, and give it pages."""
    uids = count(1)
    prompts = [
        (prompt(index, TREE_REQUEST)[:SHARED] + prompt(TREE_TOKENS + index, OWN)).tobytes() for index in range(TRIALS)
    ]

    def admit() -> Callable[[], object]:
        uid = next(uids)
        token_ids = prompts[uid % TRIALS]
        cache.hit(token_ids, "")
        lease = cache.open(uid, token_ids, "")
        cache.extend(lease, SHARED + OWN)
        return lambda: cache.close(uid, token_ids, SHARED)

    return _median_micros(admit)


def tree_bytes_a_token() -> float:
    """Memory that the tree that `make_tree` makes takes for a token in it."""
    gc.collect()
    tracemalloc.start()
    cache = PrefixCache(2 * TREE_TOKENS // PAGE_SIZE, PAGE_SIZE)
    before = tracemalloc.get_traced_memory()[0]
    _fill(cache)
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return (after - before) / (cache.num_cached * PAGE_SIZE)


def make_tree() -> PrefixCache:
    """A cache whose tree has TREE_TOKENS tokens, from requests of TREE_REQUEST each, and room for as many more."""
    cache = PrefixCache(2 * TREE_TOKENS // PAGE_SIZE, PAGE_SIZE)
    _fill(cache)
    return cache


def prompt(seed: int, length: int) -> array[int]:
    """Token ids, different from position to position and in their first page from seed to seed."""
    return array("i", range(seed, seed + length))


def _fill(cache: PrefixCache) -> None:
    for index in range(TREE_TOKENS // TREE_REQUEST):
        _serve(cache, prompt(index, TREE_REQUEST))


def _serve(cache: PrefixCache, token_ids: array[int]) -> None:
    cache.extend(cache.open(-1, token_ids.tobytes(), ""), len(token_ids))
    cache.close(-1, token_ids.tobytes(), len(token_ids))


def _running(rows: int, finished: int = 0) -> Scheduler:
    """A scheduler in which `rows` requests decode, after `finished` others."""
    compared = Compared(num_pages=(200_000,), page_size=(PAGE_SIZE,), max_running=(rows,), prefill_budget=(8192,))
    scheduler = Scheduler(next(combinations(compared, "cpu"))[1])
    uids = count()
    for _ in range(finished // rows):
        _add(scheduler, uids, rows, 1)
        while scheduler.has_work:
            _step(scheduler)
    _add(scheduler, uids, rows, 10 * (STEPS + WARM_UP_STEPS))
    while (plan := _step(scheduler)) is None or not plan.is_decode or len(plan.rows) != rows:
        pass
    return scheduler


def _add(scheduler: Scheduler, uids: Iterator[int], requests: int, max_tokens: int) -> None:
    for _ in range(requests):
        uid = next(uids)
        ids = prompt(uid, PROMPT)
        scheduler.add(Request(uid, ids, PROMPT, PROMPT + max_tokens, SamplingParams(), frozenset()))


def _step(scheduler: Scheduler) -> StepPlan | None:
    plan = scheduler.plan()
    if plan is not None:
        scheduler.commit(plan, _result(plan))
    return plan


def _result(plan: StepPlan | None) -> StepResult:
    return StepResult(0, (7,) * sum(row.is_sampled for row in plan.rows)) if plan else StepResult(0, ())


def _median_micros(call: Callable[[], object]) -> float:
    """Median time of `call`; what it returns is called, if it can be, outside of that."""
    times = []
    for _ in range(TRIALS):
        begin = time.perf_counter_ns()
        after = call()
        times.append((time.perf_counter_ns() - begin) / 1000)
        if callable(after):
            after()
    return statistics.median(times)
