"""The API server's end of the pipes: sends jobs, sorts what comes back into one `Generation` a request.

Everything here runs on one event loop. Only `EngineClient` writes the tables below; a `Generation` belongs to the
handler that opened it, which must close it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from tokenmill.errors import TokenmillError
from tokenmill.server.errors import EngineError
from tokenmill.server.protocol import Prompt
from tokenmill.types import FinishReason, SamplingParams, Usage
from tokenmill.wire import messages as wire
from tokenmill.wire.channel import Sender, address


class Inbox:
    """The PULL socket "server", for an event loop."""

    def __init__(self, directory: Path) -> None:
        self._decode = msgspec.msgpack.Decoder[wire.ToServer](wire.ToServer).decode
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address(directory, "server"))

    async def receive(self) -> wire.ToServer:
        """The next message."""
        return self._decode(await self._socket.recv())

    def close(self) -> None:
        """Close; unread messages are lost."""
        self._socket.close()
        self._context.term()


@dataclass(slots=True)
class _Route:
    """Where the deltas of one request go. `has_arrived`: the scheduler has it, so an Abort may go there directly."""

    generation: Generation
    index: int
    worker: int
    has_arrived: bool = False


class Generation:
    """The answers to one HTTP request: choice index = prompt number * n + choice.

    Deltas that wait for a slow reader are merged, so the buffer is never larger than the text itself.
    """

    def __init__(self, num_prompts: int, n: int) -> None:
        self.num_choices = num_prompts * n
        self._n = n
        self._wake = asyncio.Event()
        self._pending: dict[int, wire.TextDelta] = {}
        self._error: TokenmillError | None = None
        self._not_accepted = set(range(self.num_choices))
        self._not_finished = set(range(self.num_choices))
        self._not_tokenized = num_prompts
        self._prompt_tokens = 0
        self._cached = [0] * self.num_choices
        self._completion = [0] * self.num_choices

    @property
    def usage(self) -> Usage:
        """Counts so far: each prompt once, the tokens of all choices; cached tokens are those of each first choice."""
        return Usage(self._prompt_tokens, sum(self._completion), sum(self._cached[:: self._n]))

    async def accepted(self) -> None:
        """Wait until every choice is in the scheduler's queue, or further; raises the TokenmillError that ended one."""
        while self._error is None and (self._not_tokenized or self._not_accepted):
            await self._wait()
        if self._error is not None:
            raise self._error

    async def deltas(self) -> AsyncIterator[list[tuple[int, wire.TextDelta]]]:
        """What is new, as (choice index, delta), until every choice has ended.

        Raises TokenmillError when a choice failed, or the client left; text from before comes first.
        """
        while True:
            if self._pending:
                pending, self._pending = self._pending, {}
                yield list(pending.items())
            elif self._error is not None:
                raise self._error
            elif not self._not_finished and not self._not_tokenized:
                return
            else:
                await self._wait()

    def fail(self, error: TokenmillError) -> None:
        """End with this error; the first one stays."""
        if self._error is None:
            self._error = error
        self._wake.set()

    def tokenized(self, prompt_tokens: int) -> None:
        """One prompt is tokenized."""
        self._not_tokenized -= 1
        self._prompt_tokens += prompt_tokens
        self._wake.set()

    def add(self, index: int, delta: wire.TextDelta) -> None:
        """Take in what is new of one choice."""
        self._not_accepted.discard(index)
        self._cached[index] = max(self._cached[index], delta.cached_tokens)
        self._completion[index] = max(self._completion[index], delta.completion_tokens)
        if delta.finish_reason is not None:
            self._not_finished.discard(index)
        if delta.error is not None or delta.finish_reason is FinishReason.ERROR:
            self.fail(EngineError(delta.error or wire.ErrorInfo("the request failed; the server's log may tell why")))
        elif delta.text or delta.finish_reason is not None:
            before = self._pending.get(index)
            self._pending[index] = delta if before is None else _merge(before, delta)
        self._wake.set()

    async def _wait(self) -> None:
        self._wake.clear()
        await self._wake.wait()


def _merge(first: wire.TextDelta, second: wire.TextDelta) -> wire.TextDelta:
    return msgspec.structs.replace(
        second, text=first.text + second.text, token_ids=first.token_ids + second.token_ids, accepted=True
    )


class EngineClient:
    """Sends jobs to tokenizers and aborts to the scheduler; delivers what comes back. `idle`: no request is open."""

    def __init__(self, tokenizers: Sequence[Sender[wire.ToTokenizer]], scheduler: Sender[wire.ToScheduler]) -> None:
        self._tokenizers = tokenizers
        self._scheduler = scheduler
        self._routes: dict[int, _Route] = {}
        self._jobs: dict[int, tuple[int, Generation]] = {}  # worker; by first uid, until the tokenizer answers
        self._load = [0] * len(tokenizers)
        self._generations: dict[Generation, list[int]] = {}
        self._probes: dict[int, asyncio.Future[wire.Pulse]] = {}
        self._uids = itertools.count(1)
        self._serials = itertools.count(1)
        self._failure: TokenmillError | None = None
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def open_entries(self) -> int:
        """Entries in all tables; 0 when nothing is open and every tokenizer has answered."""
        return len(self._routes) + len(self._jobs) + len(self._generations) + len(self._probes) + sum(self._load)

    @contextlib.contextmanager
    def open(self, prompts: Sequence[Prompt], params: SamplingParams, *, echo: bool) -> Iterator[Generation]:
        """Start a request; on leaving, what has not ended is aborted and all bookkeeping freed.

        Raises TokenmillError when the server is ending.
        """
        if self._failure is not None:
            raise self._failure
        generation = Generation(len(prompts), params.n)
        self._generations[generation] = []
        self.idle.clear()
        try:
            for number, prompt in enumerate(prompts):
                self._send_job(generation, number, prompt, params, echo)
            yield generation
        finally:
            self._close(generation)

    def deliver(self, message: wire.ToServer) -> None:
        """Sort in one message; what belongs to closed requests is dropped."""
        match message:
            case wire.TextBatch(deltas):
                for delta in deltas:
                    self._add(delta)
            case wire.Tokenized(uids, prompt_tokens):
                if generation := self._job_done(uids):
                    generation.tokenized(prompt_tokens)
            case wire.Refused(uids, error):
                self._job_done(uids)
                for route in filter(None, [self._routes.pop(uid, None) for uid in uids]):
                    route.generation.fail(EngineError(error))
            case wire.Pulse():
                waiter = self._probes.pop(message.serial, None)
                if waiter is not None and not waiter.done():  # it may be cancelled, and its owner not yet woken
                    waiter.set_result(message)

    async def pump(self, inbox: Inbox) -> None:
        """Deliver what comes in, for ever."""
        while True:
            self.deliver(await inbox.receive())

    async def probe(self, timeout: float) -> wire.Pulse:
        """Ask the scheduler for a sign of life.

        Raises TimeoutError when none comes within `timeout` seconds, TokenmillError when the server is ending.
        """
        if self._failure is not None:
            raise self._failure
        serial = next(self._serials)
        waiter = self._probes[serial] = asyncio.get_running_loop().create_future()
        self._scheduler.send(wire.Probe(serial))
        try:
            return await asyncio.wait_for(waiter, timeout)
        finally:
            self._probes.pop(serial, None)

    def fail(self, error: TokenmillError) -> None:
        """End every open request and probe with this error, and refuse new ones with it."""
        self._failure = error
        for generation in self._generations:
            generation.fail(error)
        for waiter in self._probes.values():
            if not waiter.done():
                waiter.set_exception(error)

    def _send_job(
        self, generation: Generation, number: int, prompt: Prompt, params: SamplingParams, echo: bool
    ) -> None:
        uids = [next(self._uids) for _ in range(params.n)]
        worker = self._load.index(min(self._load))
        self._tokenizers[worker].send(
            wire.TokenizeJob(
                uids=uids,
                params=params,
                text=prompt if isinstance(prompt, str) else None,
                token_ids=wire.pack_ids(prompt) if isinstance(prompt, list) else None,
                chat=prompt if isinstance(prompt, wire.ChatPrompt) else None,
                echo=echo,
            )
        )
        self._load[worker] += 1
        self._jobs[uids[0]] = worker, generation
        for choice, uid in enumerate(uids):
            self._routes[uid] = _Route(generation, number * params.n + choice, worker)
        self._generations[generation] += uids

    def _job_done(self, uids: list[int]) -> Generation | None:
        worker, generation = self._jobs.pop(uids[0], (0, None))
        if generation is not None:
            self._load[worker] -= 1
        return generation

    def _add(self, delta: wire.TextDelta) -> None:
        route = self._routes.get(delta.uid)
        if route is None:
            return
        route.has_arrived = True
        if delta.finish_reason is not None or delta.error is not None:
            del self._routes[delta.uid]
        route.generation.add(route.index, delta)

    def _close(self, generation: Generation) -> None:
        # An Abort must not overtake its job: until the scheduler is known to have the job, it follows the same pipes.
        direct: list[int] = []
        behind: dict[int, list[int]] = {}
        for uid in self._generations.pop(generation):
            if route := self._routes.pop(uid, None):
                (direct if route.has_arrived else behind.setdefault(route.worker, [])).append(uid)
        if direct:
            self._scheduler.send(wire.Abort(direct))
        for worker, uids in behind.items():
            self._tokenizers[worker].send(wire.Abort(uids))
        if not self._generations:
            self.idle.set()
