"""`serve`: bind, start the processes, answer requests, and end everything together."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
import uvloop
import zmq

from tokenmill import log
from tokenmill.config import RunConfig, ServerConfig
from tokenmill.errors import ConfigError, Overloaded, TokenmillError, WorkerDied
from tokenmill.hub import resolve_model
from tokenmill.procs import ProcessPlan, Ready, Supervisor
from tokenmill.server.app import create_app
from tokenmill.server.client import EngineClient, Inbox
from tokenmill.server.routes import AppSettings
from tokenmill.text.settings import DetokenizerSettings, TokenizerSettings
from tokenmill.wire.channel import PushChannel, address
from tokenmill.wire.messages import Limits, ToScheduler, ToTokenizer
from tokenmill.worker.settings import SchedulerSettings

MAX_SOCKET_PATH = 107
LONGEST_PIPE = "tokenizer-9999"
FAREWELL = 2.0  # seconds for last events to reach the clients
KEEP_ALIVE = 60

logger = logging.getLogger(__name__)

Planner = Callable[[RunConfig, ServerConfig, Path, Path], Sequence[ProcessPlan]]


def plan_processes(run: RunConfig, server: ServerConfig, model: Path, directory: Path) -> list[ProcessPlan]:
    """The engine's processes; pipes lie in `directory`."""
    template = None if run.model.chat_template is None else Path(run.model.chat_template)
    tokenizers = [
        TokenizerSettings(model, directory, index, template, run.model.random_weights)
        for index in range(server.tokenizers)
    ]
    level = server.log_level
    return [
        ProcessPlan(
            "scheduler-0", "tokenmill.worker.main:run_scheduler", _scheduler(run, server, model, directory), level
        ),
        ProcessPlan(
            "detokenizer",
            "tokenmill.text.worker:run_detokenizer",
            DetokenizerSettings(model, directory, run.model.random_weights),
            level,
        ),
        *(
            ProcessPlan(f"tokenizer-{settings.index}", "tokenmill.text.worker:run_tokenizer", settings, level)
            for settings in tokenizers
        ),
    ]


def _scheduler(run: RunConfig, server: ServerConfig, model: Path, directory: Path) -> SchedulerSettings:
    return SchedulerSettings(run=run, model=model, directory=directory, log_level=server.log_level)


def serve(run: RunConfig, server: ServerConfig, planner: Planner = plan_processes) -> int:
    """Serve until a signal (returns 0) or until a process dies (returns 1). For a process's main thread.

    Raises:
        ConfigError: the address cannot be used, or a value cannot work.
        StartFailed: a process did not become ready.
        KeyboardInterrupt: a signal came before the server was ready.
    """
    began = time.monotonic()
    _check(server)
    log.configure("server", server.log_level)
    with bind(server.host, server.port) as listener, _terminate_as_interrupt(), private_directory() as directory:
        model = resolve_model(run.model.model, needs_weights=not run.model.random_weights)
        supervisor = Supervisor(server.start_timeout)
        try:
            ready = supervisor.start(planner(run, server, model.path, directory))
            running = _Running(server, server.served_model_name or model.name, listener, directory, ready, began)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(running.run(supervisor))
        finally:
            supervisor.stop(grace=1.0)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Early, so that a port in use is known before a model is loaded.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server((str(where[0]), port), family=family, backlog=2048)
    except socket.gaierror as error:
        raise ConfigError(f"--host {host} is not a usable address: {error.strerror}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use: stop the other server, or choose another one with --port"
            ) from None
        raise ConfigError(f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}") from None


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """A new directory for this run's sockets that only this user can open; removed on leaving.

    Raises:
        ConfigError: no place where a socket's path is short enough.
    """
    parent = tempfile.gettempdir()
    if len(os.path.join(parent, "tokenmill-12345678", LONGEST_PIPE)) > MAX_SOCKET_PATH:
        parent = "/tmp"
    try:
        directory = Path(tempfile.mkdtemp(prefix="tokenmill-", dir=parent))
    except OSError as error:
        raise ConfigError(
            f"cannot make a directory in {parent}: {error.strerror}: set TMPDIR to a short path"
        ) from None
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    # While processes start, SIGTERM must unwind like Ctrl-C, so that the directory and the children go too.
    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check(server: ServerConfig) -> None:
    for flag, value, least, most in (
        ("--port", server.port, 0, 65535),
        ("--tokenizers", server.tokenizers, 1, 64),
        ("--max-body-bytes", server.max_body_bytes, 1, 2**40),
        ("--start-timeout", server.start_timeout, 0.1, 1e6),
        ("--shutdown-grace", server.shutdown_grace, 0, 1e6),
    ):
        if not least <= value <= most:
            raise ConfigError(f"{flag} must be from {least:g} to {most:g}, not {value:g}")


class _HttpServer(uvicorn.Server):
    """uvicorn without signal handlers of its own, which tells when it is up."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass
class _Running:
    """The time between "all processes are ready" and the exit code."""

    server: ServerConfig
    name: str
    listener: socket.socket
    directory: Path
    ready: Mapping[str, Ready]
    began: float

    async def run(self, supervisor: Supervisor) -> int:
        """Serve; returns the exit code."""
        inbox = Inbox(self.directory)
        context: zmq.Context[Any] = zmq.Context()
        tokenizers = [
            PushChannel[ToTokenizer](context, address(self.directory, f"tokenizer-{index}"))
            for index in range(self.server.tokenizers)
        ]
        scheduler = PushChannel[ToScheduler](context, address(self.directory, "scheduler"))
        limits = self._limits()
        for tokenizer in tokenizers:
            tokenizer.send(limits)
        client = EngineClient(tokenizers, scheduler)
        try:
            return await self._supervise(client, inbox, supervisor)
        finally:
            for tokenizer in tokenizers:
                tokenizer.close()
            scheduler.close()
            context.term()
            inbox.close()

    async def _supervise(self, client: EngineClient, inbox: Inbox, supervisor: Supervisor) -> int:
        http = _HttpServer(self._http_config(client), self._say_ready)
        asked, insisted = self._signals()
        death = asyncio.create_task(supervisor.watch())
        pump = asyncio.create_task(client.pump(inbox))
        serving = asyncio.create_task(http.serve([self.listener]))
        stopping = asyncio.create_task(asked.wait())
        insisting = asyncio.create_task(insisted.wait())
        tasks = {death, pump, serving, stopping, insisting}
        try:
            await asyncio.wait(tasks - {insisting}, return_when=asyncio.FIRST_COMPLETED)
            http.should_exit = True
            farewell: TokenmillError = Overloaded("the server is shutting down")
            if stopping.done() and not death.done():
                if not client.is_idle:
                    grace = self.server.shutdown_grace
                    logger.info("stopping; running requests get %g s, another Ctrl-C ends them", grace)
                draining = asyncio.create_task(client.idle())
                tasks.add(draining)
                await asyncio.wait(
                    {draining, death, insisting},
                    timeout=self.server.shutdown_grace,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            if died := _death(asked.is_set(), death, pump, serving):
                logger.error("%s; the server ends", died.message)
                farewell = died
            client.fail(farewell)
            http.force_exit = insisting.done()
            await asyncio.wait({serving}, timeout=FAREWELL)
            return 1 if died else 0
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _limits(self) -> Limits:
        info = self.ready["scheduler-0"].info
        return Limits(max_model_len=info["max_model_len"], vocab_size=info["vocab_size"])

    def _http_config(self, client: EngineClient) -> uvicorn.Config:
        settings = AppSettings(
            model=self.name,
            max_model_len=self.ready["scheduler-0"].info["max_model_len"],
            max_body_bytes=self.server.max_body_bytes,
            sampling_defaults=self.ready["tokenizer-0"].info.get("sampling_defaults", {}),
        )
        return uvicorn.Config(
            create_app(client, settings),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
        )

    def _signals(self) -> tuple[asyncio.Event, asyncio.Event]:
        """Events for the first and for a further SIGINT or SIGTERM."""
        loop = asyncio.get_running_loop()
        asked, insisted = asyncio.Event(), asyncio.Event()

        def receive() -> None:
            (insisted if asked.is_set() else asked).set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, receive)
        return asked, insisted

    def _say_ready(self) -> None:
        host, port = self.listener.getsockname()[:2]
        where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        seconds = time.monotonic() - self.began
        version = metadata.version("tokenmill")
        try:
            print(f"tokenmill {version}: {self.name} ready at {where} in {seconds:.1f} s; Ctrl-C stops", flush=True)
        except OSError:  # nobody reads it; the interpreter flushes once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _death(is_asked: bool, death: asyncio.Task[Any], *inner: asyncio.Task[None]) -> TokenmillError | None:
    """Why the server cannot go on: a child ended, or a task of this process did."""
    if death.done():
        ended = death.result()
        if is_asked and ended.exit_code == -signal.SIGTERM:
            return None  # service managers send SIGTERM to the children too
        return WorkerDied(f"the {ended.name} process has ended: {ended.reason}")
    for task in inner:
        if task.done() and (error := task.exception()):
            logger.error("an internal error", exc_info=error)
            return WorkerDied("the server process failed")
    return None
