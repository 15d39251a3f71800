"""Who is let in: bounds of the queue, deadlines, waits for another's prefix, and what room is foreseen."""

from __future__ import annotations

import pytest

from tests.sched.support import Run, continuation
from tokenmill.errors import DeadlinePassed, Overloaded

depths = pytest.mark.parametrize("depth", [1, 2])


def test_the_queue_is_bounded_by_requests_and_by_tokens_but_takes_one_alone():
    run = Run(max_waiting=3, max_waiting_tokens=20)
    run.add(0, [1] * 30, 1)
    with pytest.raises(Overloaded, match="30 tokens, of at most 20, are waiting") as refusal:
        run.add(1, [1], 1)
    assert (refusal.value.reason, refusal.value.retry_after) == ("tokens", 1)
    run.turn()
    for uid in range(1, 4):
        run.add(uid, [1] * 5, 1)
    with pytest.raises(Overloaded, match="3 requests are waiting") as refusal:
        run.add(4, [1], 1)
    assert refusal.value.reason == "requests"
    assert run.scheduler.num_waiting_tokens == 15
    run.finish()
    assert sorted(run.tokens) == [0, 1, 2, 3]


@pytest.mark.parametrize(("rate", "seconds"), [(0, 1), (1, 2), (100, 1)])
def test_a_refusal_tells_when_part_of_the_queue_will_be_gone(rate, seconds):
    run = Run(max_waiting=2)
    for uid in range(2):
        run.add(uid, [1] * 8, 1)
    with pytest.raises(Overloaded) as refusal:
        run.add(2, [1], 1, rate=rate)
    assert refusal.value.retry_after == seconds


@pytest.mark.parametrize(("max_running", "expected"), [(1, 100 + 20 + 30), (2, 100 + 30)])
def test_a_deadline_that_cannot_be_met_is_refused_early(max_running, expected):
    """Ahead are 100 prompt tokens and, if it must end first, half of 40 output tokens; then come 30 of its own."""
    run = Run(num_pages=1000, reserve_ratio=0.5, max_running=max_running)
    run.add(0, [1] * 100, 40, rate=1000)
    with pytest.raises(Overloaded, match="cannot be met") as refusal:
        run.add(1, [2] * 30, 10, deadline=expected, rate=1000)
    assert (refusal.value.reason, refusal.value.retry_after) == ("deadline", 1)
    run.add(2, [2] * 30, 10, deadline=expected + 1, rate=1000)
    run.add(3, [2] * 30, 10, deadline=1)  # nothing is known of the rate


def test_a_deadline_that_passed_before_is_told_apart():
    run = Run()
    run.now = 10
    with pytest.raises(DeadlinePassed):
        run.add(0, [1], 1, deadline=10, rate=1000)


def test_what_is_cached_counts_for_a_deadline():
    run = Run(num_pages=1000)
    run.add(0, [1] * 100, 1)
    run.finish()
    with pytest.raises(Overloaded):
        run.add(1, [2] * 101, 5, deadline=100, rate=1000)
    run.add(2, [1] * 101, 5, deadline=100, rate=1000)
    run.finish()
    # Of what waits ahead, half is expected to be cached, as it was of 201 tokens so far.
    run.add(3, [3] * 100, 1)
    with pytest.raises(Overloaded):
        run.add(4, [4] * 10, 5, deadline=run.now + 60, rate=1000)
    run.add(5, [4] * 10, 5, deadline=run.now + 65, rate=1000)


@depths
def test_two_with_the_same_prompt_compute_it_once(depth):
    run = Run(depth, num_pages=200, prefill_budget=8)
    for uid in range(2):
        run.add(uid, [1] * 40 + [uid], 4)
    run.add(2, [2] * 8, 4)
    run.finish()
    assert run.tokens == {
        uid: continuation(prompt, 4) for uid, prompt in ((0, [1] * 40 + [0]), (1, [1] * 41), (2, [2] * 8))
    }
    assert sum(row.length for plan in run.plans for row in plan.rows if row.uid == 1) <= 1 + 4
    first = {uid: next(plan.step for plan in run.plans for row in plan.rows if row.uid == uid) for uid in range(3)}
    assert first[2] < first[1], "others pass one that waits"
    assert run.admitted[-1] == (1, 40)


@pytest.mark.parametrize(
    ("second", "options", "config"),
    [
        ([1] * 40, {"salt": "other"}, {}),
        ([1] * 3 + [2] * 37, {}, {}),
        ([1] * 4, {}, {}),
        ([1] * 40, {}, {"prefix_cache": False}),
        ([1] * 40, {"priority": 1}, {"policy": "priority"}),
    ],
)
def test_nobody_waits_for_a_prefix_without_gain(second, options, config):
    run = Run(num_pages=200, prefill_budget=8, **config)
    run.add(0, [1] * 40, 4)
    run.plan()
    run.add(1, second, 4, **options)
    run.commit()
    assert 1 in [row.uid for row in run.plan().rows]


@depths
@pytest.mark.parametrize("turns", [1, 3])
def test_one_that_waits_goes_on_when_the_other_is_gone(depth, turns):
    run = Run(depth, num_pages=200, prefill_budget=8)
    for uid in range(2):
        run.add(uid, [1] * 80, 4)
    for _ in range(turns):
        run.turn()
    assert run.scheduler.num_waiting == 1
    run.scheduler.abort(0)
    run.finish()
    assert run.tokens == {1: continuation([1] * 80, 4)}


def test_a_request_that_found_no_room_is_not_tried_again_before_something_changes():
    run = Run(num_pages=20, max_running=4, reserve_ratio=1.0)
    run.add(0, [0] * 20, 40)
    run.add(1, [1] * 50, 10)
    run.turn()
    hits, hit = [], run.scheduler.cache.hit
    run.scheduler.cache.hit = lambda *arguments: hits.append(arguments) or hit(*arguments)
    while 0 in run.scheduler._requests:
        run.turn()
    assert len(hits) <= 2
    run.finish()
    assert run.tokens[1] == continuation([1] * 50, 10)


def test_a_newcomer_that_is_the_first_now_is_tried_though_another_found_no_room():
    run = Run(num_pages=20, max_running=4, policy="priority", reserve_ratio=1.0)
    run.add(0, [0] * 20, 40)
    run.add(1, [1] * 50, 10)
    for _ in range(4):
        run.turn()
    run.add(2, [2] * 4, 4, priority=1)
    run.turn()
    assert (run.scheduler.num_waiting, run.scheduler.num_running) == (1, 2)


def test_the_next_is_tried_when_the_one_that_found_no_room_is_gone():
    run = Run(num_pages=20, max_running=4, reserve_ratio=1.0)
    run.add(0, [0] * 20, 40)
    run.add(1, [1] * 50, 10)
    run.add(2, [2] * 4, 4)
    for _ in range(4):
        run.turn()
    assert run.scheduler.num_running == 1
    run.scheduler.abort(1)
    run.turn()
    assert (run.scheduler.num_waiting, run.scheduler.num_running) == (0, 2)


@depths
def test_one_that_waited_for_a_prefix_may_begin_though_another_finds_no_room(depth):
    run = Run(depth, num_pages=26, max_running=4, reserve_ratio=1.0)
    run.add(0, [1] * 40, 30)
    run.add(1, [1] * 40, 4)
    run.add(2, [2] * 90, 4)
    while 1 not in run.tokens:
        run.turn()
    assert 0 in run.scheduler._requests
    run.finish()
    assert [run.tokens[uid] for uid in range(2)] == [continuation([1] * 40, count) for count in (30, 4)]


def test_the_wait_ends_with_the_common_part_not_with_all_of_the_others_prompt():
    run = Run(num_pages=200, prefill_budget=8)
    run.add(0, [1] * 16 + [2] * 200, 4)
    run.add(1, [1] * 16 + [3] * 4, 4)
    for _ in range(6):
        run.turn()
    assert 1 in run.tokens
    assert run.admitted == [(0, 0), (1, 16)]


def test_retractions_teach_to_admit_less():
    run = Run(page_size=1, num_pages=60, max_running=8, prefill_budget=64, reserve_ratio=0.0)
    for uid in range(60):
        run.add(uid, [uid % 40] * 2, 26)
    run.finish()
    assert 0 < run.scheduler.counters.retractions < 60
