"""The scheduler under pressure: whose turn it is, who gives pages back, how a step is shared, what a deadline ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sched.support import Run, continuation
from tokenmill.sched.request import Status
from tokenmill.sched.window_tree import SPARE_ENTRIES
from tokenmill.types import FinishReason
from tokenmill.wire.messages import pack_ids, unpack_ids

HOSTILE = Path(__file__).with_name("hostile_policy.py")

depths = pytest.mark.parametrize("depth", [1, 2])
batch_policies = pytest.mark.parametrize("batch_policy", ["mixed", "prefill-first"])


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", [0, 1, 2, 3, 4, 5]),
        ("priority", [0, 5, 3, 1, 2, 4]),
        ("deadline", [0, 4, 2, 1, 3, 5]),
        ("shortest", [0, 4, 1, 2, 3, 5]),
        ("longest-prefix", [0, 3, 1, 2, 4, 5]),
        ("fair", [0, 2, 1, 4, 3, 5]),
    ],
)
def test_each_policy_has_its_order(policy, order):
    run = Run(policy=policy, max_running=1)
    run.add(0, [7] * 9, 5, tenant="a")
    run.turn()
    run.add(1, [1] * 8, 5, tenant="a", priority=1)
    run.add(2, [2] * 8, 5, tenant="b", deadline=500)
    run.add(3, [7] * 8 + [3], 5, tenant="a", priority=2)
    run.add(4, [4] * 2, 5, tenant="b", deadline=400)
    run.add(5, [5] * 20, 5, tenant="a", priority=3)
    run.finish()
    assert [uid for uid, _ in run.endings] == order
    assert run.tokens[3] == continuation([7] * 8 + [3], 5)


@depths
@pytest.mark.parametrize(
    ("policy", "victim", "values"),
    [
        ("fcfs", 2, {}),
        ("longest-prefix", 2, {}),
        ("priority", 1, {0: {"priority": 1}, 2: {"priority": 1}}),
        ("deadline", 0, {1: {"deadline": 10**6}, 2: {"deadline": 10**7}}),
    ],
)
def test_the_victim_is_the_last_in_the_order_in_which_pages_are_kept(depth, policy, victim, values):
    run = Run(depth, policy=policy, page_size=1, num_pages=30, max_running=3)
    requests = [run.add(uid, [uid] * 5, 12, **values.get(uid, {})) for uid in range(3)]
    while not run.scheduler.counters.retractions:
        run.turn()
    retracted = [request.uid for request in requests if request.status in (Status.RETRACTING, Status.WAITING)]
    assert retracted == [victim]
    run.finish()
    assert run.tokens == {uid: continuation([uid] * 5, 12) for uid in range(3)}


def test_only_a_request_that_needs_them_is_opened_with_its_tokens_so_far():
    run = Run(2, page_size=1, num_pages=30, max_running=3)
    for uid, options in enumerate(({}, {"presence_penalty": 1.0}, {"repetition_penalty": 2.0})):
        run.add(uid, [uid] * 5, 12, **options)
    run.finish()
    assert run.scheduler.counters.retractions
    openings = [opening for plan in run.plans for opening in plan.openings]
    histories = {uid: [unpack_ids(its.history) for its in openings if its.uid == uid] for uid in range(3)}
    assert not any(histories[0])
    assert histories[1][0] == [1] * 5
    assert histories[2][0] == [2] * 5
    assert len(histories[2]) > 1
    for history in histories[2][1:]:
        assert len(history) > 5
        assert history == ([2] * 5 + run.tokens[2])[: len(history)]


def test_a_tenant_that_floods_the_queue_does_not_delay_another():
    run = Run(policy="fair", max_running=2, num_pages=200)
    for uid in range(30):
        run.add(uid, [uid] * 6, 6, tenant="flood")
    run.turn()
    for uid in range(30, 33):
        run.add(uid, [uid] * 6, 6, tenant="few")
    run.finish()
    ended = [uid for uid, _ in run.endings]
    assert max(ended.index(uid) for uid in (30, 31, 32)) <= 8


@depths
@batch_policies
@pytest.mark.parametrize("policy", ["fcfs", "fair", "longest-prefix", f"{HOSTILE}:fickle", f"{HOSTILE}:BOTH"])
def test_nobody_starves_while_others_keep_coming(depth, batch_policy, policy):
    """A request whose key is always worse than those of the others, which never stop coming."""
    run = Run(depth, policy=policy, batch_policy=batch_policy, num_pages=12, max_running=3, prefill_budget=8)
    run.add(0, [7] * 8, 2, tenant="others")
    run.finish()
    run.add(1, [5] * 30, 6, tenant="rich")
    run.scheduler._admission.ledger.charge(run.scheduler._requests[1], 10**6)
    for uid in range(2, 2000):
        if (1, FinishReason.LENGTH) in run.endings:
            break
        if run.scheduler.num_waiting < 6:
            run.add(uid, [7] * 8 + [uid % 50], 4, tenant=f"poor{uid}")
        run.turn()
    assert run.tokens[1] == continuation([5] * 30, 6)
    assert uid < 1000


@depths
@batch_policies
@pytest.mark.parametrize("num_long", [1, 3])
def test_short_prompts_are_not_starved_by_long_ones(depth, batch_policy, num_long):
    run = Run(depth, num_pages=2000, prefill_budget=16, batch_policy=batch_policy)
    for uid in range(num_long):
        run.add(uid, [uid] * 1000, 1)
    for _ in range(4):
        run.turn()
    run.add(9, [9] * 8, 1)
    turns = 0
    while 9 not in run.tokens:
        run.turn()
        turns += 1
    assert turns <= 10
    assert not any(uid in run.tokens for uid in range(num_long))
    run.finish()
    assert max(sum(row.length for row in plan.rows) for plan in run.plans) <= 16 + 1


@batch_policies
def test_long_prompts_stall_decoding_by_one_chunk_at_most(batch_policy):
    run = Run(num_pages=2000, prefill_budget=16, batch_policy=batch_policy)
    run.add(0, [0], 40)
    run.turn()
    for uid in (1, 2):
        run.add(uid, [uid] * 500, 1)
    since = 0
    while (0, FinishReason.LENGTH) not in run.endings:
        run.turn()
        since = 0 if any(row.uid == 0 for row in run.plans[-1].rows) else since + 1
        assert since <= 1
        assert sum(row.length for row in run.plans[-1].rows if row.uid) <= 16
    assert {1, 2}.isdisjoint(run.tokens)


def test_a_long_prompt_takes_the_whole_budget_when_nobody_else_can_use_it():
    run = Run(num_pages=30, prefill_budget=8)
    run.add(0, [0] * 100, 10)
    assert [row.length for row in run.plan().rows] == [8]
    run.commit()
    run.add(1, [1] * 100, 10)  # does not fit beside it
    assert [row.length for row in run.plan().rows] == [8]
    run.commit()
    run.add(2, [2] * 2, 1)
    assert [row.length for row in run.plan().rows] == [8]


def test_what_short_prompts_leave_goes_to_the_long_one():
    run = Run(num_pages=300, prefill_budget=16)
    run.add(0, [0] * 100, 10)
    run.add(1, [1] * 3, 10)
    assert [(row.uid, row.length) for row in run.plan().rows] == [(0, 13), (1, 3)]


@depths
def test_a_deadline_ends_waiting_and_running_requests_and_nobody_else(depth):
    run = Run(depth, max_running=2)
    for uid, deadline in enumerate((100, None, 50, None)):
        run.add(uid, [uid] * 5, 20, deadline=deadline)
    for _ in range(6):
        run.turn()
        run.now += 10
    assert run.endings == [(2, FinishReason.DEADLINE)]
    while run.scheduler.has_work:
        run.turn()
        run.now += 10
    assert set(run.endings) == {
        (2, FinishReason.DEADLINE),
        (0, FinishReason.DEADLINE),
        *((u, "length") for u in (1, 3)),
    }
    assert 2 not in run.tokens
    assert run.tokens[0] == continuation([0] * 5, 20)[: len(run.tokens[0])]
    assert 5 <= len(run.tokens[0]) <= 11
    assert [run.tokens[uid] for uid in (1, 3)] == [continuation([uid] * 5, 20) for uid in (1, 3)]
    assert run.scheduler.cache.num_available == run.config.num_pages


def test_a_deadline_is_told_even_if_no_step_follows_and_only_once():
    run = Run()
    run.add(0, [1], 5, deadline=7)
    assert run.scheduler.plan(7) is None
    assert not run.scheduler.has_work
    assert [(ending.uid, ending.reason) for ending in run.scheduler.take_ended()] == [(0, FinishReason.DEADLINE)]
    assert run.scheduler.take_ended() == []
    assert not run.scheduler.abort(0)


def test_an_ending_by_deadline_that_is_not_taken_comes_with_the_next_outcome():
    run = Run()
    run.add(0, [1], 5, deadline=7)
    run.add(1, [2], 5)
    plan = run.scheduler.plan(8)
    outcome = run.scheduler.commit(plan, run.engine.launch(plan).wait())
    assert [ending.uid for ending in outcome.finished] == [0]
    assert run.scheduler.take_ended() == []


def test_deadlines_of_requests_that_ended_are_forgotten():
    run = Run()
    for uid in range(500):
        run.add(uid, [1], 1, deadline=10**9)
        run.finish()
    assert len(run.scheduler._deadlines) < 100


def test_an_old_deadline_does_not_end_a_later_request_of_the_same_uid():
    run = Run()
    run.add(0, [1] * 4, 9, deadline=5)
    run.scheduler.abort(0)
    run.add(0, [1] * 4, 9)
    run.now = 6
    run.finish()
    assert run.endings == [(0, FinishReason.LENGTH)]


def test_pins_end_by_the_time_of_the_plan():
    run = Run()
    run.add(0, [1] * 9, 1)
    run.finish()
    tokens = pack_ids([1] * 8)
    assert run.scheduler.cache.pin(tokens, "", 50) == 8
    for now, pinned in ((49, 8), (50, 0)):
        run.scheduler.plan(now)
        assert run.scheduler.cache.probe(tokens, "").pinned == pinned


def test_a_priority_is_that_of_the_cached_prefix_too():
    run = Run(num_pages=8, eviction="priority", max_running=1)
    for uid, priority in ((0, 1), (1, 0), (2, 0)):
        run.add(uid, [uid] * 9, 8, priority=priority)
        run.finish()
    known = [run.scheduler.cache.probe(pack_ids([uid] * 9), "").known for uid in range(2)]
    assert known[0] == 8
    assert known[1] < 8


def test_only_pages_that_nobody_else_locks_are_released_by_an_end():
    run = Run(num_pages=40)
    first = run.add(0, [1] * 16, 9)
    for _ in range(2):
        run.turn()
    cache = run.scheduler.cache
    assert cache.num_released(first.lease) == len(first.lease.pages) == 5
    second = run.add(1, [1] * 12 + [2] * 4, 9)
    run.turn()
    assert second.cached_len == 12
    assert cache.num_released(first.lease) == len(first.lease.pages) - 3
    before = cache.num_available
    run.scheduler.abort(0)
    assert cache.num_available == before + len(first.lease.pages) - 3


def test_more_run_at_once_when_requests_turn_out_to_be_short():
    run = Run(num_pages=100, page_size=1, max_running=50, max_model_len=100, reserve_ratio=1 - 1e-9, prefill_budget=99)
    stop = continuation([1], 1)

    def most_at_once(first):
        for uid in range(first, first + 40):
            run.add(uid, [1], 49, end_ids=stop)
        run.plan()
        running = run.scheduler.num_running
        run.commit()
        run.finish()
        return running

    before = most_at_once(0)
    for first in range(40, 200, 40):
        most_at_once(first)
    assert before <= 2
    assert most_at_once(200) >= 10


def test_admission_counts_on_those_that_end_first():
    """Two that end soon and one that comes: the sum of all is more than the pool, the peak is not."""
    run = Run(num_pages=26, page_size=1, max_running=4, prefill_budget=64, reserve_ratio=1 - 1e-9)
    run.add(0, [0] * 10, 2)
    run.add(1, [1] * 4, 10)
    assert [row.uid for row in run.plan().rows] == [0, 1]
    run.commit()
    run.add(2, [2] * 3, 6)
    assert [row.uid for row in run.plan().rows] == [0, 1, 2]
    run.commit()
    run.finish()
    assert run.scheduler.counters.retractions == 0


def test_window_pages_that_were_lost_with_their_prefixes_are_forgotten():
    run = Run(window=16, num_window_pages=200, num_pages=48, max_running=4)
    for uid in range(300):
        run.add(uid, [uid % 7, uid % 11, uid % 13, uid, 1, 2, 3, 4], 40)
    run.finish()
    tree = run.scheduler.cache._tree
    assert tree.num_window_pages <= 48
    assert len(tree._window_queue) <= 2 * tree.num_window_pages + SPARE_ENTRIES
    run.scheduler.check()
