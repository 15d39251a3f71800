"""A process that compiles the model's kernels beside what else a start does. Free of torch, whose import it overlaps.

It takes the rehearsal through a pipe, tells when the kernels of a first request are in Triton's cache folder, compiles
the others while requests are served, and ends. A mark in the folder lets later starts do without; kernels are then read
at first use. What is missing, for whatever reason, is compiled at first use.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.config import RunConfig
from tokenmill.procs import helper_pipe, start_helper

if TYPE_CHECKING:
    from tokenmill.engine.compiler import Rehearsal

GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
GPU_FACTS = "/proc/driver/nvidia/gpus"
PACKAGE = Path(__file__).parents[1]

log = logging.getLogger(__name__)


class WarmUp:
    """Starts the process, unless it is not wanted, there is no GPU, or its work was done by a start before.

    Then `begin` or `cancel` it. Linux ends the process when the thread that made this ends.
    """

    def __init__(self, run: RunConfig, model: Path, *, is_wanted: bool = True) -> None:
        self._first, self._all = threading.Event(), threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_cancelled = False
        triton = find_spec("triton")
        if not is_wanted or run.engine.device == "cpu" or triton is None or not any(map(os.path.exists, GPU_DRIVERS)):
            return
        try:
            self._mark = _mark(run, model, os.stat(str(triton.origin)))
            if not self._mark.exists():
                self._pipe, self._process = start_helper(__name__)
        except OSError as error:
            _tell(str(error))

    def begin(self, rehearsal: Rehearsal) -> None:
        """Have it compile what these steps launch."""
        if self._process is not None:
            with suppress(OSError):  # it has ended: told by the thread
                self._pipe.send(rehearsal)
            threading.Thread(target=self._follow, args=(self._process,), name="warm-up", daemon=True).start()

    def wait(self, *, for_all: bool) -> None:
        """Until a first request can be served, or for all kernels, the others of which go on being compiled."""
        if self._process is not None:
            (self._all if for_all else self._first).wait()

    def is_done(self) -> bool:
        """Whether kernels are compiled; until then a graph's kernels would keep its capture waiting."""
        return self._process is None or self._all.is_set()

    def cancel(self) -> None:
        """End the process and all that it started, if they still run."""
        process = self._process
        if process is not None and process.poll() is None:
            self._is_cancelled = True
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._first.set()
        self._all.set()

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        told = ""
        with suppress(EOFError, OSError):
            while True:
                told = self._pipe.recv()
                self._first.set()
        code = process.wait()
        if code == 0:
            log.info(told)
            with suppress(OSError):
                self._mark.parent.mkdir(parents=True, exist_ok=True)
                self._mark.touch()
        elif not self._is_cancelled:
            _tell(told or f"the compiling process ended with exit code {code}")
        self._first.set()
        self._all.set()


def _tell(reason: str) -> None:
    log.warning("kernels are compiled at first use, not ahead: %s", reason)


def _mark(run: RunConfig, model: Path, triton: os.stat_result) -> Path:
    """Where the mark is for all that decides which kernels there are: the package, the GPUs, the model and Triton."""
    config = model / "config.json"
    files = *sorted(PACKAGE.rglob("*.py")), *sorted(Path(GPU_FACTS).glob("*/information")), config
    facts = [file.read_bytes() for file in files if file.is_file()]
    name = None if config.is_file() else model
    facts.append(repr((name, run.engine, run.scheduler, run.model.dtype, triton.st_mtime_ns, sys.version)).encode())
    root = os.environ.get("TRITON_CACHE_DIR") or Path(os.environ.get("TRITON_HOME") or Path.home(), ".triton", "cache")
    return Path(root, hashlib.sha256(b"\0".join(facts)).hexdigest(), "compiled")


def main() -> None:
    """The process: imports all that compiling needs, then takes its rehearsal; arguments are pipe and parent."""
    pipe = helper_pipe("compiler")
    try:
        from tokenmill.engine.compiler import serve_rehearsal

        serve_rehearsal(pipe)
    except Exception as error:
        log.exception("kernels cannot be compiled ahead")
        with suppress(OSError):
            pipe.send(f"{type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
