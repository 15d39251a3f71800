"""The API server's end of the pipes: sends jobs, sorts what comes back into one `Generation` a request.

Everything here runs on one event loop. Only `EngineClient` writes the tables below; a `Generation` belongs to the
handler that opened it, which must close it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import zmq

from tokenmill.errors import InvalidRequest, Overloaded, TokenmillError
from tokenmill.server.errors import EngineError
from tokenmill.server.generation import Generation
from tokenmill.server.protocol import Prompt
from tokenmill.types import SamplingParams, Scheduling
from tokenmill.wire import messages as wire
from tokenmill.wire.channel import PullChannel, Sender, address

MAX_QUESTIONS = 1024
TOKEN_SIZE = 4  # bytes of a request's body, roughly


class Inbox:
    """The pipe of API server `index`, for an event loop."""

    def __init__(self, context: zmq.Context[Any], directory: Path, index: int) -> None:
        self._channel = PullChannel[wire.ToServer](context, address(directory, f"server-{index}"), wire.ToServer)

    async def pump(self, deliver: Callable[[wire.ToServer], None]) -> None:
        """Give every message to `deliver`, until that raises, which is raised here."""
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[None] = loop.create_future()

        def drain() -> None:
            # ZeroMQ tells only once that something has come: whatever is there must be taken.
            try:
                for message in self._channel.receive(0):
                    deliver(message)
            except Exception as error:
                if not failed.done():
                    failed.set_exception(error)

        loop.add_reader(self._channel.fileno(), drain)
        try:
            drain()
            await failed
        finally:
            loop.remove_reader(self._channel.fileno())

    def close(self) -> None:
        """Close; unread messages are lost."""
        self._channel.close()


@dataclass(slots=True)
class _Route:
    """Where the deltas of one request go. `has_arrived`: the scheduler has it, so an Abort may go there directly."""

    generation: Generation
    index: int
    worker: int
    has_arrived: bool = False


@dataclass(frozen=True, slots=True)
class _Job:
    """A prompt on its way through a tokenizer. `size` is in bytes."""

    generation: Generation
    worker: int
    num_choices: int
    size: int


class EngineClient:
    """Sends jobs to tokenizers and aborts to the scheduler; delivers what comes back. `idle`: no request is open.

    `siblings` are the other API servers, by their numbers; `index` is this one's. As many requests and tokens as may
    wait in the scheduler's queue may also wait for the tokenizers.
    """

    def __init__(
        self,
        tokenizers: Sequence[Sender[wire.ToTokenizer]],
        scheduler: Sender[wire.ToScheduler],
        siblings: Mapping[int, Sender[wire.ToServer]] = MappingProxyType({}),
        *,
        index: int = 0,
        max_waiting: int,
        max_waiting_tokens: int,
    ) -> None:
        self._tokenizers = tokenizers
        self._scheduler = scheduler
        self._max_waiting = max_waiting
        self._max_size = TOKEN_SIZE * max_waiting_tokens
        self._routes: dict[int, _Route] = {}
        self._jobs: dict[int, _Job] = {}  # by first uid, until the tokenizer answers
        self._load = [0] * len(tokenizers)
        self._num_waiting = self._waiting_size = 0  # of all jobs; sizes of questions too
        self._generations: dict[Generation, list[int]] = {}
        self._questions: dict[int, asyncio.Future[wire.Pulse | wire.CallAnswer]] = {}
        self._siblings, self._index = siblings, index
        self._step = step = 1 + len(siblings)
        self._uids = itertools.count(index + step, step)
        self._serials = itertools.count(index + step, step)
        self._failure: TokenmillError | None = None
        self._is_draining = False
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def open_entries(self) -> int:
        """Entries in all tables; 0 when nothing is open and every tokenizer has answered."""
        return len(self._routes) + len(self._jobs) + len(self._generations) + len(self._questions) + sum(self._load)

    @contextlib.contextmanager
    def open(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        echo: bool,
        name: str = "",
        scheduling: Scheduling = Scheduling(),  # noqa: B008  (immutable)
        size: int = 0,
    ) -> Iterator[Generation]:
        """Start a request of `size` bytes; on leaving, what has not ended is aborted and all bookkeeping freed.

        `name` is for `cancel`, several requests may have the same.

        Raises Overloaded when too much waits for the tokenizers, InvalidRequest when there will never be room for all
        choices, and TokenmillError when the server is ending.
        """
        self.check_ready()
        self._check_room(len(prompts) * params.n, size)
        generation = Generation(len(prompts), params.n, name)
        self._generations[generation] = []
        self.idle.clear()
        try:
            for number, prompt in enumerate(prompts):
                job = wire.TokenizeJob(
                    uids=[next(self._uids) for _ in range(params.n)],
                    params=params,
                    echo=echo,
                    scheduling=scheduling,
                    **_fields(prompt),
                )
                self._send_job(generation, number, job, size // len(prompts))
            yield generation
        finally:
            self._close(generation)

    def check_ready(self) -> None:
        """Raises the TokenmillError with which new requests are refused, if they are."""
        if self._failure is not None:
            raise self._failure
        if self._is_draining:
            raise Overloaded("the server is shutting down")

    def drain(self) -> None:
        """Refuse new requests; those that are open go on."""
        self._is_draining = True

    async def cancel(self, name: str, timeout: float) -> int:
        """End the requests of this name with FinishReason.ABORT, here and in the siblings; returns how many there were.

        Raises as `probe`.
        """
        asked = [(next(self._serials), sibling) for sibling in self._siblings.values()]
        answers = [
            self._ask(serial, pipe, wire.CancelCall(serial, self._index, name), timeout) for serial, pipe in asked
        ]
        found = self._cancel(name)
        for answer in await asyncio.gather(*answers):
            assert isinstance(answer, wire.CallAnswer)
            found += answer.data["cancelled"]
        return found

    def _cancel(self, name: str) -> int:
        found = [generation for generation in self._generations if generation.name == name and not generation.has_ended]
        for generation in found:
            self._abort(self._generations[generation])
            generation.cancel()
        return len(found)

    def deliver(self, message: wire.ToServer) -> None:
        """Sort in one message; what belongs to closed requests is dropped."""
        match message:
            case wire.TextBatch(deltas):
                for delta in deltas:
                    self._add(delta)
            case wire.Tokenized(uids, prompt_tokens, is_thinking):
                if generation := self._job_done(uids):
                    generation.tokenized(prompt_tokens, is_thinking)
            case wire.Refused(uids, error):
                self._job_done(uids)
                for route in filter(None, [self._routes.pop(uid, None) for uid in uids]):
                    route.generation.fail(EngineError(error))
            case wire.CancelCall(serial, sender, name):
                self._siblings[sender].send(wire.CallAnswer(serial, {"cancelled": self._cancel(name)}))
            case wire.Pulse() | wire.CallAnswer():
                waiter = self._questions.pop(message.serial, None)
                if waiter is not None and not waiter.done():  # it may be cancelled, and its owner not yet woken
                    waiter.set_result(message)

    async def probe(self, timeout: float) -> wire.Pulse:
        """Ask the scheduler for a sign of life.

        Raises Overloaded when none comes within `timeout` seconds, TokenmillError when the server is ending.
        """
        serial = next(self._serials)
        pulse = await self._ask(serial, self._scheduler, wire.Probe(serial), timeout)
        assert isinstance(pulse, wire.Pulse)
        return pulse

    async def ask(
        self, call: wire.CacheCall | wire.TextCall, timeout: float, prompt: Prompt | None = None, size: int = 0
    ) -> dict[str, Any]:
        """Ask the prefix cache or a tokenizer, about a prompt if one is given, in a request of `size` bytes.

        Raises EngineError when the answer is one; otherwise as `probe` and `open`.
        """
        self._check_room(0, size)
        serial = next(self._serials)
        call = msgspec.structs.replace(call, serial=serial, **({} if prompt is None else _fields(prompt)))
        worker = self._tokenizers[serial // self._step % len(self._tokenizers)]
        has_text = prompt is not None or isinstance(call, wire.TextCall)
        self._waiting_size += size
        try:
            answer = await self._ask(serial, worker if has_text else self._scheduler, call, timeout)
        finally:
            self._waiting_size -= size
        assert isinstance(answer, wire.CallAnswer)
        if answer.error is not None:
            raise EngineError(answer.error)
        return answer.data

    async def _ask(
        self, serial: int, pipe: Sender[Any], question: object, timeout: float
    ) -> wire.Pulse | wire.CallAnswer:
        if self._failure is not None:
            raise self._failure
        if len(self._questions) >= MAX_QUESTIONS:
            raise Overloaded(f"{MAX_QUESTIONS} questions wait for an answer; try again later")
        waiter = self._questions[serial] = asyncio.get_running_loop().create_future()
        pipe.send(question)
        try:
            return await asyncio.wait_for(waiter, timeout)
        except TimeoutError:
            who = "the scheduler" if pipe is self._scheduler else "another process"
            raise Overloaded(f"{who} has not answered within {timeout:g} s") from None
        finally:
            self._questions.pop(serial, None)

    def fail(self, error: TokenmillError) -> None:
        """End every open request and question with this error, and refuse new ones with it."""
        self._failure = error
        for generation in self._generations:
            generation.fail(error)
        for waiter in self._questions.values():
            if not waiter.done():
                waiter.set_exception(error)

    def _check_room(self, num_choices: int, size: int) -> None:
        most = self._max_waiting
        if num_choices > most:
            raise InvalidRequest(f"{num_choices} answers are over the {most} that may wait: send several requests", "n")
        is_full = self._num_waiting + num_choices > most or self._waiting_size + size > self._max_size
        if is_full and (self._num_waiting or self._waiting_size):
            waiting = f"{self._num_waiting} requests of {self._waiting_size} bytes"
            raise Overloaded(
                f"the tokenizers' queue is full ({waiting} are waiting, of at most {most} and {self._max_size}); "
                "try again later"
            )

    def _send_job(self, generation: Generation, number: int, job: wire.TokenizeJob, size: int) -> None:
        worker = self._load.index(min(self._load))
        self._tokenizers[worker].send(job)
        self._load[worker] += 1
        self._jobs[job.uids[0]] = _Job(generation, worker, len(job.uids), size)
        self._num_waiting += len(job.uids)
        self._waiting_size += size
        for index, uid in enumerate(job.uids, number * len(job.uids)):
            self._routes[uid] = _Route(generation, index, worker)
        self._generations[generation] += job.uids

    def _job_done(self, uids: list[int]) -> Generation | None:
        job = self._jobs.pop(uids[0], None)
        if job is None:
            return None
        self._load[job.worker] -= 1
        self._num_waiting -= job.num_choices
        self._waiting_size -= job.size
        return job.generation

    def _add(self, delta: wire.TextDelta) -> None:
        route = self._routes.get(delta.uid)
        if route is None:
            return
        route.has_arrived = True
        if delta.finish_reason is not None or delta.error is not None:
            del self._routes[delta.uid]
        route.generation.add(route.index, delta)

    def _close(self, generation: Generation) -> None:
        self._abort(self._generations.pop(generation))
        if not self._generations:
            self.idle.set()

    def _abort(self, uids: Sequence[int]) -> None:
        # An Abort must not overtake its job: until the scheduler is known to have the job, it follows the same pipes.
        direct: list[int] = []
        behind: dict[int, list[int]] = {}
        for uid in uids:
            if route := self._routes.pop(uid, None):
                (direct if route.has_arrived else behind.setdefault(route.worker, [])).append(uid)
        if direct:
            self._scheduler.send(wire.Abort(direct))
        for worker, waiting in behind.items():
            self._tokenizers[worker].send(wire.Abort(waiting))


def _fields(prompt: Prompt) -> dict[str, Any]:
    """A prompt as messages have it."""
    if isinstance(prompt, str):
        return {"text": prompt}
    return {"token_ids": wire.pack_ids(prompt)} if isinstance(prompt, list) else {"chat": prompt}
