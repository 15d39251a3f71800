"""The time between "all processes are ready" and the exit code. FastAPI is large: imported while they start."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn
import zmq

from tokenmill.config import ServerConfig
from tokenmill.errors import Overloaded, TokenmillError, WorkerDied
from tokenmill.procs import Ready, Supervisor
from tokenmill.server.app import create_app
from tokenmill.server.client import EngineClient, Inbox
from tokenmill.server.connections import ConnectionLimits, LimitedConnection
from tokenmill.server.edges import EdgeSettings
from tokenmill.server.keys import Keys
from tokenmill.server.settings import AppSettings
from tokenmill.text.dialect import Dialect
from tokenmill.version import __version__
from tokenmill.wire.channel import PushChannel, address
from tokenmill.wire.messages import Limits

FAREWELL = 2.0  # seconds for last events to reach the clients

logger = logging.getLogger(__name__)


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
class Running:
    """Answers requests until a signal or until a process dies."""

    server: ServerConfig
    keys: Keys
    name: str
    listener: socket.socket
    directory: Path
    ready: Mapping[str, Ready]
    began: float

    async def run(self, supervisor: Supervisor) -> int:
        """Serve; returns the exit code."""
        names = ("scheduler", *(f"tokenizer-{index}" for index in range(self.server.tokenizers)))
        with contextlib.ExitStack() as stack:
            inbox = stack.enter_context(contextlib.closing(Inbox(self.directory)))
            context = stack.enter_context(zmq.Context())
            pipes = [PushChannel[Any](context, address(self.directory, name)) for name in names]
            scheduler, *tokenizers = [stack.enter_context(contextlib.closing(pipe)) for pipe in pipes]
            info = self.ready["scheduler-0"].info
            for tokenizer in tokenizers:
                tokenizer.send(Limits(max_model_len=info["max_model_len"], vocab_size=info["vocab_size"]))
            limits = {name: info[name] for name in ("max_waiting", "max_waiting_tokens")}
            return await self._supervise(EngineClient(tokenizers, scheduler, **limits), inbox, supervisor)

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
            client.drain()
            farewell: TokenmillError = Overloaded("the server is shutting down")
            if stopping.done() and not death.done():
                if not client.idle.is_set():
                    grace = self.server.shutdown_grace
                    logger.info("stopping; running requests get %g s, another Ctrl-C ends them", grace)
                draining = asyncio.create_task(client.idle.wait())
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
            http.should_exit = True
            http.force_exit = insisting.done()
            await asyncio.wait({serving}, timeout=FAREWELL)
            return 1 if died else 0
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _http_config(self, client: EngineClient) -> uvicorn.Config:
        info, text = self.ready["scheduler-0"].info, self.ready["tokenizer-0"].info
        settings = AppSettings(
            model=self.name,
            max_model_len=info["max_model_len"],
            has_priorities=info["has_priorities"],
            max_body_bytes=self.server.max_body_bytes,
            sampling_defaults=text.get("sampling_defaults", {}),
            dialect=text.get("dialect", Dialect()),
            sse_keep_alive=self.server.sse_keep_alive,
            timings=self.server.timings,
        )
        limits = ConnectionLimits(*(getattr(self.server, limit.name) for limit in fields(ConnectionLimits)))
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # what clients send wrongly is not our news
        return uvicorn.Config(
            create_app(client, settings, EdgeSettings(self.keys, self.server.cors_origins)),
            http=cast(Any, partial(LimitedConnection, limits)),
            ssl_certfile=self.server.tls_cert,
            ssl_keyfile=self.server.tls_key,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=cast(Any, self.server.keep_alive),  # a float does as well
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
        scheme = "http" if self.server.tls_cert is None else "https"
        where = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        seconds = time.monotonic() - self.began
        try:
            print(f"tokenmill {__version__}: {self.name} ready at {where} in {seconds:.1f} s; Ctrl-C stops", flush=True)
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
