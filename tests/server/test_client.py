"""The engine client: sorting, merging, aborting, and leaving nothing behind."""

from __future__ import annotations

import asyncio

import pytest

from tests.server.fakes import FakeEngine
from tokenmill.errors import InvalidRequest, Overloaded, TokenmillError, WorkerDied
from tokenmill.server.client import MAX_QUESTIONS, EngineClient
from tokenmill.server.errors import EngineError
from tokenmill.types import FinishReason, SamplingParams, Usage
from tokenmill.wire.channel import MemoryChannel
from tokenmill.wire.messages import (
    Abort,
    Probe,
    TextBatch,
    TextCall,
    TextDelta,
    Tokenized,
    TokenizeJob,
    ToScheduler,
    ToTokenizer,
)


class Pipes:
    """A client whose pipes' other ends are the test."""

    def __init__(self, num_tokenizers: int = 1, max_waiting: int = 100, max_waiting_tokens: int = 1000) -> None:
        self.tokenizers: list[MemoryChannel[ToTokenizer]] = [MemoryChannel() for _ in range(num_tokenizers)]
        self.scheduler: MemoryChannel[ToScheduler] = MemoryChannel()
        limits = {"max_waiting": max_waiting, "max_waiting_tokens": max_waiting_tokens}
        self.client = EngineClient(self.tokenizers, self.scheduler, **limits)

    def jobs(self, worker: int = 0) -> list[TokenizeJob]:
        return [message for message in self.tokenizers[worker].receive() if isinstance(message, TokenizeJob)]


async def collect(engine: FakeEngine, prompts: list[str], params: SamplingParams) -> tuple[list[str], Usage]:
    async with engine.running():
        with engine.client.open(prompts, params, echo=False) as generation:
            await generation.accepted()
            texts = [""] * generation.num_choices
            async for batch in generation.deltas():
                for index, delta in batch:
                    texts[index] += delta.text
            return texts, generation.usage


def test_choices_are_numbered_by_prompt_then_choice_and_usage_counts_each_prompt_once() -> None:
    engine = FakeEngine()
    texts, usage = asyncio.run(collect(engine, ["ab", "xyz"], SamplingParams(max_tokens=3, n=2)))
    assert texts == ["aba", "aba", "xyz", "xyz"]
    assert usage == Usage(prompt_tokens=5, completion_tokens=12, cached_tokens=3)
    assert engine.client.open_entries == 0


@pytest.mark.parametrize(("prompt", "status"), [("REFUSE", 400), ("FULL", 503)])
def test_a_refusal_is_raised_before_anything_is_accepted(prompt: str, status: int) -> None:
    engine = FakeEngine()
    with pytest.raises(EngineError) as caught:
        asyncio.run(collect(engine, ["fine", prompt], SamplingParams(max_tokens=900)))
    assert caught.value.status == status
    engine.settle()
    assert engine.client.open_entries == 0
    assert engine.scheduler.jobs == {}


def test_jobs_go_to_the_tokenizer_with_the_fewest_unanswered() -> None:
    pipes = Pipes(num_tokenizers=3)
    with pipes.client.open(["a", "b", "c", "d"], SamplingParams(), echo=False):
        jobs = [pipes.jobs(worker) for worker in range(3)]
        assert [[job.text for job in one] for one in jobs] == [["a", "d"], ["b"], ["c"]]
        pipes.client.deliver(Tokenized(jobs[2][0].uids, 1))
        with pipes.client.open(["e"], SamplingParams(), echo=False):
            assert [job.text for job in pipes.jobs(2)] == ["e"]


def test_an_abort_follows_the_job_until_the_scheduler_is_known_to_have_it() -> None:
    pipes = Pipes()
    with pipes.client.open(["waits", "runs"], SamplingParams(n=2), echo=False):
        waits, runs = pipes.jobs()
        pipes.client.deliver(Tokenized(waits.uids, 5))
        pipes.client.deliver(TextBatch([TextDelta(uid=uid, accepted=True) for uid in runs.uids]))
        pipes.client.deliver(TextBatch([TextDelta(uid=runs.uids[1], finish_reason=FinishReason.STOP)]))
    assert pipes.tokenizers[0].receive() == [Abort(waits.uids)]
    assert pipes.scheduler.receive() == [Abort(runs.uids[:1])]
    pipes.client.deliver(TextBatch([TextDelta(uid=runs.uids[0], text="late")]))
    assert pipes.client.open_entries == 2, "the second job is not answered yet"
    pipes.client.deliver(Tokenized(runs.uids, 4))
    assert pipes.client.open_entries == 0


def test_a_finished_request_is_not_aborted() -> None:
    engine = FakeEngine()
    asyncio.run(collect(engine, ["ab."], SamplingParams(max_tokens=9)))
    engine.settle()
    assert engine.scheduler.aborted == []


def test_the_count_may_come_after_all_of_the_text() -> None:
    async def run() -> tuple[list[str], Usage]:
        pipes = Pipes()
        with pipes.client.open(["x"], SamplingParams(), echo=False) as generation:
            (job,) = pipes.jobs()
            end = TextDelta(uid=job.uids[0], text="y", completion_tokens=1, finish_reason=FinishReason.LENGTH)
            pipes.client.deliver(TextBatch([end]))
            accepted = asyncio.create_task(generation.accepted())
            await asyncio.sleep(0)
            assert not accepted.done()
            pipes.client.deliver(Tokenized(job.uids, 7))
            await accepted
            texts = [delta.text async for batch in generation.deltas() for _, delta in batch]
            return texts, generation.usage

    assert asyncio.run(run()) == (["y"], Usage(7, 1, 0))


def test_deltas_of_a_slow_reader_are_merged() -> None:
    async def run() -> list[tuple[int, TextDelta]]:
        pipes = Pipes()
        with pipes.client.open(["x"], SamplingParams(n=2), echo=False) as generation:
            (job,) = pipes.jobs()
            pipes.client.deliver(Tokenized(job.uids, 1))
            for count in range(1, 1001):
                deltas = [TextDelta(uid=uid, text="ab", completion_tokens=count) for uid in job.uids]
                pipes.client.deliver(TextBatch(deltas))
            ends = [
                TextDelta(uid=uid, text="!", completion_tokens=1001, finish_reason=FinishReason.STOP, stop_reason=5)
                for uid in job.uids
            ]
            pipes.client.deliver(TextBatch(ends))
            return [item async for batch in generation.deltas() for item in batch]

    merged = asyncio.run(run())
    assert [index for index, _ in merged] == [0, 1]
    for _, delta in merged:
        assert delta.text == "ab" * 1000 + "!"
        assert (delta.completion_tokens, delta.finish_reason, delta.stop_reason) == (1001, FinishReason.STOP, 5)


def test_an_error_comes_after_the_text_before_it() -> None:
    async def run() -> list[str]:
        engine = FakeEngine()
        seen: list[str] = []
        async with engine.running():
            with engine.client.open(["BREAK"], SamplingParams(max_tokens=9), echo=False) as generation:
                await generation.accepted()
                try:
                    async for batch in generation.deltas():
                        seen += [delta.text for _, delta in batch]
                except EngineError as error:
                    seen.append(error.message)
        assert engine.client.open_entries == 0
        return seen

    *texts, message = asyncio.run(run())
    assert ("".join(texts), message) == ("BR", "the model broke")


def test_failing_ends_open_requests_and_refuses_new_ones() -> None:
    async def run() -> None:
        pipes = Pipes()
        error = WorkerDied("the scheduler-0 process has ended")
        with pipes.client.open(["x"], SamplingParams(), echo=False) as generation:
            waiting = asyncio.create_task(generation.accepted())
            idle = asyncio.create_task(pipes.client.idle.wait())
            await asyncio.sleep(0)
            pipes.client.fail(error)
            with pytest.raises(WorkerDied):
                await waiting
            assert not idle.done()
        await idle
        with pytest.raises(WorkerDied), pipes.client.open(["y"], SamplingParams(), echo=False):
            pass

    asyncio.run(run())


def test_a_job_that_cannot_be_sent_leaves_nothing_behind() -> None:
    class Broken(MemoryChannel[ToTokenizer]):
        def send(self, message: ToTokenizer, /) -> None:
            if isinstance(message, TokenizeJob) and message.text == "bad":
                raise OverflowError
            super().send(message)

    channel = Broken()
    client = EngineClient([channel], MemoryChannel(), max_waiting=9, max_waiting_tokens=9)
    with pytest.raises(OverflowError), client.open(["good", "bad"], SamplingParams(), echo=False):
        pass
    job, abort = channel.receive()
    assert isinstance(job, TokenizeJob)
    assert abort == Abort(job.uids)
    client.deliver(Tokenized(job.uids, 1))
    assert client.open_entries == 0


@pytest.mark.parametrize("turns", range(4))
def test_a_pulse_may_meet_a_probe_that_is_being_given_up(turns: int) -> None:
    async def check() -> None:
        pipes = Pipes()
        engine = FakeEngine()
        probe = asyncio.create_task(pipes.client.probe(60))
        await asyncio.sleep(0)
        probe.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
        (sent,) = [message for message in pipes.scheduler.receive() if isinstance(message, Probe)]
        pipes.client.deliver(engine.scheduler._pulse(sent.serial))
        await asyncio.gather(probe, return_exceptions=True)
        assert pipes.client.open_entries == 0

    asyncio.run(check())


def test_probe_is_answered_by_its_own_serial() -> None:
    async def run() -> None:
        pipes = Pipes()
        engine = FakeEngine()
        first = asyncio.create_task(pipes.client.probe(60))
        second = asyncio.create_task(pipes.client.probe(60))
        await asyncio.sleep(0)
        probes = [message for message in pipes.scheduler.receive() if isinstance(message, Probe)]
        for probe in reversed(probes):
            pipes.client.deliver(engine.scheduler._pulse(probe.serial))
        assert [(await first).serial, (await second).serial] == [probe.serial for probe in probes]
        with pytest.raises(Overloaded, match="not answered"):
            await pipes.client.probe(0.001)
        assert pipes.client.open_entries == 0

    asyncio.run(run())


def test_probes_end_with_the_server() -> None:
    async def run() -> None:
        pipes = Pipes()
        waiting = asyncio.create_task(pipes.client.probe(60))
        await asyncio.sleep(0)
        pipes.client.fail(Overloaded("the server is shutting down"))
        with pytest.raises(Overloaded, match="shutting down"):
            await waiting
        with pytest.raises(Overloaded, match="shutting down"):
            await pipes.client.probe(60)
        assert pipes.client.open_entries == 0

    asyncio.run(run())


def test_a_request_without_an_error_object_still_fails_with_words() -> None:
    async def run() -> None:
        pipes = Pipes()
        with pipes.client.open(["x"], SamplingParams(), echo=False) as generation:
            (job,) = pipes.jobs()
            pipes.client.deliver(Tokenized(job.uids, 1))
            pipes.client.deliver(TextBatch([TextDelta(uid=job.uids[0], finish_reason=FinishReason.ERROR)]))
            with pytest.raises(TokenmillError, match="the request failed"):
                async for _ in generation.deltas():
                    pass

    asyncio.run(run())


def test_what_waits_for_the_tokenizers_is_bounded_but_one_request_alone_is_not() -> None:
    pipes = Pipes(num_tokenizers=2, max_waiting=3, max_waiting_tokens=10)
    client, one = pipes.client, SamplingParams()

    def refusal(prompts: int, size: int) -> str:
        with pytest.raises((Overloaded, InvalidRequest)) as caught:
            client.open(["x"] * prompts, one, echo=False, size=size).__enter__()
        return caught.value.message

    assert "4 answers are over the 3 that may wait" in refusal(4, 0)
    with client.open(["x"] * 2, one, echo=False, size=1000):
        for prompts, size in ((1, 1), (2, 0)):
            assert "2 requests of 1000 bytes are waiting, of at most 3 and 40" in refusal(prompts, size)
    # They are still on their way through the tokenizers, though nobody waits for them.
    assert "queue is full" in refusal(1, 1)
    for worker in range(2):
        for job in pipes.jobs(worker):
            client.deliver(Tokenized(job.uids, 1))
    for params in (SamplingParams(n=2), one):
        client.open(["x"], params, echo=False, size=20).__enter__()
    assert "3 requests of 40 bytes" in refusal(1, 0)


def test_questions_are_bounded() -> None:
    async def run() -> None:
        client = Pipes().client
        waiting = [asyncio.create_task(client.probe(60)) for _ in range(MAX_QUESTIONS)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="wait for an answer"):
            await client.probe(60)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert client.open_entries == 0

    asyncio.run(run())


def test_questions_that_wait_take_room_while_they_do() -> None:
    async def run() -> None:
        client = Pipes(max_waiting_tokens=10).client
        first = asyncio.create_task(client.ask(TextCall(text="x"), 60, size=30))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="30 bytes are waiting"):
            await client.ask(TextCall(text="x"), 60, size=30)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        with pytest.raises(Overloaded, match="not answered"):
            await client.ask(TextCall(text="x"), 0, size=30)

    asyncio.run(run())


def test_questions_go_round_the_tokenizers_also_where_there_are_as_many_api_servers() -> None:
    async def run() -> list[int]:
        tokenizers: list[MemoryChannel[ToTokenizer]] = [MemoryChannel(), MemoryChannel()]
        limits = {"max_waiting": 100, "max_waiting_tokens": 1000}
        scheduler: MemoryChannel[ToScheduler] = MemoryChannel()
        client = EngineClient(tokenizers, scheduler, {1: MemoryChannel()}, **limits)
        for _ in range(4):
            with pytest.raises(Overloaded):
                await client.ask(TextCall(text="x"), 0)
        return [len(channel.receive(0)) for channel in tokenizers]

    assert asyncio.run(run()) == [2, 2]
