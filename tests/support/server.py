"""Starts a server as a user would, and holds it to leaving nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

ROOT = Path(__file__).parents[2]
PATIENCE = 10  # seconds for an end that must come
T = TypeVar("T")
SERVE = ("tokenmill", "serve")


def settled(read: Callable[[], T], is_settled: Callable[[T], bool]) -> T:
    """What `read` gives once that is settled, or after PATIENCE."""
    deadline = time.monotonic() + PATIENCE
    while not is_settled(value := read()) and time.monotonic() < deadline:
        pass
    return value


class Server:
    """A running server. `children` are its processes by the names that they give themselves."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self._log, self._sockets = folder / "log", folder / "t"
        self._sockets.mkdir()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(self._sockets)},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        found = re.search(r"https?://[^\s;]+", self.line)
        self.base = found[0] if found else ""
        self.pid = self.process.pid
        parent = psutil.Process(self.pid)
        self._all_children = parent.children(recursive=True)
        self.children = {child.name(): child for child in self._all_children}
        self._client = httpx.Client(base_url=self.base, timeout=60)

    @property
    def port(self) -> int:
        return int(self.base.rpartition(":")[2])

    @property
    def log(self) -> str:
        """What the server has written to stderr."""
        return self._log.read_text()

    def get(self, path: str) -> httpx.Response:
        return self._client.get(path)

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self._client.post(path, json=fields)

    def stream(self, path: str, **fields: Any) -> contextlib.AbstractContextManager[httpx.Response]:
        return self._client.stream("POST", path, json={**fields, "stream": True})

    def complete(self, prompt: Any, **fields: Any) -> Mapping[str, Any]:
        """The answer to a completion that must succeed."""
        response = self.post("/v1/completions", prompt=prompt, **fields)
        assert response.status_code == 200, response.text
        return response.json()

    def pulse(self) -> Mapping[str, Any]:
        """What /health tells of the scheduler."""
        response = self.get("/health")
        assert response.status_code == 200, response.text
        return response.json()

    def end(self, signal: int | None = None) -> int:
        """The exit code, after a signal or by itself; asserts that no process and no socket is left."""
        if signal is not None:
            self.process.send_signal(signal)
        code = self.process.wait(PATIENCE)
        self.assert_no_process()
        assert list(self._sockets.iterdir()) == []
        return code

    def assert_no_process(self) -> None:
        """Wait until all have ended."""
        _, alive = psutil.wait_procs(self._all_children, timeout=PATIENCE)
        assert not alive, alive

    def close(self) -> None:
        """End by force what is left."""
        self._client.close()
        for process in (self.process, *self._all_children):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.communicate()


@contextlib.contextmanager
def serving(model: Path | str, *flags: str, program: tuple[str, ...] = SERVE) -> Iterator[Server]:
    """A server on a free port, once it is ready. Its log is printed at the end, for pytest to show on failure."""
    with tempfile.TemporaryDirectory(prefix="tm-") as folder:
        server = Server(Path(folder), [sys.executable, "-m", *program, str(model), "--port", "0", *flags])
        try:
            assert server.base, server.log
            yield server
        finally:
            print(server.log)
            server.close()
