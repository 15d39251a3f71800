"""The server with real processes and sockets, and fake work in them: start, death, shutdown, what is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tokenmill.errors import ConfigError
from tokenmill.server.launch import bind, private_directory

pytestmark = pytest.mark.server
ROOT = Path(__file__).parents[2]


class Running:
    """A server process that tells its address."""

    def __init__(self, model: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "tests.server.serve_fakes", str(model), "--port", "0", *flags]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        found = re.search(r"http://\S+", self.line)
        assert found, self.process.communicate()
        self.base = found[0].rstrip(";")
        self.children = {child.name(): child for child in psutil.Process(self.process.pid).children(recursive=True)}

    def end(self) -> tuple[int, str]:
        """Exit code and stderr; asserts that nothing is left."""
        _, errors = self.process.communicate(timeout=30)
        _, alive = psutil.wait_procs(self.children.values(), timeout=10)
        assert not alive, alive
        return self.process.returncode, errors

    def close(self) -> None:
        for process in (self.process, *self.children.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.communicate()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "fake.gguf"
    path.write_bytes(b"GGUF")
    return path


@pytest.fixture
def server(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    sockets = tmp_path / "t"
    sockets.mkdir()
    monkeypatch.setenv("TMPDIR", str(sockets))
    running = Running(model, "--tokenizers", "2", "--shutdown-grace", "0.2")
    yield running
    running.close()
    assert list(sockets.iterdir()) == []


def complete(server: Running, prompt: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.base}/v1/completions", json={"prompt": prompt} | fields, timeout=30)


def data_of(lines: Iterator[str]) -> Iterator[Any]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def test_answers_health_and_a_clean_end(server: Running) -> None:
    assert re.fullmatch(r"tokenmill \S+: .* ready at http://127\.0\.0\.1:\d+ in \d+\.\d s; Ctrl-C stops\n", server.line)
    assert complete(server, "abc", max_tokens=4).json()["choices"][0]["text"] == "abca"
    assert httpx.get(f"{server.base}/health").json()["status"] == "ok"
    assert httpx.get(f"{server.base}/v1/models").json()["data"][0]["max_model_len"] == 1000
    memory = psutil.Process(server.process.pid).memory_info().rss
    assert memory < 150 * 2**20
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == (0, "")


@pytest.mark.parametrize("victim", ["tm-scheduler-0", "tm-detokenizer", "tm-tokenizer-1"])
def test_a_killed_process_ends_streams_with_an_error_and_the_server_with_1(server: Running, victim: str) -> None:
    url, body = f"{server.base}/v1/completions", {"prompt": "STUCK", "stream": True}
    with httpx.stream("POST", url, json=body, timeout=30) as response:
        events = data_of(response.iter_lines())
        assert next(events)["choices"][0]["text"] == "S"
        server.children[victim].kill()
        message = next(events)["error"]["message"]
        assert message == f"the {victim.removeprefix('tm-')} process has ended: killed by SIGKILL (out of memory?)"
        assert list(events) == []
    code, errors = server.end()
    assert code == 1
    assert message in errors
    assert "Traceback" not in errors


def test_shutdown_waits_then_ends_streams_with_an_error(server: Running) -> None:
    url, body = f"{server.base}/v1/completions", {"prompt": "STUCK", "stream": True}
    with httpx.stream("POST", url, json=body, timeout=30) as response:
        events = data_of(response.iter_lines())
        next(events)
        server.process.send_signal(signal.SIGINT)
        assert next(events)["error"]["message"] == "the server is shutting down"
    assert server.end() == (0, "")


def test_shutdown_lets_running_requests_finish(model: Path) -> None:
    server = Running(model, "--shutdown-grace", "60")
    try:
        url, body = f"{server.base}/v1/completions", {"prompt": "abc", "stream": True, "max_tokens": 300}
        with httpx.stream("POST", url, json=body, timeout=30) as response:
            events = data_of(response.iter_lines())
            text = next(events)["choices"][0]["text"]
            server.process.send_signal(signal.SIGTERM)
            text += "".join(event["choices"][0]["text"] for event in events)
        assert text == "abc" * 100
        assert server.end() == (0, "")
    finally:
        server.close()


def test_a_second_signal_ends_at_once(model: Path) -> None:
    server = Running(model, "--shutdown-grace", "1000")
    try:
        url, body = f"{server.base}/v1/completions", {"prompt": "STUCK", "stream": True}
        with httpx.stream("POST", url, json=body, timeout=30) as response:
            events = data_of(response.iter_lines())
            next(events)
            server.process.send_signal(signal.SIGINT)
            server.process.send_signal(signal.SIGTERM)
            assert next(events)["error"]
        assert server.end()[0] == 0
    finally:
        server.close()


def test_clients_that_leave_at_any_time_leave_nothing(server: Running) -> None:
    process = psutil.Process(server.process.pid)
    assert complete(server, "abc").status_code == 200
    before = process.num_fds()
    port = int(server.base.rpartition(":")[2])
    body = json.dumps({"prompt": "STUCK", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    request = head.encode() + b"Content-Type: application/json\r\n\r\n" + body
    for step in range(60):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(request[: 1 + len(request) * step // 40])
            if step > 50:
                connection.recv(1)
    while httpx.get(f"{server.base}/health").json()["running"]:
        pass
    while process.num_fds() > before:
        select.select([], [], [], 0.01)
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == (0, "")


def test_a_port_in_use_is_told_before_anything_is_loaded(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "tests.server.serve_fakes", "/no/such/model.gguf", "--port", str(port)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        f"tokenmill: port {port} on 127.0.0.1 is in use: stop the other server, or choose another one with --port\n"
    )


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [("no-such-host.invalid", 0, "not a usable address"), ("203.0.113.7", 0, "cannot listen on")],
)
def test_addresses_that_cannot_be_used(host: str, port: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bind(host, port)


def test_nobody_has_to_read_the_ready_line(model: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with socket.create_server(("127.0.0.1", 0)) as free:
        base = f"http://127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.server.serve_fakes", str(model), "--port", base.rpartition(":")[2]]
    with subprocess.Popen(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True) as process:
        os.close(writer)
        while process.poll() is None:
            with contextlib.suppress(httpx.ConnectError):
                assert httpx.get(f"{base}/health").json()["status"] == "ok"
                process.send_signal(signal.SIGTERM)
                process.wait(30)
        assert (process.returncode, process.communicate()[1]) == (0, "")


def test_a_long_temporary_directory_is_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with private_directory() as directory:
        assert len(str(directory)) < 60
        assert os.stat(directory).st_mode & 0o777 == 0o700
    assert not directory.exists()


def test_the_api_process_needs_none_of_the_heavy_packages() -> None:
    script = (
        "import sys, tokenmill.server.launch, tokenmill.cli;"
        "print([name for name in ('torch', 'numpy', 'tokenizers', 'transformers', 'gguf') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
