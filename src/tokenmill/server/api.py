"""One process's share of the HTTP API: its pipes to the engine, its client, its HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn
import uvloop
import zmq
from starlette.types import ASGIApp

from tokenmill.config import ServerConfig
from tokenmill.errors import TokenmillError
from tokenmill.procs import Report
from tokenmill.server.app import EdgeSettings, create_app
from tokenmill.server.client import EngineClient, Inbox
from tokenmill.server.connections import ConnectionLimits, LimitedConnection
from tokenmill.server.errors import EngineError
from tokenmill.server.keys import Keys
from tokenmill.server.routes import AppSettings
from tokenmill.text.dialect import Dialect
from tokenmill.wire.channel import PushChannel, address
from tokenmill.wire.messages import Farewell, Limits, ToServer

FAREWELL = 2.0  # seconds for last events to reach the clients

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ApiSettings:
    """What an API process is started with: one of `server.api_workers`, counted from 0 by `index`.

    `engine` is what the scheduler and the tokenizers told when they were ready. `listener` is this process's own.
    """

    server: ServerConfig
    keys: Keys
    name: str
    directory: Path
    engine: Mapping[str, Any]
    listener: socket.socket | None = None
    index: int = 0

    def make_app(self, client: EngineClient) -> ASGIApp:
        """The app over a client."""
        server = self.server
        pooling = self.engine.get("pooling", "last") if server.pooling == "auto" else server.pooling
        settings = AppSettings(
            model=self.name,
            max_model_len=self.engine["max_model_len"],
            has_priorities=self.engine["has_priorities"],
            max_body_bytes=server.max_body_bytes,
            sampling_defaults={**self.engine.get("sampling_defaults", {}), "pooling": pooling},
            dialect=self.engine.get("dialect", Dialect()),
            sse_keep_alive=server.sse_keep_alive,
            timings=server.timings,
        )
        return create_app(client, settings, EdgeSettings(self.keys, server.cors_origins))

    @contextlib.contextmanager
    def connect(self) -> Iterator[tuple[EngineClient, Inbox]]:
        """A client with its pipes, and the inbox of what must be delivered to it. Needs a running event loop."""
        server = self.server
        names = ["scheduler", *(f"tokenizer-{index}" for index in range(server.tokenizers))]
        numbers = [index for index in range(server.api_workers) if index != self.index]
        names += [f"server-{index}" for index in numbers]
        with contextlib.ExitStack() as stack:
            context = stack.enter_context(zmq.Context())
            inbox = stack.enter_context(contextlib.closing(Inbox(context, self.directory, self.index)))
            pipes = [PushChannel[Any](context, address(self.directory, name)) for name in names]
            scheduler, *others = [stack.enter_context(contextlib.closing(pipe)) for pipe in pipes]
            tokenizers = others[: server.tokenizers]
            siblings = dict(zip(numbers, others[server.tokenizers :], strict=True))
            for tokenizer in tokenizers:
                limits = {name: self.engine[name] for name in Limits.__struct_fields__ if name in self.engine}
                tokenizer.send(Limits(**limits))
            most = {name: self.engine[name] for name in ("max_waiting", "max_waiting_tokens")}
            yield EngineClient(tokenizers, scheduler, siblings, index=self.index, **most), inbox


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


class Api:
    """Answers requests until `end`."""

    def __init__(
        self, settings: ApiSettings, client: EngineClient, inbox: Inbox, on_started: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._client = client
        self._inbox = inbox
        self._http = _HttpServer(self._config(), on_started)
        self._farewell: TokenmillError | None = None
        self._grace = 0.0
        self._asked = asyncio.Event()

    def end(self, grace: float, error: TokenmillError) -> None:
        """Take no new requests; those that are open get `grace` seconds, and then this error. May be called again."""
        if self._farewell is None and grace and not self._client.idle.is_set():
            logger.info("stopping; running requests get %g s, another Ctrl-C ends them", grace)
        self._http.force_exit = self._farewell is not None
        self._farewell, self._grace = error, grace
        self._client.drain()
        self._asked.set()

    async def run(self) -> None:
        """Serve until `end` has been called, and all is done."""
        assert self._settings.listener is not None
        gc.collect()
        gc.freeze()  # what is loaded stays: collections beside streams need not look at it
        pump = asyncio.create_task(self._inbox.pump(self._deliver))
        serving = asyncio.create_task(self._http.serve([self._settings.listener]))
        tasks: set[asyncio.Task[Any]] = {pump, serving, asyncio.create_task(self._asked.wait())}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            while self._asked.is_set():  # anew for each call of `end`
                self._asked.clear()
                events = (self._asked, self._client.idle)
                waiting = {pump, serving, *(asyncio.create_task(event.wait()) for event in events)}
                tasks |= waiting
                await asyncio.wait(waiting, timeout=self._grace, return_when=asyncio.FIRST_COMPLETED)
            for task in (pump, serving):
                if task.done():
                    task.result()
            assert self._farewell is not None
            self._client.fail(self._farewell)
            self._http.should_exit = True
            await asyncio.wait({serving}, timeout=FAREWELL)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _deliver(self, message: ToServer) -> None:
        if isinstance(message, Farewell):
            self.end(message.grace, EngineError(message.error))
        else:
            self._client.deliver(message)

    def _config(self) -> uvicorn.Config:
        server = self._settings.server
        limits = ConnectionLimits(*(getattr(server, limit.name) for limit in fields(ConnectionLimits)))
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # what clients send wrongly is not our news
        return uvicorn.Config(
            self._settings.make_app(self._client),
            http=cast(Any, partial(LimitedConnection, limits)),
            ssl_certfile=server.tls_cert,
            ssl_keyfile=server.tls_key,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=cast(Any, server.keep_alive),  # a float does as well
        )


async def serve_api(settings: ApiSettings, on_started: Callable[[], None]) -> None:
    """Answer requests until a Farewell comes."""
    with settings.connect() as (client, inbox):
        await Api(settings, client, inbox, on_started).run()


def run_api(settings: ApiSettings, report: Report) -> None:
    """An API process: serve, report, and end after a Farewell."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_api(settings, report.ready))
