from __future__ import annotations

import pytest

from tests.sched.support import make_config
from tokenmill.clock import milliseconds
from tokenmill.engine.fake import FakeEngine, next_token
from tokenmill.errors import RanksDisagree
from tokenmill.sched.pace import Pace
from tokenmill.types import FinishReason, SamplingParams, Scheduling
from tokenmill.wire.channel import MemoryChannel
from tokenmill.wire.messages import (
    Abort,
    CacheCall,
    GenerateJob,
    OpenText,
    Probe,
    Pulse,
    Stop,
    TextOptions,
    TokenBatch,
    pack_ids,
    unpack_ids,
)
from tokenmill.worker.core import make_core
from tokenmill.worker.inbox import LeaderInbox
from tokenmill.worker.loop import make_loop

VOCABULARY = 50


class Harness:
    """A loop over FakeEngine with in-memory pipes."""

    def __init__(self, has_twin=False, **changes):
        self.config = make_config(**changes)
        self.now = 0
        self.inbox, self.out, self.server = MemoryChannel(), MemoryChannel(), MemoryChannel()
        inbox = LeaderInbox(self.inbox, now=lambda: self.now)
        core = make_core(self.config, inbox, self.out, self.server, has_pace=True, has_twin=has_twin)
        self.scheduler = core.scheduler
        self.engine = FakeEngine(self.config, VOCABULARY)
        self.loop = make_loop(core, self.engine)
        self.tokens: dict[int, list[int]] = {}
        self.finishes = {}
        self.opened: list[int] = []
        self.batches: list[TokenBatch] = []
        self.accepted: list[int] = []
        self.cached: dict[int, int] = {}

    def send(self, uid, prompt, max_tokens=6, end_ids=(), scheduling=Scheduling(), **params):  # noqa: B008
        self.inbox.send(
            GenerateJob(
                uid=uid,
                token_ids=pack_ids(prompt),
                params=SamplingParams(**params),
                max_tokens=max_tokens,
                end_ids=list(end_ids),
                text=TextOptions(),
                scheduling=scheduling,
            )
        )

    def turn(self):
        alive = self.loop.turn()
        for message in self.out.receive():
            if isinstance(message, OpenText):
                self.opened.append(message.uid)
                continue
            assert isinstance(message, TokenBatch)
            self.batches.append(message)
            self.accepted += message.accepted
            self.cached.update(message.admitted)
            ids = iter(unpack_ids(message.token_ids))
            for uid, count in zip(message.uids, message.counts, strict=True):
                assert uid in self.opened
                assert uid not in self.finishes
                self.tokens.setdefault(uid, []).extend(next(ids) for _ in range(count))
            self.finishes.update({finish.uid: finish for finish in message.finished})
        return alive

    def ask(self, verb, prompt=(), **options):
        self.inbox.send(CacheCall(serial=7, verb=verb, token_ids=pack_ids(prompt), **options))
        self.turn()
        (answer,) = self.server.receive()
        assert answer.serial == 7
        return answer.error or answer.data

    def finish(self):
        for _ in range(10_000):
            if not self.turn():
                raise AssertionError("the loop ended")
            if not self.scheduler.has_work:
                return
        raise AssertionError("requests are left")


def continuation(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, VOCABULARY))
    return tokens[len(prompt) :]


loops = pytest.mark.parametrize("loop", ["serial", "overlap"])


@loops
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("policy", ["mixed", "prefill-first"])
def test_requests_get_their_tokens_under_pressure(loop, page_size, policy):
    harness = Harness(
        loop=loop, page_size=page_size, num_pages=96 // page_size, max_running=4, prefill_budget=7, batch_policy=policy
    )
    prompts = {uid: [uid % 3] * (5 + 7 * uid % 40) for uid in range(20)}
    for uid, prompt in prompts.items():
        harness.send(uid, prompt, max_tokens=4 + uid)
    harness.finish()
    for uid, prompt in prompts.items():
        assert harness.tokens[uid] == continuation(prompt, 4 + uid)
        assert harness.finishes[uid].reason is FinishReason.LENGTH
    assert harness.scheduler.counters.retractions > 0
    assert harness.scheduler.cache.num_available == harness.config.num_pages


@loops
def test_an_end_id_stops_and_is_counted(loop):
    harness = Harness(loop=loop)
    expected = continuation([1, 2], 5)
    harness.send(0, [1, 2], max_tokens=30, end_ids=[expected[2]])
    harness.send(1, [1, 2], max_tokens=30, stop_token_ids=[expected[2]])
    harness.finish()
    assert harness.tokens[0] == harness.tokens[1] == expected[:3]
    assert harness.finishes[0].is_stop_token
    assert harness.finishes[0].stop_token is None
    assert harness.finishes[1].stop_token == expected[2]


@loops
@pytest.mark.parametrize("turns", range(6))
def test_abort_in_every_state(loop, turns):
    harness = Harness(loop=loop, max_running=2, prefill_budget=4)
    for uid in range(4):
        harness.send(uid, [uid] * 9, max_tokens=8)
    for _ in range(turns):
        harness.turn()
    harness.inbox.send(Abort([0, 3, 77]))
    harness.send(4, [4] * 9, max_tokens=8)
    harness.finish()
    assert harness.finishes[0].reason is harness.finishes[3].reason is FinishReason.ABORT
    assert sorted(harness.finishes) == [0, 1, 2, 3, 4]
    for uid in (1, 2, 4):
        assert harness.tokens[uid] == continuation([uid] * 9, 8)
    harness.inbox.send(Abort([0, 1]))
    harness.inbox.send(Probe(1))
    harness.turn()
    assert harness.scheduler.cache.num_available == harness.config.num_pages


def test_what_cannot_fit_is_refused_alone():
    harness = Harness(num_pages=4)
    harness.send(0, [1] * 100)
    harness.send(1, [1] * 4)
    harness.finish()
    assert harness.finishes[0].error.status == 400
    assert "100" in harness.finishes[0].error.message
    assert harness.accepted == [1]
    assert harness.tokens[1] == continuation([1] * 4, 6)


@loops
def test_cached_tokens_are_told_and_salts_share_nothing(loop):
    harness = Harness(loop=loop, max_running=1)
    for uid, salt in enumerate(("a", "b", "a")):
        harness.send(uid, [1] * 9, scheduling=Scheduling(salt=salt))
    harness.finish()
    assert harness.cached == {0: 0, 1: 0, 2: 8}
    assert harness.scheduler.counters.cached_tokens == 8


@pytest.mark.parametrize("loop", ["serial", "overlap"])
def test_times_are_told_in_their_order(loop):
    h = Harness(loop=loop, max_running=1)
    h.now = before = milliseconds()
    h.send(1, [1, 2, 3], max_tokens=3)
    h.send(2, [4, 5], max_tokens=3)
    h.finish()
    began, batches = dict(pair for batch in h.batches for pair in batch.began), h.batches
    queued = {uid: batch.now for batch in batches for uid in batch.accepted}
    first = {uid: batch.now for batch in reversed(batches) for uid in batch.uids}
    assert queued == {1: before, 2: before}
    assert before <= began[1] <= first[1] <= began[2] <= first[2] <= milliseconds()


def test_a_full_queue_refuses_with_503():
    harness = Harness(max_waiting=2)
    for uid in range(3):
        harness.send(uid, [1])
    harness.finish()
    assert harness.finishes[2].error.status == 503
    assert harness.accepted == [0, 1]


def test_a_probe_is_answered_with_the_state():
    harness = Harness()
    harness.send(0, [1, 2, 3])
    harness.finish()
    harness.inbox.send(Probe(42))
    harness.turn()
    (pulse,) = harness.server.receive()
    assert isinstance(pulse, Pulse)
    assert (pulse.serial, pulse.waiting, pulse.running) == (42, 0, 0)
    assert pulse.generated_tokens == 6
    assert pulse.free_pages + pulse.cached_pages == pulse.num_pages


@loops
def test_stop_ends_at_once(loop):
    harness = Harness(loop=loop)
    harness.send(0, [1, 2, 3])
    harness.inbox.send(Stop())
    assert not harness.turn()


@loops
def test_the_engine_prepares_itself_while_there_is_nothing_to_do_and_messages_are_looked_for_in_between(loop):
    harness = Harness(loop=loop)
    harness.engine.num_preparations = 3
    timeouts = []
    receive = harness.inbox.receive
    harness.inbox.receive = lambda timeout=None: timeouts.append(timeout) or receive(timeout)
    harness.turn()
    assert (harness.engine.num_preparations, timeouts) == (2, [0])
    harness.send(0, [1, 2, 3])
    harness.finish()
    assert harness.tokens[0] == continuation([1, 2, 3], 6)
    assert harness.engine.num_preparations == 1  # the turn that took the request in, not those that computed it
    harness.turn()
    assert timeouts[-1] == 0
    harness.turn()
    assert timeouts[-1] is None


def test_both_loops_and_two_ranks_plan_alike():
    """The plan of every step depends on the messages alone, so ranks that replay them never differ."""

    def digests():
        harness = Harness(loop="serial", num_pages=12, max_running=3, prefill_budget=5)
        seen = []
        plan = harness.scheduler.plan

        def spy(now):
            made = plan(now)
            seen.append(made and made.digest())
            return made

        harness.scheduler.plan = spy
        for uid in range(9):
            harness.send(uid, [uid % 2] * (3 + uid), max_tokens=5)
            harness.turn()
        harness.finish()
        return seen

    assert digests() == digests()
    assert len(set(digests())) > 10


@loops
def test_deadlines_end_requests_that_wait_and_that_run(loop):
    harness = Harness(loop=loop, max_running=1)
    harness.send(0, [1, 2, 3], max_tokens=50, scheduling=Scheduling(deadline=10))
    harness.send(1, [1, 2, 3], scheduling=Scheduling(deadline=10))
    harness.send(2, [1, 2, 3], scheduling=Scheduling(deadline=11))
    for _ in range(6):
        harness.turn()
    assert harness.accepted == [0, 1, 2]
    harness.now = 10
    harness.send(3, [1], scheduling=Scheduling(deadline=10))
    harness.finish()
    ends = {uid: finish.reason for uid, finish in harness.finishes.items()}
    assert {uid for uid, reason in ends.items() if reason is FinishReason.DEADLINE} == {0, 1, 3}
    assert 0 < len(harness.tokens[0]) < 50
    assert harness.tokens[2] == continuation([1, 2, 3], 6)
    assert set(harness.tokens) == {0, 2}
    assert harness.finishes[3].error is None


@loops
def test_what_cannot_be_in_time_is_refused_once_the_pace_is_known(loop):
    harness = Harness(loop=loop, max_running=1)
    late = Scheduling(deadline=5000)
    harness.send(0, [1] * 10, max_tokens=200)
    harness.send(1, [2] * 10, max_tokens=200)
    for _ in range(8):
        harness.turn()
        harness.now += 100
    harness.send(2, [3] * 200, max_tokens=9, scheduling=late)
    harness.turn()
    refusal = harness.finishes[2]
    assert (refusal.reason, refusal.error.status) == (FinishReason.ERROR, 503)
    assert "the first token is expected" in refusal.error.message
    assert refusal.error.retry_after > 1
    harness.send(3, [3] * 2, scheduling=late)
    harness.turn()
    assert harness.accepted == [0, 1, 3]


def test_pace_is_the_most_of_late_while_requests_wait():
    pace = Pace()
    for now in range(0, 900, 100):
        pace.planned(30, now, is_busy=now < 300)
    assert pace.rate == 0
    for now in range(10_000, 10_700, 100):
        pace.planned(20, now, is_busy=True)
    assert pace.rate == 1000 * (3 * 30 + 2 * 20) // 500
    for now in range(10_700, 20_000, 100):
        pace.planned(10, now, is_busy=True)
    assert pace.rate == 100


def test_the_cache_answers_between_steps():
    harness = Harness(max_running=1)
    prompt = [1] * 9
    assert harness.ask("probe", prompt)["hit_tokens"] == 0
    assert "expires_in_ms" not in harness.ask("pin", prompt, ttl=50)
    harness.send(0, prompt)
    harness.send(1, prompt)
    harness.finish()
    assert harness.ask("probe", prompt) == {
        "prompt_tokens": 9,
        "known_tokens": 8,
        "hit_tokens": 8,
        "pinned_tokens": 0,
        "in_use_tokens": 0,
    }
    assert harness.ask("probe", prompt, salt="other")["known_tokens"] == 0
    pinned = harness.ask("pin", prompt, ttl=50)
    assert (pinned["pinned_tokens"], pinned["expires_in_ms"]) == (8, 50)
    stats = harness.ask("stats")
    assert (stats["num_pins"], stats["hits"], stats["misses"]) == (1, 1, 1)
    assert stats["hit_rate"] == 8 / 18
    assert stats["pages"]["pinned"] == 2
    freed = harness.ask("flush")["freed_pages"]
    assert freed == stats["pages"]["tree"] - 2
    assert harness.ask("tree", max_nodes=9, max_depth=9)["roots"][0]["children"][0]["pinned_until"] == 50
    harness.now = 49
    assert harness.ask("probe", prompt)["pinned_tokens"] == 8
    harness.now = 50
    assert harness.ask("probe", prompt)["pinned_tokens"] == 0
    assert harness.ask("unpin", prompt)["unpinned_tokens"] == 0
    harness.ask("pin", prompt, ttl=50)
    assert harness.ask("unpin", prompt)["unpinned_tokens"] == 8
    harness.ask("pin", prompt, ttl=50)
    assert harness.ask("flush", salt="other", with_pins=True)["freed_pages"] == 0
    assert harness.ask("flush", with_pins=True)["freed_pages"] == 2
    assert harness.ask("stats")["pages"]["free"] == harness.config.num_pages


def test_a_pin_that_cannot_be_is_an_error():
    harness = Harness(num_pages=4)
    harness.send(0, [1] * 13, max_tokens=1)
    harness.finish()
    assert harness.ask("pin", [1] * 13, ttl=5).status == 400
    assert "--no-prefix-cache" in Harness(prefix_cache=False).ask("pin", [1] * 13, ttl=5).message


@loops
def test_a_twin_that_follows_changes_nothing(loop):
    harness = Harness(has_twin=True, loop=loop, num_pages=12, max_running=3, prefill_budget=5)
    for uid in range(9):
        harness.send(uid, [uid % 2] * (3 + uid), max_tokens=5, scheduling=Scheduling(deadline=3 if uid == 4 else None))
        harness.now += 1
        harness.turn()
    harness.inbox.send(Abort([8]))
    harness.ask("pin", [1] * 5, ttl=100)
    harness.finish()
    assert harness.tokens[5] == continuation([1] * 8, 5)
    assert len(harness.server.receive()) == 0, "the twin's answers go nowhere"


@loops
def test_a_policy_that_depends_on_more_than_its_arguments_is_found_by_the_twin(loop, tmp_path):
    own = tmp_path / "own.py"
    own.write_text("import random\ndef order(request, queue): return random.random()\n")
    harness = Harness(has_twin=True, loop=loop, policy=f"{own}:order", max_running=1)
    for uid in range(40):
        harness.send(uid, [uid] * 3, max_tokens=2)
    with pytest.raises(RanksDisagree, match="depend on its arguments alone"):
        harness.finish()
