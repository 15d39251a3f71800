"""The scheduler at its borders: pools of one request, retraction, aborts in flight, what is refused."""

from __future__ import annotations

import pytest

from tests.sched.support import Run, continuation
from tokenmill.errors import InvalidRequest, Overloaded, RequestTooLong
from tokenmill.sched.plan import PageUpdate, StepPlan
from tokenmill.sched.request import Status
from tokenmill.types import FinishReason
from tokenmill.wire.messages import unpack_ids

depths = pytest.mark.parametrize("depth", [1, 2])
policies = pytest.mark.parametrize("policy", ["mixed", "prefill-first"])


@depths
@policies
@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 24), (3, 8), (24, 1), (5, 5)])
@pytest.mark.parametrize("cached", [True, False])
def test_requests_that_each_need_the_whole_pool_run_one_by_one(depth, policy, page_size, num_pages, cached):
    run = Run(
        depth,
        page_size=page_size,
        num_pages=num_pages,
        max_running=2,
        prefill_budget=1,
        batch_policy=policy,
        prefix_cache=cached,
    )
    pool = page_size * num_pages
    for uid, length in enumerate((pool - 1, 1, pool // 2)):
        run.add(uid, [uid] * length, pool - length)
    run.finish()
    for uid, length in enumerate((pool - 1, 1, pool // 2)):
        assert run.tokens[uid] == continuation([uid] * length, pool - length)
    assert [uid for uid, _ in run.endings] == [0, 1, 2]


def test_what_can_never_run_is_refused_at_the_door():
    run = Run(num_pages=4, max_waiting=2)
    with pytest.raises(RequestTooLong, match="16 tokens"):
        run.add(0, [1] * 10, 7)
    with pytest.raises(InvalidRequest, match="empty"):
        run.add(0, [], 7)
    run.add(0, [1] * 10, 6)
    with pytest.raises(InvalidRequest, match="already"):
        run.add(0, [1], 1)
    run.add(1, [1], 1)
    with pytest.raises(Overloaded, match="2 requests"):
        run.add(2, [1], 1)
    run.finish()
    assert sorted(run.tokens) == [0, 1]


def test_nobody_is_retracted_for_pages_that_come_back_with_the_step_in_flight():
    """Request 0 ends by its end id; only the row that was planned ahead still holds the page that 1 needs."""
    run = Run(depth=2, page_size=1, num_pages=5, prefix_cache=False)
    run.add(0, [0, 0], 3, end_ids=continuation([0, 0], 1))
    run.add(1, [1], 3)
    run.finish()
    assert run.tokens == {0: continuation([0, 0], 1), 1: continuation([1], 3)}
    assert run.scheduler.counters.retractions == 0


def test_nobody_is_retracted_for_duplicates_that_the_step_in_flight_still_names():
    """Both compute the first page; when the tree's takes the place of request 1's, that one is free a step later."""
    run = Run(depth=2, num_pages=5, policy="priority")
    run.add(0, [1] * 7, 3)
    run.turn()
    run.add(1, [1] * 7, 3, priority=1)
    run.finish()
    assert run.tokens == {uid: continuation([1] * 7, 3) for uid in range(2)}
    assert run.scheduler.counters.retractions == 0


@depths
def test_the_newest_request_is_retracted_and_keeps_its_tokens(depth):
    run = Run(depth, page_size=1, num_pages=20, max_running=3)
    old, new = run.add(0, [0] * 5, 12), run.add(1, [1] * 5, 12)
    while not run.scheduler.counters.retractions:
        run.turn()
    assert old.status is Status.RUNNING
    assert new.status in (Status.RETRACTING, Status.WAITING)
    kept = new.token_ids.tolist()
    assert len(kept) > 5
    run.finish()
    assert new.token_ids.tolist()[: len(kept)] == kept
    assert run.tokens == {uid: continuation([uid] * 5, 12) for uid in (0, 1)}
    assert [uid for uid, _ in run.endings] == [0, 1]
    assert run.admitted == [(0, 0), (1, 0)]


def test_abort_of_a_request_that_is_being_retracted():
    run = Run(depth=2, page_size=1, num_pages=20, max_running=3)
    run.add(0, [0] * 5, 12)
    new = run.add(1, [1] * 5, 12)
    while new.status is not Status.RETRACTING:
        if len(run.flights) == 2:
            run.commit()
        run.plan()
    assert run.scheduler.abort(1)
    assert not run.scheduler.abort(1)
    run.finish()
    assert run.tokens[0] == continuation([0] * 5, 12)
    assert [uid for uid, _ in run.endings] == [0]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_pages_of_an_aborted_request_stay_until_its_steps_are_done(in_flight):
    run = Run(depth=2, page_size=1, num_pages=8, prefix_cache=False)
    request = run.add(0, [1, 2, 3], 5)
    for _ in range(in_flight):
        run.plan()
    pages = set(request.lease.pages)
    assert run.scheduler.abort(0)
    for _ in range(in_flight):
        assert pages.isdisjoint(run.scheduler.cache.free_pages())
        run.commit()
    assert pages <= set(run.scheduler.cache.free_pages())
    assert not run.scheduler.has_work
    assert (run.tokens, run.endings) == ({}, [])


def test_abort_after_the_end_does_nothing():
    run = Run(depth=2)
    run.add(0, [1, 2], 9, end_ids=continuation([1, 2], 1))
    run.plan()
    run.plan()
    run.commit()
    assert run.endings == [(0, FinishReason.STOP)]
    assert run.scheduler.has_work
    assert not run.scheduler.abort(0)
    run.finish()
    assert not run.scheduler.abort(0)
    assert len(run.endings) == 1


def test_a_slot_is_opened_anew_for_each_request_with_all_its_pages():
    run = Run(max_running=1)
    for uid in range(3):
        run.add(uid, [7] * 9, 3, seed=uid)
    run.finish()
    openings = [opening for plan in run.plans for opening in plan.openings]
    assert [(opening.slot, opening.uid, opening.params.seed) for opening in openings] == [
        (0, 0, 0),
        (0, 1, 1),
        (0, 2, 2),
    ]
    assert run.scheduler.counters.cached_tokens == 2 * 8


@policies
def test_decode_rows_are_not_starved_by_prompts(policy):
    run = Run(num_pages=1000, max_running=50, prefill_budget=4, batch_policy=policy)
    run.add(0, [1], 20)
    for uid in range(1, 40):
        run.add(uid, [uid] * 30, 1)
    for _ in range(45):
        run.turn()
    assert len(run.tokens[0]) == 20


def test_decode_rows_take_nothing_of_the_prompts_budget():
    run = Run(num_pages=100, prefill_budget=2)
    for uid in range(5):
        run.add(uid, [uid], 9)
    run.add(5, [5] * 20, 1)
    for _ in range(4):
        run.turn()
    assert [row.length for row in run.plan().rows] == [1, 1, 1, 1, 1, 2]


def test_end_ids_are_blocked_only_for_those_that_ask():
    run = Run()
    run.add(0, [1], 3, end_ids=[9, 4], stop_token_ids=[7, 4], min_tokens=2)
    run.add(1, [2], 3, end_ids=[9])
    plan = run.plan()
    assert [opening.blocked_ids for opening in plan.openings] == [(4, 7, 9), ()]


def test_a_prompt_whose_logprobs_are_asked_for_is_computed_whole_in_rows_of_bounded_length():
    run = Run(num_pages=1000, prefill_budget=4000)
    prompt = [place % 50 for place in range(1200)]
    for uid, options in enumerate(({}, {"prompt_logprobs": 0}, {})):
        run.add(uid, prompt, 3, **options)
        run.finish()
    rows: dict[int, list[tuple[int, int]]] = {0: [], 1: [], 2: []}
    for row in (row for plan in run.plans for row in plan.rows if row.length > 1):
        rows[row.uid].append((row.start, row.length))
    assert rows == {0: [(0, 1200)], 1: [(0, 512), (512, 512), (1024, 176)], 2: [(1196, 4)]}
    assert run.admitted == [(0, 0), (1, 0), (2, 1196)]
    assert run.tokens[0] == run.tokens[1] == run.tokens[2]
    (opening,) = (its for plan in run.plans for its in plan.openings if its.uid == 1)
    assert unpack_ids(opening.history) == prompt


def test_the_digest_sees_everything_that_decides_a_step():
    def digest(prompt=(1, 2, 3), **options):
        run = Run()
        run.add(0, prompt, 3, **options)
        return run.plan().digest()

    digests = [
        digest(),
        digest(prompt=(1, 2, 4)),
        digest(prompt=(1, 2)),
        digest(seed=5),
        digest(min_tokens=1),
        digest(presence_penalty=1.0),
        digest(min_tokens=1, end_ids=[4]),
        digest(min_tokens=1, end_ids=[5]),
        digest(logit_bias={5: 1.0}),
    ]
    assert len(set(digests)) == len(digests)
    assert digest() == digest()
    update = PageUpdate(1, 2, (3, 4))
    updates = [update, PageUpdate(0, 2, (3, 4)), PageUpdate(1, 3, (3, 4)), PageUpdate(1, 2, (3, 5))]
    assert len({StepPlan(0, (), (), (its,)).digest() for its in updates}) == 4


def test_a_queue_behind_a_large_request_waits_but_is_not_lost():
    run = Run(page_size=1, num_pages=40, max_running=4)
    run.add(0, [0] * 10, 10)
    run.add(1, [1] * 35, 5)
    run.add(2, [2] * 2, 2)
    run.turn()
    assert (run.scheduler.num_running, run.scheduler.num_waiting) == (1, 2)
    run.finish()
    assert sorted(run.tokens) == [0, 1, 2]


@depths
@policies
def test_nobody_is_retracted_when_all_output_is_reserved(depth, policy):
    run = Run(depth, num_pages=20, max_running=8, prefill_budget=9, batch_policy=policy, reserve_ratio=1.0)
    for uid in range(12):
        run.add(uid, [uid] * (3 + uid), 10 + 2 * uid)
    most = 0
    while run.scheduler.has_work:
        run.turn()
        most = max(most, run.scheduler.num_running)
    assert run.scheduler.counters.retractions == 0
    assert most > 2
    assert run.tokens == {uid: continuation([uid] * (3 + uid), 10 + 2 * uid) for uid in range(12)}


@depths
def test_a_prompt_is_shared_as_soon_as_it_is_computed_and_not_computed_again(depth):
    run = Run(depth, page_size=1)
    first = run.add(0, [1] * 12, 9)
    while not run.tokens:
        run.turn()
    before = run.engine.num_computed
    second, third = run.add(1, [1] * 12 + [2] * 3, 1), run.add(2, [1] * 12, 1)
    while 2 not in run.tokens:
        run.turn()
    assert first.status is not Status.FINISHED
    assert (second.cached_len, third.cached_len) == (12, 11)
    assert sum(row.length for plan in run.plans for row in plan.rows if row.uid) == 3 + 1
    assert run.engine.num_computed - before < 12
    run.finish()


@depths
def test_each_page_is_sent_to_the_device_once(depth):
    run = Run(depth, prefix_cache=False)
    for uid in range(3):
        run.add(uid, [uid] * 9, 8)
    run.finish()
    sent = [page for plan in run.plans for update in plan.page_updates for page in update.pages]
    assert len(sent) == 3 * run.scheduler.cache.num_pages_for(9 + 8 - 1)


@pytest.mark.parametrize(("waiting", "tokens"), [(1, 2000), (2, 4000), (8, 8192)])
def test_prompts_beside_decode_rows_come_in_small_chunks_unless_many_wait(waiting, tokens):
    run = Run(num_pages=40_000, max_running=64, prefill_budget=8192, max_model_len=9000)
    run.add(0, range(10), 100)
    run.plan()
    run.commit()
    for uid in range(1, 1 + waiting):
        run.add(uid, [uid] * 8000, 5)
    decode, *chunks = run.plan().rows
    assert decode.uid == 0
    assert sum(row.length for row in chunks) == tokens


def test_prompts_without_decode_rows_take_the_whole_budget():
    run = Run(num_pages=40_000, max_running=64, prefill_budget=8192, max_model_len=9000)
    run.add(0, range(8000), 5)
    assert [row.length for row in run.plan().rows] == [8000]


def test_requests_admitted_in_one_step_count_what_each_other_is_expected_to_take():
    run = Run(num_pages=16, page_size=4, max_running=8, prefill_budget=64, reserve_ratio=1.0)
    for uid in range(3):
        run.add(uid, [uid] * 4, 24)  # seven pages in the end, one now
    assert [row.uid for row in run.plan().rows] == [0, 1]
