"""Ranks that replay rank 0's messages over real sockets plan alike: the seam for tensor parallelism."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import zmq

from tests.sched.support import make_config
from tokenmill.engine.fake import FakeEngine
from tokenmill.sched.scheduler import Scheduler
from tokenmill.types import SamplingParams, Scheduling
from tokenmill.wire.channel import NullSender, PullChannel, PushChannel, address
from tokenmill.wire.messages import (
    Abort,
    GenerateJob,
    Probe,
    Stop,
    TextOptions,
    Tick,
    TokenBatch,
    ToScheduler,
    pack_ids,
)
from tokenmill.worker.core import Core
from tokenmill.worker.inbox import FollowerInbox, open_leader
from tokenmill.worker.loop import make_loop


def job(uid, prompt, max_tokens):
    return GenerateJob(
        uid=uid,
        token_ids=pack_ids(prompt),
        params=SamplingParams(seed=uid, stop_token_ids=[300 + uid, 5, 400]),
        max_tokens=max_tokens,
        end_ids=[3, 1000, 77],
        text=TextOptions(),
        scheduling=Scheduling(salt=f"salt-{uid % 2}", deadline=2**60 if uid % 3 else None),
    )


def messages(count):
    """Requests, aborts in every state, unknown uids, probes."""
    for uid in range(count):
        yield job(uid, [uid % 3] * (3 + 5 * uid % 17), max_tokens=12 + uid % 9)
        if uid % 4 == 3:
            yield Abort([uid - 2, uid, 999])
        if uid % 5 == 0:
            yield Probe(uid)


def open_inbox(context, directory, rank, size):
    places = [address(directory, f"rank-{follower}") for follower in range(1, size)]
    if rank == 0:
        return open_leader(context, directory, places, pytest.fail)
    return FollowerInbox(PullChannel(context, places[rank - 1], list[ToScheduler]))


class Ending:
    """Where a loop's tokens go: sends Stop through `pipe` when the last of `count` requests has ended."""

    def __init__(self, count, pipe):
        self.finished = []
        self._count, self._pipe = count, pipe

    def send(self, message):
        if isinstance(message, TokenBatch) and message.finished:
            self.finished += [finish.uid for finish in message.finished]
            if len(self.finished) == self._count:
                self._pipe.send(Stop())


def work(inbox, loop, detokenizer):
    """The digests of all plans of one rank, until Stop."""
    config = make_config(loop=loop, num_pages=16, max_running=3, prefill_budget=5)
    core = Core(Scheduler(config), inbox, detokenizer, NullSender())
    engine = FakeEngine(config, 50)
    launch, digests = engine.launch, []

    def spy(plan):
        digests.append(plan.digest())
        return launch(plan)

    engine.launch = spy
    turn = make_loop(core, engine).turn
    while turn():
        pass
    return digests, core.scheduler.counters


@pytest.mark.parametrize("loop", ["serial", "overlap"])
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_plan_the_same_steps(loop, size, tmp_path):
    with zmq.Context() as context, ThreadPoolExecutor(size) as pool:
        ranks = []
        stopper = PushChannel(context, address(tmp_path, "scheduler"))
        out = [Ending(24, stopper), *(NullSender() for _ in range(1, size))]
        for rank in range(size):
            inbox = open_inbox(context, tmp_path, rank, size)

            def run(inbox=inbox, rank=rank):
                with closing(inbox):
                    return work(inbox, loop, out[rank])

            ranks.append(pool.submit(run))
        writer = PushChannel(context, address(tmp_path, "scheduler"))
        for message in messages(24):
            writer.send(message)
        writer.close()
        (digests, counters), *others = [rank.result(60) for rank in ranks]
        stopper.close()
    assert len(set(digests)) > 30
    for theirs, their_counters in others:
        assert theirs == digests
        assert their_counters == counters
    assert sorted(out[0].finished) == list(range(24))


def test_plans_do_not_depend_on_the_process():
    script = (
        "from tests.worker.test_inbox import messages, work\n"
        "from tests.support.channels import EndingChannel\n"
        "from tokenmill.wire.channel import NullSender\n"
        "inbox = EndingChannel()\n"
        "[inbox.send(message) for message in messages(12)]\n"
        "print(work(inbox, 'overlap', NullSender())[0])\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(outputs) == 1
    assert len(outputs.pop()) > 500


def test_the_leader_hands_on_the_time_also_without_messages(tmp_path):
    """A follower takes in one batch a turn, so that it plans between the same messages as the leader."""
    with zmq.Context() as context:
        follower = open_inbox(context, tmp_path, 1, 2)
        leader = open_inbox(context, tmp_path, 0, 2)
        writer = PushChannel(context, address(tmp_path, "scheduler"))
        taken = [leader.receive(0)]
        writer.send(Probe(1))
        writer.send(Abort([4]))
        while sum(map(len, taken)) < len(taken) + 2:
            taken.append(leader.receive(30))
        assert [follower.receive(None) for _ in taken] == taken
        assert all(isinstance(batch[0], Tick) for batch in taken)
        assert [message for batch in taken for message in batch[1:]] == [Probe(1), Abort([4])]
        for end in (writer, leader, follower):
            end.close()
