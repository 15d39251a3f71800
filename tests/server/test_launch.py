"""The server with real processes and sockets, and fake work in them: start, shutdown, addresses."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.server import ROOT, Server, serving, settled
from tokenmill.errors import ConfigError
from tokenmill.procs import private_directory
from tokenmill.server.launch import listen

pytestmark = pytest.mark.server
FAKES = ("tests.server.serve_fakes",)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "fake.gguf"
    path.write_bytes(b"GGUF")
    return path


@pytest.fixture
def server(model: Path) -> Iterator[Server]:
    with serving(model, "--tokenizers", "2", "--shutdown-grace", "0.2", program=FAKES) as running:
        yield running


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


def data_of(lines: Iterator[str]) -> Iterator[Any]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def test_answers_health_and_a_clean_end(server: Server) -> None:
    assert re.fullmatch(r"tokenmill \S+: .* ready at http://127\.0\.0\.1:\d+ in \d+\.\d s; Ctrl-C stops\n", server.line)
    assert server.complete("abc", max_tokens=4)["choices"][0]["text"] == "abca"
    assert server.pulse()["status"] == "ok"
    assert server.get("/v1/models").json()["data"][0]["max_model_len"] == 1000
    assert psutil.Process(server.pid).memory_info().rss < 150 * 2**20
    assert server.end(signal.SIGTERM) == 0
    assert server.log == ""


def test_shutdown_waits_then_ends_streams_with_an_error(server: Server) -> None:
    with server.stream("/v1/completions", prompt="STUCK") as response:
        events = data_of(response.iter_lines())
        next(events)
        server.process.send_signal(signal.SIGINT)
        assert next(events)["error"]["message"] == "the server is shutting down"
    assert server.end() == 0
    assert server.log.endswith(" server: stopping; running requests get 0.2 s, another Ctrl-C ends them\n")


def test_shutdown_lets_running_requests_finish(model: Path) -> None:
    with serving(model, "--shutdown-grace", "60", program=FAKES) as server:
        with server.stream("/v1/completions", prompt="abc", max_tokens=300) as response:
            events = data_of(response.iter_lines())
            text = next(events)["choices"][0]["text"]
            server.process.send_signal(signal.SIGTERM)
            text += "".join(event["choices"][0]["text"] for event in events)
        assert text == "abc" * 100
        assert server.end() == 0
        assert len(server.log.splitlines()) == 1


def test_https_with_keys_that_are_never_logged(model: Path, certificate: tuple[str, str], tmp_path: Path) -> None:
    cert, key = certificate
    keys = tmp_path / "keys"
    keys.write_text("secret-of-mine\n")
    flags = ("--tls-cert", cert, "--tls-key", key, "--api-key-file", str(keys), "--log-level", "debug")
    with serving(model, *flags, program=FAKES) as server:
        assert server.base.startswith("https://")
        context = ssl.create_default_context(cafile=cert)
        with httpx.Client(base_url=server.base, verify=context) as client:
            assert client.get("/health").json()["status"] == "ok"
            assert client.get("/v1/models").status_code == 401
            client.headers["authorization"] = "Bearer secret-of-mine"
            answer = client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4})
            assert answer.json()["choices"][0]["text"] == "abca"
        assert server.end(signal.SIGTERM) == 0
        assert "secret" not in server.log


def test_several_api_workers_answer_as_one(model: Path) -> None:
    with serving(model, "--api-workers", "3", "--tokenizers", "2", program=FAKES) as server:
        workers = [child for name, child in server.children.items() if name.startswith("tm-api-")]
        assert len(workers) == 3
        with contextlib.ExitStack() as stack:
            streams = []
            for number in range(24):  # each on a connection of its own
                client = stack.enter_context(httpx.Client(base_url=server.base, timeout=60))
                body = {"prompt": "STUCK", "stream": True, "request_id": f"r{number}"}
                response = stack.enter_context(client.stream("POST", "/v1/completions", json=body))
                events = data_of(response.iter_lines())
                assert next(events)["choices"][0]["text"] == "S"
                streams.append(events)
            assert {len(worker.net_connections()) > 2 for worker in workers} == {True}, "connections are shared out"
            assert server.pulse()["running"] == 24
            for number, events in enumerate(streams[:20]):  # all by one connection, and so by one worker
                assert server.post(f"/v1/requests/r{number}/cancel").json()["cancelled"] == 1
                assert [event["choices"][0]["finish_reason"] for event in events] == ["abort"]
            assert server.post("/v1/requests/r0/cancel").status_code == 404
            server.process.send_signal(signal.SIGTERM)
            assert {next(events)["error"]["message"] for events in streams[20:]} == {"the server is shutting down"}
        assert server.end() == 0
        assert "stopping; running requests get 3 s" in server.log


def test_an_api_worker_that_dies_ends_the_server(model: Path) -> None:
    with serving(model, "--api-workers", "2", program=FAKES) as server:
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(httpx.Client(base_url=server.base, timeout=60)) for _ in range(16)]
            body = {"prompt": "STUCK", "stream": True}
            responses = [stack.enter_context(client.stream("POST", "/v1/completions", json=body)) for client in clients]
            streams = [data_of(response.iter_lines()) for response in responses]
            for events in streams:
                next(events)
            server.children["tm-api-0"].kill()
            told = []
            for events in streams:
                with contextlib.suppress(httpx.HTTPError):  # of the worker that is dead
                    told += [event["error"]["message"] for event in events]
            assert set(told) == {"the api-0 process has ended: killed by SIGKILL (out of memory?)"}
        assert server.end() == 1


def test_two_servers_with_workers_cannot_have_one_port(model: Path) -> None:
    first = listen("127.0.0.1", 0, 2)
    try:
        assert len({sock.getsockname() for sock in first}) == 1
        with pytest.raises(ConfigError, match="is in use"):
            listen("127.0.0.1", first[0].getsockname()[1], 2)
    finally:
        for sock in first:
            sock.close()


def test_ready_says_no_while_requests_end(model: Path) -> None:
    with serving(model, "--shutdown-grace", "60", program=FAKES) as server:
        with server.stream("/v1/completions", prompt="STUCK", request_id="mine") as response:
            events = data_of(response.iter_lines())
            next(events)
            assert server.get("/ready").status_code == 200
            server.process.send_signal(signal.SIGTERM)
            ending = settled(lambda: server.get("/ready"), lambda answer: answer.status_code != 200)
            assert (ending.status_code, ending.headers["retry-after"]) == (503, "1")
            assert server.post("/v1/completions", prompt="x").status_code == 503
            assert server.post("/v1/requests/mine/cancel").json()["cancelled"] == 1
            assert [event["choices"][0]["finish_reason"] for event in events] == ["abort"]
        assert server.end() == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--tls-key", "CERT"), "--tls-key needs --tls-cert"),
        (("--tls-cert", "/no/such.pem"), "--tls-cert /no/such.pem cannot be read: No such file or directory"),
        (("--tls-cert", "CERT", "--tls-key", "/no/such.pem"), "--tls-key /no/such.pem cannot be read"),
        (("--tls-cert", "CERT"), "cannot be used"),
        (("--tls-cert", "MODEL", "--tls-key", "KEY"), "cannot be used"),
        (("--api-key-file", "/no/such"), "--api-key-file /no/such cannot be read: No such file or directory"),
        (("--api-key", "a b"), "--api-key number 1 is not usable as a key"),
        (("--head-timeout", "0"), "--head-timeout must be from 0.001"),
    ],
)
def test_flags_that_cannot_work_are_one_line_at_the_start(
    model: Path, certificate: tuple[str, str], flags: tuple[str, ...], words: str
) -> None:
    files = {"CERT": certificate[0], "KEY": certificate[1], "MODEL": str(model)}
    command = [sys.executable, "-m", "tests.server.serve_fakes", "/no/such/model.gguf", "--port", "0"]
    command += [files.get(flag, flag) for flag in flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert words in done.stderr


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
        listen(host, port)


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
                assert httpx.get(f"{base}/health", timeout=60).json()["status"] == "ok"
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
