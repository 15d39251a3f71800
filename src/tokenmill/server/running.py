"""The time between "all processes are ready" and the exit code. FastAPI is large: imported while they start."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from tokenmill.errors import Overloaded, TokenmillError, WorkerDied
from tokenmill.procs import ProcessPlan, Supervisor
from tokenmill.server.api import FAREWELL, Api, ApiSettings, run_api
from tokenmill.version import __version__
from tokenmill.wire.channel import PushChannel, address
from tokenmill.wire.messages import Farewell, error_info

logger = logging.getLogger(__name__)

End = Callable[[float, TokenmillError], None]


@dataclass
class Running:
    """Answers requests until a signal or until a process dies; in this process, or in several others."""

    settings: ApiSettings
    listeners: Sequence[socket.socket]
    began: float

    def __post_init__(self) -> None:
        self._address = self.listeners[0].getsockname()[:2]

    async def run(self, supervisor: Supervisor) -> int:
        """Serve; returns the exit code."""
        if len(self.listeners) == 1:
            settings = dataclasses.replace(self.settings, listener=self.listeners[0])
            with settings.connect() as (client, inbox):
                api = Api(settings, client, inbox, self._say_ready)
                return await self._watch(supervisor, api.end, asyncio.create_task(api.run()), ())
        count = range(len(self.listeners))
        plans = [
            ProcessPlan(
                f"api-{index}",
                run_api,
                dataclasses.replace(self.settings, listener=self.listeners[index], index=index),
                self.settings.server.log_level,
            )
            for index in count
        ]
        supervisor.start(plans)
        for listener in self.listeners:
            listener.close()  # a copy that stayed open here would go on taking connections
        with contextlib.ExitStack() as stack:
            context = stack.enter_context(zmq.Context())
            addresses = [address(self.settings.directory, f"server-{index}") for index in count]
            pipes = [stack.enter_context(contextlib.closing(PushChannel[Any](context, where))) for where in addresses]

            def end(grace: float, error: TokenmillError) -> None:
                for pipe in pipes:
                    pipe.send(Farewell(grace, error_info(error)))

            self._say_ready()
            ended = asyncio.create_task(asyncio.Event().wait())
            return await self._watch(supervisor, end, ended, [plan.name for plan in plans])

    async def _watch(self, supervisor: Supervisor, end: End, serving: asyncio.Task[Any], names: Sequence[str]) -> int:
        """Have the API end, once something asks for it; `serving` is its task here, or `names` its processes."""
        signals: asyncio.Queue[int] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, signals.put_nowait, number)
        asked, death = asyncio.create_task(signals.get()), asyncio.create_task(supervisor.watch())
        farewell: TokenmillError = Overloaded("the server is shutting down")
        left, is_asked, died = set(names), False, False
        timeout: float | None = None
        try:
            while not serving.done() and (left or not names):
                tasks = {asked, death, serving}
                done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                grace = 0.0
                if asked in done:
                    grace, is_asked = 0.0 if is_asked else self.settings.server.shutdown_grace, True
                    asked = asyncio.create_task(signals.get())
                elif death in done:
                    ended = death.result()
                    death = asyncio.create_task(supervisor.watch())
                    left.discard(ended.name)
                    if is_asked and ended.name in names and ended.exit_code == 0:
                        continue
                    # Service managers send SIGTERM to the children too.
                    if not died and not (is_asked and ended.exit_code == -signal.SIGTERM):
                        died, farewell = True, WorkerDied(f"the {ended.name} process has ended: {ended.reason}")
                        logger.error("%s; the server ends", farewell.message)
                else:
                    break
                end(grace, farewell)
                timeout = grace + FAREWELL + 1.0
            if serving.done() and (error := serving.exception()):
                logger.error("the server process failed; the server ends", exc_info=error)
                return 1
            return 1 if died else 0
        finally:
            for task in (asked, death, serving):
                task.cancel()
            await asyncio.gather(asked, death, serving, return_exceptions=True)

    def _say_ready(self) -> None:
        server = self.settings.server
        host, port = self._address
        scheme = "http" if server.tls_cert is None else "https"
        where = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        seconds, name = time.monotonic() - self.began, self.settings.name
        try:
            print(f"tokenmill {__version__}: {name} ready at {where} in {seconds:.1f} s; Ctrl-C stops", flush=True)
        except OSError:  # nobody reads it; the interpreter flushes once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
