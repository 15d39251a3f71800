"""`serve`: bind, start the processes, answer requests, and end everything together."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from tokenmill import log
from tokenmill.config import RunConfig, ServerConfig, check_range, check_vocabulary
from tokenmill.errors import ConfigError
from tokenmill.hub import resolve_model
from tokenmill.parallel.place import meeting_place, ranks_here
from tokenmill.procs import ProcessPlan, Supervisor, private_directory
from tokenmill.sched.policy_file import load_policy
from tokenmill.server.keys import read_keys
from tokenmill.text.settings import TextSettings
from tokenmill.worker.settings import plan_ranks

logger = logging.getLogger(__name__)

MUCH = 10**6
RANGES: Mapping[str, tuple[float, float]] = {
    "port": (0, 65535),
    "tokenizers": (1, 64),
    "api_workers": (1, 64),
    "max_body_bytes": (1, 2**40),
    "max_header_bytes": (256, 2**24),
    "max_headers": (1, MUCH),
    "start_timeout": (0.1, MUCH),
    "shutdown_grace": (0, MUCH),
    "sse_keep_alive": (0, MUCH),
    **dict.fromkeys(("head_timeout", "body_timeout", "send_timeout", "keep_alive"), (0.001, MUCH)),
}

Planner = Callable[[RunConfig, ServerConfig, Path, Path], Sequence[ProcessPlan]]


def plan_processes(run: RunConfig, server: ServerConfig, model: Path, directory: Path) -> list[ProcessPlan]:
    """The engine's processes; pipes lie in `directory`."""
    template = None if run.model.chat_template is None else Path(run.model.chat_template)

    def text(name: str, target: str) -> ProcessPlan:
        parsers = server.tool_parser, server.reasoning_parser
        is_random, number = run.model.random_weights, server.api_workers
        settings = TextSettings(model, directory, name, template, is_random, *parsers, api_workers=number)
        return ProcessPlan(name, f"tokenmill.text.worker:{target}", settings, server.log_level)

    if run.engine.node_rank:
        raise ConfigError("--node-rank above 0 is for tokenmill serve")
    ranks = plan_ranks(run, model, directory, server.start_timeout, server.log_level, server.api_workers)
    return [
        *ranks,
        text("detokenizer", "run_detokenizer"),
        *(text(f"tokenizer-{index}", "run_tokenizer") for index in range(server.tokenizers)),
    ]


def plan_host(run: RunConfig, server: ServerConfig, model: Path, directory: Path) -> list[ProcessPlan]:
    """The processes of a host that has ranks only."""
    return plan_ranks(run, model, directory, server.start_timeout, server.log_level)


def serve(run: RunConfig, server: ServerConfig, planner: Planner = plan_processes) -> int:
    """Serve until a signal (returns 0) or until a process dies (returns 1). For a process's main thread.

    Raises ConfigError: the address cannot be used, or a value cannot work; StartFailed: a process did not become ready;
    KeyboardInterrupt: a signal came before the server was ready.
    """
    began = time.monotonic()
    for name, (least, most) in RANGES.items():
        check_range(f"--{name.replace('_', '-')}", getattr(server, name), least, most)
    if meeting_place(run.engine) is not None and run.engine.node_rank > 0:
        return serve_ranks(run, server)
    keys = read_keys(server.api_key, server.api_key_file)
    check_tls(server.tls_cert, server.tls_key)
    log.configure("server", server.log_level)
    with contextlib.ExitStack() as stack:
        listeners = listen(server.host, server.port, server.api_workers)
        for listener in listeners:
            stack.enter_context(listener)
        engine = stack.enter_context(started(run, server, planner, "tokenmill.server.running"))
        from tokenmill.server.api import ApiSettings
        from tokenmill.server.running import Running

        name = server.served_model_name or run.model.model
        settings = ApiSettings(server, keys, name, engine.directory, engine.info)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(Running(settings, listeners, began).run(engine.supervisor))


def serve_ranks(run: RunConfig, server: ServerConfig) -> int:
    """The ranks of a host that answers no HTTP, until a signal (returns 0) or until one ends (returns 1).

    Raises as `serve`.
    """
    log.configure("server", server.log_level)

    async def watch(supervisor: Supervisor) -> int:
        asked, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, asked.set)
        waits = asyncio.create_task(asked.wait()), asyncio.create_task(supervisor.watch())
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        died = waits[1].result() if waits[1].done() and not asked.is_set() else None
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        if died is not None:
            logger.error("the %s process has ended: %s; this host's ranks end", died.name, died.reason)
        return 0 if died is None else 1

    with started(run, server, plan_host, "uvloop") as engine:
        ranks = ranks_here(run.engine)
        print(f"tokenmill: ranks {ranks.start} to {ranks.stop - 1} of {run.engine.tp} ready; Ctrl-C stops", flush=True)
        return asyncio.run(watch(engine.supervisor))


@dataclass(frozen=True)
class Started:
    """The engine's processes, ready: their supervisor, where their pipes lie, and what they told."""

    supervisor: Supervisor
    directory: Path
    info: Mapping[str, Any]


@contextlib.contextmanager
def started(run: RunConfig, server: ServerConfig, planner: Planner, meanwhile: str) -> Iterator[Started]:
    """The engine's processes, ended on leaving; the module `meanwhile` is imported while they start.

    Raises as `serve`.
    """
    meeting_place(run.engine)
    load_policy(run.scheduler.policy)  # the scheduler does it too, seconds later
    with _terminate_as_interrupt(), private_directory() as directory:
        model = resolve_model(run.model.model, needs_weights=not run.model.random_weights)
        supervisor = Supervisor(server.start_timeout)
        try:
            plans = planner(run, server, model, directory)
            ready = supervisor.start(plans, meanwhile=partial(importlib.import_module, meanwhile))
            info = {key: fact for its in reversed(ready.values()) for key, fact in its.info.items()}
            check_vocabulary(info.get("num_own_tokens", 0), info["vocab_size"])
            yield Started(supervisor, directory, info)
        finally:
            supervisor.stop(grace=1.0)


def listen(host: str, port: int, number: int = 1) -> list[socket.socket]:
    """Listening sockets with one address. Early, so that a port in use is known before a model is loaded.

    The kernel shares connections out among them. Raises ConfigError: the address cannot be used.
    """
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        create = partial(socket.create_server, family=family, backlog=2048)
        first = create((str(where[0]), port))
        if number == 1:
            return [first]
        with first:  # alone, it finds out whether the port is free: those that share one would join another server's
            port = first.getsockname()[1]
        return [create((str(where[0]), port), reuse_port=True) for _ in range(number)]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host} is not a usable address: {error.strerror}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use: stop the other server, or choose another one with --port"
            ) from None
        raise ConfigError(f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}") from None
    except ValueError as error:
        raise ConfigError(f"--api-workers {number} cannot be: {error}; use 1 here") from None


def check_tls(cert: str | None, key: str | None) -> None:
    """Raises ConfigError unless HTTPS can be served with these files, or there are none."""
    if cert is None:
        if key is not None:
            raise ConfigError("--tls-key needs --tls-cert: give both, or neither to serve plain HTTP")
        return
    for flag, path in (("--tls-cert", cert), ("--tls-key", key)):
        try:
            if path is not None:
                Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or "the key is encrypted, or no key"
        raise ConfigError(
            f"--tls-cert {cert} and --tls-key {key or cert} cannot be used ({reason}): "
            "give a certificate chain and its own key, both in PEM and without a password"
        ) from None


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    # While processes start, SIGTERM must unwind like Ctrl-C, so that the directory and the children go too.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
