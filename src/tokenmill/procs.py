"""Child processes: started together, ready within a timeout or a reason why not, watched, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import multiprocessing
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, process, resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

from tokenmill import log
from tokenmill.errors import ConfigError, StartFailed, TokenmillError

USER_ERROR_EXIT = 2
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
MAX_SOCKET_PATH = 107
LONGEST_PIPE = "tokenizer-9999"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProcessPlan:
    """A process to be started.

    `target(settings, report)` runs in the child and must call `report.ready()`; a string "package.module:function" is
    imported there only, so that the parent need not load what it does not use. `settings` must be picklable.
    """

    name: str
    target: Callable[[Any, Report], None] | str
    settings: Any
    log_level: str = "info"


@dataclass(frozen=True)
class Ready:
    """A child's word that it can work, with what it tells about itself."""

    pid: int
    info: dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """How a child ended. `exit_code` is negative for a signal, as in `multiprocessing`."""

    name: str
    exit_code: int
    reason: str


class Report:
    """The child's line to its parent."""

    def __init__(self, pipe: connection.Connection) -> None:
        self._pipe = pipe

    def ready(self, **info: Any) -> None:
        """Tell the parent that this process can work; `info` must be picklable without tokenmill's heavy packages."""
        self.send(Ready(os.getpid(), info))

    def fail(self, reason: str) -> None:
        """End this process; for any thread."""
        self.send(reason)
        _exit(1)

    def send(self, message: Ready | str) -> None:
        """Tell the parent, unless it has gone; a string is why this process ends."""
        with contextlib.suppress(OSError):
            self._pipe.send(message)


@dataclass
class _Child:
    plan: ProcessPlan
    process: process.BaseProcess
    pipe: connection.Connection
    failure: str | None = None
    has_hung_up: bool = False
    is_watched: bool = True

    def receive(self) -> Ready | None:
        """The child's Ready if it has come; keeps the reason of a failure for `ended`."""
        try:
            while self.pipe.poll():
                message = self.pipe.recv()
                if isinstance(message, Ready):
                    return message
                self.failure = message
        except (EOFError, OSError):
            self.has_hung_up = True
        return None

    def ended(self) -> Ended:
        """How the child ended; waits for the end, which must be near."""
        self.receive()
        self.process.join(2.0)
        code = self.process.exitcode
        reason = self.failure or _describe_exit(code)
        return Ended(self.plan.name, -signal.SIGKILL if code is None else code, reason)


class Supervisor:
    """Starts children and knows when one ends. Not safe for use from several threads.

    Linux kills a child when the thread that started it ends: call `start` from a thread that outlives the children.
    """

    def __init__(self, start_timeout: float) -> None:
        self._start_timeout = start_timeout
        self._context = multiprocessing.get_context("spawn")
        self._children: list[_Child] = []

    def start(self, plans: Sequence[ProcessPlan], meanwhile: Callable[[], object] = lambda: None) -> dict[str, Ready]:
        """Spawn all at once, call `meanwhile`, and wait until every one is ready. May be called again for more.

        Raises StartFailed: one failed, died or took longer than the timeout (seconds); all are stopped by then.
        """
        try:
            children = []
            for plan in plans:
                children.append(self._spawn(plan))
                self._children.append(children[-1])
            meanwhile()
            return self._wait_ready(children)
        except BaseException:
            self.stop(grace=1.0)
            raise

    async def watch(self) -> Ended:
        """Wait until any child ends of those that have not been told of."""
        loop = asyncio.get_running_loop()
        first: asyncio.Future[_Child] = loop.create_future()

        def end(child: _Child) -> None:
            loop.remove_reader(child.process.sentinel)
            if not first.done():
                child.is_watched = False
                first.set_result(child)

        watched = [child for child in self._children if child.is_watched]
        for child in watched:
            loop.add_reader(child.process.sentinel, end, child)
        try:
            return (await first).ended()
        finally:
            for child in watched:
                loop.remove_reader(child.process.sentinel)

    def find_ended(self, timeout: float) -> Ended | None:
        """A child that has ended, or does within `timeout` seconds."""
        found = connection.wait([child.process.sentinel for child in self._children], timeout)
        return next((child.ended() for child in self._children if child.process.sentinel in found), None)

    def stop(self, grace: float) -> None:
        """SIGTERM to all, SIGKILL after `grace` seconds to those that remain; returns when none is left."""
        children, self._children = self._children, []
        for child in children:
            child.process.terminate()
        deadline = time.monotonic() + grace
        for child in children:
            child.process.join(max(0.0, deadline - time.monotonic()))
            if child.process.exitcode is None:
                child.process.kill()
                child.process.join()
            child.pipe.close()
            child.process.close()

    def _spawn(self, plan: ProcessPlan) -> _Child:
        receiver, sender = self._context.Pipe(duplex=False)
        child = self._context.Process(target=_run_child, args=(plan, sender, os.getpid()), name=plan.name, daemon=True)
        with _interrupt_blocked():
            child.start()
        sender.close()
        return _Child(plan, child, receiver)

    def _wait_ready(self, children: Sequence[_Child]) -> dict[str, Ready]:
        ready: dict[str, Ready] = {}
        deadline = time.monotonic() + self._start_timeout
        while waiting := [child for child in children if child.plan.name not in ready]:
            handles = [handle for child in waiting for handle in (child.pipe, child.process.sentinel)]
            if not connection.wait(handles, max(0.0, deadline - time.monotonic())):
                names = ", ".join(child.plan.name for child in waiting)
                raise StartFailed(
                    f"{names} not ready within {self._start_timeout:g} s: see the log above, or raise --start-timeout"
                )
            for child in waiting:
                if message := child.receive():
                    ready[child.plan.name] = message
                elif child.failure or child.has_hung_up or connection.wait([child.process.sentinel], 0):
                    ended = child.ended()
                    raise StartFailed(f"{ended.name} could not start: {ended.reason}")
        return {child.plan.name: ready[child.plan.name] for child in children}


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "it no longer answers"
    if code >= 0:
        return f"it ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"killed by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """A new directory for this run's sockets that only this user can open; removed on leaving.

    Raises ConfigError: no place where a socket's path is short enough.
    """
    parent = tempfile.gettempdir()
    if len(os.path.join(parent, "tokenmill-12345678", LONGEST_PIPE)) > MAX_SOCKET_PATH:
        parent = "/tmp"
    try:
        directory = tempfile.TemporaryDirectory(prefix="tokenmill-", dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        advice = "set TMPDIR to a short path"
        raise ConfigError(f"cannot make a directory in {parent}: {error.strerror}: {advice}") from None
    with directory as path:
        yield Path(path)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block: for work that must not be cut in half.

    A second one strikes at once, for a device that hangs.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    held: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            raise KeyboardInterrupt
        held.append(number)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if held:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _interrupt_blocked() -> Iterator[None]:
    # A child inherits the mask, so a Ctrl-C before it can ignore SIGINT does not end it with a traceback.
    # The resource tracker unblocks SIGINT when it starts: let it start before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_child(plan: ProcessPlan, pipe: connection.Connection, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    end_with_parent(plan.name, parent)
    log.configure(plan.name, plan.log_level)
    report = Report(pipe)
    try:
        target = pkgutil.resolve_name(plan.target) if isinstance(plan.target, str) else plan.target
        target(plan.settings, report)
    except TokenmillError as error:
        report.send(error.message)
        _exit(USER_ERROR_EXIT)
    except Exception as error:
        logger.exception("ended by an error")
        report.send(f"{type(error).__name__}: {error}")
        _exit(1)


def start_helper(module: str) -> tuple[connection.Connection, subprocess.Popen[bytes]]:
    """Start `module` as a program, in a session of its own: out of reach of Ctrl-C, with all it starts a group to kill.

    Linux ends it when the thread that calls this ends. Its end of the pipe is what `helper_pipe` gives there.
    """
    ours, theirs = multiprocessing.Pipe()
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    with theirs:
        program = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
            env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if logger.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    return ours, program


def helper_pipe(name: str) -> connection.Connection:
    """The pipe of a program that `start_helper` started, which from now on ends with its parent."""
    descriptor, parent = map(int, sys.argv[1:])
    end_with_parent(name, parent)
    return connection.Connection(descriptor)


def end_with_parent(name: str, parent: int) -> None:
    """End this process when its parent ends, also by SIGKILL: by the kernel on Linux, by a waiting thread elsewhere."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_NAME, f"tm-{name}".encode()[:15])
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:
            os._exit(1)
    threading.Thread(target=_exit_after_parent, name="parent-watch", daemon=True).start()


def _exit_after_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _exit(code: int) -> None:
    # Not sys.exit: open sockets or threads of a failed process could keep the interpreter from ending.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
