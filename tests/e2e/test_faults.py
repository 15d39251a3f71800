"""Processes that die or hang, and signals: clients are told, and nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.server import PATIENCE, ROOT, Server, serving

pytestmark = pytest.mark.server
ENDLESS = {"prompt": "Once", "max_tokens": 30_000, "ignore_eos": True}


@contextlib.contextmanager
def streaming(server: Server) -> Iterator[Iterator[Any]]:
    """The events of a stream that has begun and does not end by itself."""
    with server.stream("/v1/completions", **ENDLESS) as response:
        lines = response.iter_lines()
        events = (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {"))
        assert "choices" in next(events)
        yield events


def error_at_the_end(events: Iterator[Any]) -> str:
    *_, last = events
    message: str = last["error"]["message"]
    return message


@pytest.mark.parametrize("victim", ["scheduler-0", "detokenizer", "tokenizer-0", "tokenizer-1"])
def test_a_killed_process_ends_everything_but_other_servers(tiny: Path, server: Server, victim: str) -> None:
    with serving(tiny, "--tokenizers", "2") as doomed:
        with streaming(doomed) as events:
            doomed.children[f"tm-{victim}"].kill()
            message = error_at_the_end(events)
        assert message == f"the {victim} process has ended: killed by SIGKILL (out of memory?)"
        assert doomed.end() == 1
        assert message in doomed.log
        assert "Traceback" not in doomed.log
    assert server.complete("Once", max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3


def test_a_killed_server_takes_its_processes_along(tiny: Path) -> None:
    with serving(tiny, "--tokenizers", "2") as server, streaming(server):
        assert len(server.children) >= 4
        server.process.kill()
        server.process.wait(PATIENCE)
        server.assert_no_process()


def test_a_scheduler_that_hangs_is_seen_and_ended(tiny: Path) -> None:
    with serving(tiny, "--shutdown-grace", "0") as server, streaming(server) as events:
        scheduler = server.children["tm-scheduler-0"]
        scheduler.suspend()
        response = server.get("/health")
        assert response.status_code == 503
        assert "scheduler" in response.json()["error"]["message"]
        assert "retry-after" in response.headers
        scheduler.resume()
        assert server.pulse()["running"] == 1
        scheduler.suspend()
        server.process.send_signal(signal.SIGTERM)
        assert error_at_the_end(events) == "the server is shutting down"
        assert server.end() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_ends_streams_after_the_grace(tiny: Path, number: int) -> None:
    with serving(tiny, "--shutdown-grace", "0.1") as server, streaming(server) as events:
        os.killpg(server.pid, number)  # as terminals and service managers do it: to the children too
        assert error_at_the_end(events) == "the server is shutting down"
        assert server.end() == 0
        assert "Traceback" not in server.log


def test_a_second_signal_does_not_wait_for_streams(tiny: Path) -> None:
    with serving(tiny, "--shutdown-grace", "1000") as server, streaming(server) as events:
        server.process.send_signal(signal.SIGINT)
        server.process.send_signal(signal.SIGTERM)
        assert error_at_the_end(events) == "the server is shutting down"
        assert server.end() == 0
        assert "Traceback" not in server.log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_processes_start(tiny: Path, tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-m", "tokenmill", "serve", str(tiny), "--port", "0"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        parent = psutil.Process(process.pid)
        while not any(child.name().startswith("tm-") for child in parent.children()):
            assert process.poll() is None
        children = parent.children(recursive=True)
        process.send_signal(number)
        assert process.communicate(timeout=PATIENCE) == ("", "")
    assert process.returncode == 130
    assert psutil.wait_procs(children, timeout=PATIENCE)[1] == []
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("tokenmill-")] == []
