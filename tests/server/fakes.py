"""Small stand-ins for the engine's processes: the same messages, no model. They run in one process or in several.

A prompt's ids are its characters' code points, and the output repeats the prompt. Some prompts are special: REFUSE and
TOO_LONG are refused by the tokenizer and FULL by the scheduler, BREAK fails after two tokens, SLOW meets its deadline
then, LATE while it waits, STUCK gives one token and no more, WAIT is accepted and gives none. "." is the end token.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from tokenmill.config import RunConfig, ServerConfig
from tokenmill.procs import ProcessPlan, Report
from tokenmill.server.client import EngineClient
from tokenmill.text.settings import TextSettings
from tokenmill.types import FinishReason, Scheduling
from tokenmill.wire.channel import MemoryChannel, PullChannel, PushChannel, Receiver, Sender, ServerChannel, address
from tokenmill.wire.messages import (
    Abort,
    CacheCall,
    CallAnswer,
    ChatPrompt,
    ErrorInfo,
    Finish,
    GenerateJob,
    Limits,
    OpenText,
    Probe,
    Pulse,
    Refused,
    TextBatch,
    TextCall,
    TextDelta,
    TextOptions,
    Timings,
    ToDetokenizer,
    TokenBatch,
    Tokenized,
    TokenizeJob,
    ToScheduler,
    ToServer,
    ToTokenizer,
    pack_ids,
    unpack_ids,
)
from tokenmill.worker.settings import SchedulerSettings

END_ID = ord(".")
MAX_MODEL_LEN = 1000
TIMINGS = Timings(queued=1000, began=1020, first=1050, last=1550)
OWNERS = dict.fromkeys(("page_size", "time", "pins", "free", "tree", "private", "fence", "evictable", "pinned"), 1)
TREE: dict[str, Any] = {**OWNERS, "now": 5, "omitted": 0, "roots": [{"salt": "", "omitted": 2, "children": []}]}


class FakeTokenizer:
    def __init__(self, inbox: Receiver[ToTokenizer], scheduler: Sender[ToScheduler], server: Sender[ToServer]) -> None:
        self._inbox, self._scheduler, self._server = inbox, scheduler, server
        self.limits: Limits | None = None
        self.is_paused = False
        self.templates: list[Any] = []

    def step(self, timeout: float | None = 0.0) -> bool:
        if self.is_paused:
            return False
        messages = self._inbox.receive(timeout)
        for message in messages:
            match message:
                case Limits():
                    self.limits = message
                case Abort():
                    self._scheduler.send(message)
                case TokenizeJob():
                    self._tokenize(message)
                case TextCall(serial=serial, token_ids=ids) if ids and not _is_text(unpack_ids(ids)):
                    self._server.send(CallAnswer(serial, error=ErrorInfo("no text", "BadRequestError", 400, "tokens")))
                case TextCall(serial=serial, token_ids=ids) if ids is not None:
                    self._server.send(CallAnswer(serial, {"prompt": "".join(map(chr, unpack_ids(ids)))}))
                case TextCall(serial=serial, text=text, chat=chat):
                    asked = {"special": message.add_special_tokens, "strings": message.with_strings}
                    text = _last_text(chat) if chat else text or ""
                    self._server.send(CallAnswer(serial, {"text": text, "count": len(text), **asked}))
                case CacheCall(serial=serial, text="REFUSE"):
                    self._server.send(CallAnswer(serial, error=ErrorInfo("refused", "BadRequestError", 400, "prompt")))
                case CacheCall(text=text, chat=chat, token_ids=given):
                    ids = given or pack_ids(map(ord, _last_text(chat) if chat else text or ""))
                    self._scheduler.send(msgspec.structs.replace(message, text=None, chat=None, token_ids=ids))
        return bool(messages)

    def _tokenize(self, job: TokenizeJob) -> None:
        if job.chat is not None:
            self.templates.append(job.chat)
        text = _last_text(job.chat) if job.chat is not None else job.text
        ids = unpack_ids(job.token_ids) if job.token_ids is not None else [ord(mark) for mark in text or ""]
        left = MAX_MODEL_LEN - len(ids)
        if text in ("REFUSE", "TOO_LONG") or not _is_text(ids) or (job.params.max_tokens or 1) > left:
            param = "messages" if job.chat else "prompt"
            self._server.send(Refused(job.uids, ErrorInfo(f"refused: {text}", "BadRequestError", 400, param)))
            return
        for choice, uid in enumerate(job.uids):
            params = job.params.for_choice(choice)
            self._scheduler.send(
                GenerateJob(
                    uid=uid,
                    token_ids=pack_ids(ids),
                    params=params,
                    max_tokens=params.max_tokens or MAX_MODEL_LEN - len(ids),
                    end_ids=[] if params.ignore_eos else [END_ID],
                    text=TextOptions(echo_text=text if job.echo else None),
                    scheduling=job.scheduling,
                )
            )
        self._server.send(Tokenized(job.uids, len(ids)))


class FakeScheduler:
    def __init__(self, inbox: Receiver[ToScheduler], detokenizer: Sender[ToDetokenizer], server: Sender[ToServer]):
        self._inbox, self._detokenizer, self._server = inbox, detokenizer, server
        self.jobs: dict[int, GenerateJob] = {}
        self.made: dict[int, int] = {}
        self.aborted: list[int] = []
        self.seen: list[Scheduling] = []
        self.steps = 0
        self.is_silent = False

    def step(self, timeout: float | None = 0.0) -> bool:
        messages = self._inbox.receive(timeout)
        accepted: list[int] = []
        finished: list[Finish] = []
        for message in messages:
            match message:
                case GenerateJob(uid=uid):
                    self.seen.append(message.scheduling)
                    self._detokenizer.send(OpenText(uid, message.text))
                    if self._text(message) == "FULL":
                        error = ErrorInfo("the queue is full", "ServiceUnavailableError", 503, retry_after=7)
                        finished.append(Finish(uid=uid, reason=FinishReason.ERROR, error=error))
                    else:
                        self.jobs[uid], self.made[uid] = message, 0
                        accepted.append(uid)
                case Abort(uids=uids):
                    self.aborted += uids
                    for uid in uids:
                        self.jobs.pop(uid, None)
                case Probe(serial=serial) if not self.is_silent:
                    self._server.send(self._pulse(serial))
                case CacheCall(serial=serial, verb="tree") if not self.is_silent:
                    self._server.send(CallAnswer(serial, TREE))
                case CacheCall(serial=serial) if not self.is_silent:
                    asked = {name: value for name, value in msgspec.structs.asdict(message).items() if value}
                    ids = unpack_ids(asked.pop("token_ids", b""))
                    self._server.send(CallAnswer(serial, asked | {"token_ids": ids, "serial": 0}))
        self._emit(accepted, finished)
        return bool(messages) or any(self._text(job) not in ("STUCK", "WAIT") for job in self.jobs.values())

    def _emit(self, accepted: list[int], finished: list[Finish]) -> None:
        uids: list[int] = []
        ids: list[int] = []
        for uid, job in list(self.jobs.items()):
            text, prompt, made = self._text(job), unpack_ids(job.token_ids), self.made[uid]
            if text == "WAIT" or (text == "STUCK" and made == 1):
                continue
            if text == "BREAK" and made == 2:
                finished.append(Finish(uid=uid, reason=FinishReason.ERROR, error=ErrorInfo("the model broke")))
                del self.jobs[uid]
                continue
            if text == "LATE" or (text == "SLOW" and made == 2):
                finished.append(Finish(uid=uid, reason=FinishReason.DEADLINE))
                del self.jobs[uid]
                continue
            token = prompt[made % len(prompt)]
            uids.append(uid)
            ids.append(token)
            self.made[uid] += 1
            if token in job.end_ids or token in job.params.stop_token_ids:
                stop = None if token in job.end_ids else token
                finished.append(Finish(uid=uid, reason=FinishReason.STOP, is_stop_token=True, stop_token=stop))
                del self.jobs[uid]
            elif self.made[uid] == job.max_tokens:
                finished.append(Finish(uid=uid, reason=FinishReason.LENGTH))
                del self.jobs[uid]
        if uids or accepted or finished:
            self.steps += 1
            admitted = [(uid, len(unpack_ids(self.jobs[uid].token_ids)) - 1) for uid in accepted if uid in self.jobs]
            self._detokenizer.send(
                TokenBatch(
                    uids=uids,
                    counts=[1] * len(uids),
                    token_ids=pack_ids(ids),
                    accepted=accepted,
                    admitted=admitted,
                    finished=finished,
                )
            )

    def _pulse(self, serial: int) -> Pulse:
        return Pulse(
            serial=serial,
            steps=self.steps,
            waiting=0,
            running=len(self.jobs),
            free_pages=5,
            available_pages=15,
            cached_pages=0,
            num_pages=20,
        )

    def _text(self, job: GenerateJob) -> str:
        return "".join(map(chr, unpack_ids(job.token_ids)))


class FakeDetokenizer:
    def __init__(self, inbox: Receiver[ToDetokenizer], server: Sender[ToServer]) -> None:
        self._inbox, self._server = inbox, server
        self._counts: dict[int, int] = {}
        self._echo: dict[int, str] = {}
        self._cached: dict[int, int] = {}

    def step(self, timeout: float | None = 0.0) -> bool:
        messages = self._inbox.receive(timeout)
        for message in messages:
            match message:
                case OpenText(uid, options):
                    self._counts[uid] = 0
                    self._echo[uid] = options.echo_text or ""
                case TokenBatch():
                    self._server.send(TextBatch(self._deltas(message)))
        return bool(messages)

    def _deltas(self, batch: TokenBatch) -> list[TextDelta]:
        self._cached.update(batch.admitted)
        deltas = [TextDelta(uid=uid, accepted=True) for uid in batch.accepted]
        ends = {finish.uid: finish for finish in batch.finished}
        for uid, token in zip(batch.uids, unpack_ids(batch.token_ids), strict=True):
            self._counts[uid] += 1
            is_stop = uid in ends and ends[uid].is_stop_token
            text = self._echo.pop(uid, "") + ("" if is_stop else chr(token))
            deltas.append(self._delta(uid, text, ends.pop(uid, None)))
        return deltas + [self._delta(uid, "", finish) for uid, finish in ends.items()]

    def _delta(self, uid: int, text: str, finish: Finish | None) -> TextDelta:
        return TextDelta(
            uid=uid,
            text=text,
            completion_tokens=self._counts[uid],
            cached_tokens=self._cached.get(uid, 0),
            accepted=self._counts[uid] > 0,
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.stop_token if finish else None,
            error=finish.error if finish else None,
            timings=TIMINGS if finish else None,
        )


class FakeEngine:
    """All stages in this process, moved by a task on the event loop."""

    def __init__(self, num_tokenizers: int = 1, max_waiting: int = 2000) -> None:
        to_tokenizers: list[MemoryChannel[ToTokenizer]] = [MemoryChannel() for _ in range(num_tokenizers)]
        to_scheduler: MemoryChannel[ToScheduler] = MemoryChannel()
        to_detokenizer: MemoryChannel[ToDetokenizer] = MemoryChannel()
        self.to_server: MemoryChannel[ToServer] = MemoryChannel()
        self.tokenizers = [FakeTokenizer(channel, to_scheduler, self.to_server) for channel in to_tokenizers]
        self.scheduler = FakeScheduler(to_scheduler, to_detokenizer, self.to_server)
        self.detokenizer = FakeDetokenizer(to_detokenizer, self.to_server)
        self.client = EngineClient(to_tokenizers, to_scheduler, max_waiting=max_waiting, max_waiting_tokens=10_000)

    def step(self) -> bool:
        moved = [stage.step() for stage in (*self.tokenizers, self.scheduler, self.detokenizer)]
        messages = self.to_server.receive(0)
        for message in messages:
            self.client.deliver(message)
        return any(moved) or bool(messages)

    def settle(self, limit: int = 10_000) -> None:
        """Step until nothing moves."""
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("the fake engine never came to rest")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async def run() -> None:
            while True:
                self.step()
                await asyncio.sleep(0)

        task = asyncio.create_task(run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def _last_text(chat: ChatPrompt) -> str:
    content = chat.messages[-1]["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _is_text(ids: list[int]) -> bool:
    return bool(ids) and all(0 <= each < 0xD800 or 0xDFFF < each < 0x110000 for each in ids)


def run_tokenizer(settings: TextSettings, report: Report) -> None:
    context: zmq.Context[Any] = zmq.Context()
    tokenizer = FakeTokenizer(
        PullChannel(context, address(settings.directory, settings.name), ToTokenizer),
        PushChannel(context, address(settings.directory, "scheduler")),
        ServerChannel(context, settings.directory, settings.api_workers),
    )
    report.ready(sampling_defaults={})
    while True:
        tokenizer.step(None)


def run_detokenizer(settings: TextSettings, report: Report) -> None:
    context: zmq.Context[Any] = zmq.Context()
    detokenizer = FakeDetokenizer(
        PullChannel(context, address(settings.directory, "detokenizer"), ToDetokenizer),
        ServerChannel(context, settings.directory, settings.api_workers),
    )
    report.ready()
    while True:
        detokenizer.step(None)


def run_scheduler(settings: SchedulerSettings, report: Report) -> None:
    context: zmq.Context[Any] = zmq.Context()
    scheduler = FakeScheduler(
        PullChannel(context, address(settings.directory, "scheduler"), ToScheduler),
        PushChannel(context, address(settings.directory, "detokenizer")),
        ServerChannel(context, settings.directory, settings.api_workers),
    )
    report.ready(
        max_model_len=MAX_MODEL_LEN,
        vocab_size=65536,
        max_waiting=100,
        max_waiting_tokens=10**6,
        has_priorities=False,
    )
    while True:
        scheduler.step(0.005)


def plan_fakes(run: RunConfig, server: ServerConfig, model: Path, directory: Path) -> list[ProcessPlan]:
    def text(name: str, target: Callable[..., None]) -> ProcessPlan:
        return ProcessPlan(name, target, TextSettings(model, directory, name, api_workers=server.api_workers))

    scheduler = SchedulerSettings(run, model, directory, api_workers=server.api_workers)
    return [
        ProcessPlan("scheduler-0", run_scheduler, scheduler),
        text("detokenizer", run_detokenizer),
        *(text(f"tokenizer-{index}", run_tokenizer) for index in range(server.tokenizers)),
    ]
