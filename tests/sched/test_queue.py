"""The queue's order, how little it looks at, that nobody is passed for ever, and what tenants pay."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sched.support import request_for
from tokenmill.sched.policy import POLICIES, Policy
from tokenmill.sched.queue import PATIENCE, RANKING_USES, WINDOW, Ledger, WaitingQueue


def nobody(request):
    return False


class Queue:
    """A WaitingQueue with its ledger, that counts how often the policy and the prefix tree are asked."""

    def __init__(self, policy):
        self.num_asked = self.num_looked_up = self.num_added = 0
        self.ledger = Ledger()
        self.queue = WaitingQueue(dataclasses.replace(policy, order=self.order), self.ledger, self.look_up)
        self._order = policy.order

    def order(self, request, queue):
        self.num_asked += 1
        return self._order(request, queue)

    def look_up(self, request):
        self.num_looked_up += 1

    def add(self, uid, **values):
        request = request_for(uid, [1], 9)
        for name, value in values.items():
            setattr(request, name, value)
        self.num_added += 1
        request.arrival = self.num_added
        self.ledger.enter(request.tenant)
        self.queue.add(request)
        return request

    def take(self, tokens=0, is_held=nobody):
        request = self.queue.first(is_held)
        self.queue.take(request)
        self.ledger.charge(request, tokens)
        return request


@given(st.lists(st.integers(-3, 3), max_size=30), st.sets(st.integers(0, 29)))
def test_static_keys_are_kept_sorted_by_arrival_among_equals(priorities, removed):
    its = Queue(POLICIES["priority"])
    requests = [its.add(uid, priority=priority) for uid, priority in enumerate(priorities)]
    for request in [request for request in requests if request.uid in removed]:
        its.queue.remove(request)
    assert its.num_asked == len(priorities)
    expected = sorted((r for r in requests if r.uid not in removed), key=lambda r: (-r.priority, r.arrival))
    assert its.queue.num_tokens == len(its.queue) == len(expected)
    assert [its.take() for _ in expected] == expected
    assert its.queue.first(nobody) is None


def test_add_tells_whether_a_request_is_the_first_now():
    its = Queue(POLICIES["priority"])
    requests = [request_for(uid, [1], 9) for uid in range(3)]
    for request, priority in zip(requests, (1, 0, 2), strict=True):
        request.priority = priority
    assert [its.queue.add(request) for request in requests] == [True, False, True]


@pytest.mark.parametrize("name", ["longest-prefix", "fair", "fcfs"])
def test_ten_thousand_that_wait_cost_no_more_than_a_window(name):
    its = Queue(POLICIES[name])
    for uid in range(10_000):
        its.add(uid, tenant=str(uid % 1000))
    its.num_asked = 0
    for _ in range(10):
        its.take(5)
    assert its.num_asked <= 10 * WINDOW
    assert its.num_looked_up <= 2 * WINDOW


def test_one_ranking_by_hits_serves_several_admissions_and_then_sees_what_came():
    its = Queue(POLICIES["longest-prefix"])
    for uid in range(20):
        its.add(uid, hit_len=uid)
    assert its.take().uid == 19
    its.add(99, hit_len=99)
    assert [its.take().uid for _ in range(RANKING_USES - 1)] == list(range(18, 18 - RANKING_USES + 1, -1))
    assert its.take().uid == 99


def test_one_that_left_or_is_held_is_not_taken_from_a_ranking():
    its = Queue(POLICIES["longest-prefix"])
    requests = [its.add(uid, hit_len=-uid) for uid in range(4)]
    its.queue.first(nobody)
    its.queue.remove(requests[0])
    assert its.queue.first(lambda request: request.uid == 1).uid == 2
    late = its.add(4)
    assert its.queue.first(lambda request: request is not late) is late


@pytest.mark.parametrize("policy", [Policy(lambda request, queue: -request.uid), POLICIES["longest-prefix"]])
def test_the_oldest_is_passed_a_bounded_number_of_times(policy):
    its = Queue(policy)
    its.add(0)
    for uid in range(1, 2 * RANKING_USES):
        its.add(uid, hit_len=uid)
    passed = 0
    while its.take().uid:
        passed += 1
        its.add(1000 + passed, hit_len=1000)
    assert passed == PATIENCE


def test_a_tenant_that_was_served_most_is_passed_a_bounded_number_of_times():
    its = Queue(POLICIES["fair"])
    its.add(1, tenant="poor")
    its.ledger.charge(its.add(0, tenant="rich"), 10**9)
    passed = 0
    while its.take().uid:
        passed += 1
        its.add(1 + passed, tenant="poor")
    assert passed == 1 + PATIENCE  # once as the oldest


def test_tenants_behind_the_window_have_their_turn_before_those_in_it_have_a_second():
    its = Queue(POLICIES["fair"])
    for uid in range(5 * WINDOW):
        its.add(uid, tenant=str(uid % WINDOW))
    its.add(-1, tenant="last")
    turns = [its.take(1).tenant for _ in range(WINDOW + 1)]
    assert "last" in turns


def test_tenants_take_turns_by_tokens():
    its = Queue(POLICIES["fair"])
    for uid in range(40):
        its.add(uid, tenant="ab"[uid % 2])
    tokens = {"a": 0, "b": 0}
    for _ in range(12):
        cost = 100 if (request := its.queue.first(nobody)).tenant == "a" else 20
        its.take(cost)
        tokens[request.tenant] += cost
    assert tokens == {"a": 200, "b": 200}


def test_one_that_is_held_does_not_hold_its_tenant_back():
    its = Queue(POLICIES["fair"])
    held, other = its.add(0, tenant="a"), its.add(1, tenant="a")
    assert its.queue.first(lambda request: request is held) is other
    assert its.queue.first(lambda request: True) is None


def test_more_tenants_than_the_window_all_have_their_turn():
    its = Queue(POLICIES["fair"])
    for uid in range(3 * WINDOW):
        its.add(uid, tenant=str(uid))
    assert sorted(its.take(1).uid for _ in range(3 * WINDOW)) == list(range(3 * WINDOW))


def test_only_those_certain_to_run_before_are_ahead():
    for name, ahead in (("fcfs", [0, 1, 2]), ("priority", [1]), ("fair", [0, 2]), ("longest-prefix", [])):
        its = Queue(POLICIES[name])
        for uid, tenant, priority in ((0, "a", 0), (1, "b", 2), (2, "a", 0)):
            its.add(uid, tenant=tenant, priority=priority)
        new = request_for(3, [1], 9)
        new.arrival, new.tenant, new.priority = 9, "a", 1
        assert [request.uid for request in its.queue.ahead(new)] == ahead


def test_idleness_earns_no_credit():
    its = Queue(POLICIES["fair"])
    busy = its.add(0, tenant="busy")
    its.ledger.charge(busy, 500)
    its.add(1, tenant="idle")
    assert its.ledger.served("idle") == 500
    its.ledger.charge(busy, 800)
    its.ledger.leave("idle")
    its.add(2, tenant="idle")
    assert its.ledger.served("idle") == 800
    its.ledger.leave("busy")
    its.add(3, tenant="busy")
    assert its.ledger.served("busy") == 800


def test_leaving_forgives_nothing_while_others_are_there():
    its = Queue(POLICIES["fair"])
    its.add(0, tenant="other")
    greedy = its.add(1, tenant="greedy")
    its.ledger.charge(greedy, 900)
    its.ledger.leave("greedy")
    its.add(2, tenant="greedy")
    assert its.ledger.served("greedy") == 900


def test_tenants_that_left_are_forgotten():
    its = Queue(POLICIES["fair"])
    its.add(0, tenant="other")
    for uid in range(1, 1000):
        its.add(uid, tenant=str(uid))
        its.ledger.leave(str(uid))
    assert len(its.ledger._served) < 100
    its.ledger.leave("other")
    its.add(1000, tenant="next")
    assert its.ledger._served == {"next": 0}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_a_request_pays_for_what_it_took_in_the_end(charges):
    its = Queue(POLICIES["fair"])
    request = its.add(0, tenant="a")
    for charge in charges:
        its.ledger.charge(request, charge)
    assert its.ledger.served("a") == charges[-1]


def test_fcfs_is_the_order_of_arrival_also_of_those_that_come_back():
    its = Queue(POLICIES["fcfs"])
    requests = [its.add(uid) for uid in range(5)]
    first = its.take()
    its.queue.add(first)
    assert [its.take() for _ in requests] == requests
