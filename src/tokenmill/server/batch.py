"""`run-batch`: a file of requests through the server's own routes, without a socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any, cast

import msgspec
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from starlette.types import ASGIApp, Message

from tokenmill import log
from tokenmill.config import LogLevel, RunConfig, ServerConfig, check_range
from tokenmill.errors import ConfigError, WorkerDied
from tokenmill.procs import Supervisor
from tokenmill.server.api import ApiSettings
from tokenmill.server.batch_file import (
    BatchAnswer,
    BatchError,
    BatchRequest,
    BatchResponse,
    Done,
    check_names,
    new_answer,
    parse_line,
    read_lines,
    resume,
)
from tokenmill.server.keys import Keys
from tokenmill.server.launch import RANGES, Planner, plan_processes, started

MAX_TRIES = 20
SERVICE_UNAVAILABLE = 503

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchOptions:
    """Answer the requests of a file, in OpenAI's batch format. An output file that is there already is gone on with."""

    input: Path
    output: Path
    errors: Path | None
    concurrency: int
    tokenizers: int
    log_level: LogLevel


def run_batch(run: RunConfig, options: BatchOptions, planner: Planner = plan_processes) -> int:
    """Answer every line that has no answer yet; returns 0, also if some are errors. For a process's main thread.

    Raises ConfigError: a file cannot be used, two lines have one custom_id, or a value cannot work; WorkerDied: the
    engine ended, and what was answered is kept; StartFailed, KeyboardInterrupt.
    """
    check_range("--concurrency", options.concurrency, 1, 10**5)
    check_range("--tokenizers", options.tokenizers, *RANGES["tokenizers"])
    log.configure("batch", options.log_level)
    outputs = [options.output] if options.errors is None else [options.output, options.errors]
    if len({path.resolve() for path in (options.input, *outputs)}) < 1 + len(outputs):
        raise ConfigError("input and output must be different files")
    done = Done()
    for path in outputs:
        resume(path, done)
    count, num_before = check_names(options.input, done)
    server = ServerConfig(tokenizers=options.tokenizers, log_level=options.log_level, sse_keep_alive=0)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(path.open("ab", buffering=0)) for path in (outputs[0], outputs[-1])]
        answers, errors = (cast(RawIOBase, file) for file in files)
        bar = _bar(count)
        batch = Batch(options, done, num_before, answers, errors, bar)
        if count == num_before:
            return batch.tell()
        engine = stack.enter_context(started(run, server, planner, "tokenmill.server.api"))
        settings = ApiSettings(server, Keys(), run.model.model, engine.directory, engine.info)
        try:
            bar.start()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(batch.run(settings, engine.supervisor))
        finally:
            bar.stop()
            batch.tell()
    return 0


def _bar(count: int) -> Progress:
    columns = (TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[more]}"))
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(file=sys.stderr))
    bar.add_task("", total=count, more="")
    return bar


class Batch:
    """One run over a file. Answers are written in whole lines, in the order in which they come."""

    def __init__(
        self, options: BatchOptions, done: Done, num_before: int, answers: RawIOBase, errors: RawIOBase, bar: Progress
    ) -> None:
        self._options = options
        self._answers, self._errors = answers, errors
        self._bar = bar
        self._num_answered = self._num_failed = self._num_tokens = 0
        self._left = (line for line in read_lines(options.input) if not done.has(line[0], line[1]))
        self._num_before = num_before

    def tell(self) -> int:
        """Say what was done; returns 0."""
        before = f", {self._num_before} before" if self._num_before else ""
        failed = f", {self._num_failed} of them errors" if self._num_failed else ""
        print(f"{self._num_answered} answered{failed}{before}: {self._options.output}")
        return 0

    async def run(self, settings: ApiSettings, supervisor: Supervisor) -> None:
        """Answer what is left. Raises WorkerDied when the engine ends before."""
        with settings.connect() as (client, inbox):
            app = settings.make_app(client)
            pump, death = asyncio.create_task(inbox.pump(client.deliver)), asyncio.create_task(supervisor.watch())
            workers = [asyncio.create_task(self._work(app)) for _ in range(self._options.concurrency)]
            work = asyncio.gather(*workers)
            watched: set[asyncio.Future[Any]] = {pump, death, work}
            try:
                await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
                if death.done():
                    ended = death.result()
                    raise WorkerDied(
                        f"the {ended.name} process has ended: {ended.reason}. Run the same command to go on"
                    )
                await (pump if pump.done() else work)
            finally:
                for task in (pump, death, *workers):
                    task.cancel()
                await asyncio.gather(pump, death, *workers, return_exceptions=True)

    async def _work(self, app: ASGIApp) -> None:
        for number, name, text in self._left:
            request = parse_line(number, text)
            if isinstance(request, BatchError):
                self._write(new_answer(name, None, request))
            else:
                self._write(new_answer(name, await _ask(app, request)))

    def _write(self, answer: BatchAnswer) -> None:
        response = answer.response
        has_failed = response is None or response.status_code >= 400
        (self._errors if has_failed else self._answers).write(msgspec.json.encode(answer) + b"\n")
        self._num_answered += 1
        self._num_failed += has_failed
        if response is not None and not has_failed:
            with contextlib.suppress(msgspec.DecodeError):
                usage = msgspec.json.decode(response.body, type=dict[str, Any]).get("usage") or {}
                self._num_tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0
        (task,) = self._bar.tasks
        speed = f"{self._num_tokens / max(task.elapsed or 0.0, 1e-9):.0f} tok/s"
        more = f"{speed}, {self._num_failed} errors" if self._num_failed else speed
        self._bar.update(task.id, completed=self._num_before + self._num_answered, more=more)


async def _ask(app: ASGIApp, request: BatchRequest) -> BatchResponse:
    """The app's answer; asked again for a while when it is busy."""
    body = msgspec.json.encode(request.body)
    for _ in range(MAX_TRIES):
        response, wait = await _call(app, request.url, body)
        if response.status_code != SERVICE_UNAVAILABLE:
            break
        await asyncio.sleep(wait)
    return response


async def _call(app: ASGIApp, url: str, body: bytes) -> tuple[BatchResponse, float]:
    """One request to an ASGI app: what it answers, and the seconds after which it wants to be asked again."""
    path, _, query = url.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "server": ("batch", 80),
        "client": None,
        "state": {},
    }
    incoming: asyncio.Queue[Message] = asyncio.Queue()
    incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    try:
        await app(scope, incoming.get, send)
    except Exception:  # the app has answered with 500 before it raises what it did not expect
        logger.exception("a request to %s failed", path)
    headers = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    content = b"".join(message.get("body", b"") for message in sent[1:])
    if not headers.get("content-type", "").startswith("application/json"):
        content = msgspec.json.encode(content.decode("utf-8", "replace"))
    response = BatchResponse(sent[0]["status"], headers["x-request-id"], msgspec.Raw(content))
    return response, float(headers.get("retry-after", 1))
