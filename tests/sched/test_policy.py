"""Policies by name and from files, and the shares of a step's prompt tokens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sched.support import Run, request_for
from tokenmill.errors import ConfigError
from tokenmill.sched.policy import POLICIES, chunk_length, shared_gain
from tokenmill.sched.policy_file import load_policy
from tokenmill.sched.queue import Ledger

HOSTILE = Path(__file__).with_name("hostile_policy.py")


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("longest-prefix", {"hit_len": 8}, {"hit_len": 4}),
        ("priority", {"priority": 1}, {"priority": 0}),
        ("deadline", {"deadline": 5}, {"deadline": 6}),
        ("deadline", {"deadline": 5}, {"deadline": None}),
        ("shortest", {"max_len": 5}, {"max_len": 6}),
        ("fair", {"tenant": "new"}, {"tenant": "served"}),
    ],
)
def test_orders(name, first, second):
    ledger = Ledger()
    requests = [request_for(uid, [1], 9) for uid in range(2)]
    for request, values in zip(requests, (first, second), strict=True):
        for field, value in values.items():
            setattr(request, field, value)
        ledger.enter(request.tenant)
    ledger.charge(requests[1], 1)
    order = POLICIES[name].order
    assert order(requests[0], ledger) < order(requests[1], ledger)


@pytest.mark.parametrize("attribute", ["fickle", "mixed", "BOTH"])
def test_a_policy_from_a_file_orders_the_queue(attribute):
    policy = load_policy(f"{HOSTILE}:{attribute}")
    assert not policy.is_static
    run = Run(policy=f"{HOSTILE}:{attribute}", max_running=2, num_pages=20)
    for uid in range(6):
        run.add(uid, [uid] * 9, 5)
    run.finish()
    assert sorted(run.tokens) == list(range(6))


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("lifo", None, "--policy lifo is unknown: use fcfs, longest-prefix, .*, or path.py:function"),
        ("FILE", None, "is unknown"),
        ("FILE:order", None, "there is no file"),
        ("FILE:order", "def order(:", "cannot be run: SyntaxError"),
        ("FILE:order", "1 / 0", "cannot be run: ZeroDivisionError"),
        ("FILE:order", "x = 1", "has no order"),
        ("FILE:order", "order = 1", "is not a function"),
        ("FILE:order", "def order(request): return 0", r"failed: TypeError.*\(request, queue\)"),
        ("FILE:order", "def order(request, queue): return request.nothing", "failed: AttributeError"),
        ("FILE:order", "def order(request, queue): return 'first'", "returned 'first'"),
        ("FILE:order", "def order(request, queue): return float('nan')", "returned nan"),
        ("FILE:order", "def order(request, queue): return (1,) if request.priority else 1", "cannot be compared"),
    ],
)
def test_a_policy_that_cannot_work_is_refused_at_the_start(name, source, message, tmp_path):
    path = tmp_path / "mine.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(ConfigError, match=message):
        load_policy(name.replace("FILE", str(path)))


def test_a_policy_that_fails_later_is_named(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def order(request, queue): return 1 // (10 - request.prompt_len)")
    run = Run(policy=f"{path}:order")
    run.add(0, [1] * 10, 5)
    with pytest.raises(ConfigError, match=re.escape(f"--policy {path}:order failed: ZeroDivisionError")):
        run.plan()


@given(left=st.integers(1, 50), more=st.integers(0, 50), needed=st.integers(1, 200), is_contended=st.booleans())
def test_a_chunk_fits_and_leaves_half_to_others_only_if_it_outlasts_the_step(left, more, needed, is_contended):
    budget = left + more
    length = chunk_length(left, budget, needed, is_contended=is_contended)
    assert 1 <= length <= min(left, needed)
    if is_contended and needed > budget:
        assert left - length == left // 2
    else:
        assert length == min(left, needed)


@pytest.mark.parametrize(("page_size", "budget", "gain"), [(16, 512, 16), (64, 512, 64), (16, 8192, 256), (7, 512, 21)])
def test_what_is_worth_a_wait_is_whole_pages(page_size, budget, gain):
    assert shared_gain(page_size, budget) == gain
