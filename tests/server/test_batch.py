"""Batch files: their lines, and whole runs over fake processes."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.server import PATIENCE, ROOT, settled
from tokenmill.errors import ConfigError
from tokenmill.server.batch import _ask
from tokenmill.server.batch_file import ANSWER_START, BatchError, BatchRequest, Done, check_names, parse_line, resume

COMPLETIONS = "/v1/completions"


def line(name: str, url: str = COMPLETIONS, **body: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{its}\n" for its in lines))
    return path


def answers(path: Path) -> dict[str | None, Any]:
    text = path.read_text()
    assert text.endswith("\n")
    found = [json.loads(its) for its in text.splitlines()]
    assert all(its["id"].startswith("batch_req_") for its in found)
    assert len({its["id"] for its in found}) == len(found)
    return {its["custom_id"]: its for its in found}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "fake.gguf").write_bytes(b"GGUF")
    return tmp_path


def command(folder: Path, *flags: str) -> list[str]:
    paths = [str(folder / name) for name in ("in.jsonl", "out.jsonl")]
    return [sys.executable, "-m", "tests.server.batch_fakes", *paths, "--model", str(folder / "fake.gguf"), *flags]


def run(folder: Path, *flags: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(folder, *flags), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    return done


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    while settled(lambda: path.read_text().count("\n") if path.exists() else 0, lambda found: found == count) < count:
        assert process.poll() is None


@pytest.mark.server
def test_every_line_is_answered_and_errors_end_nothing(folder: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    write(
        folder / "in.jsonl",
        line("a", prompt="abc", max_tokens=4),
        line("b", "/v1/chat/completions", **chat),
        "",
        "{not json",
        line("c", prompt="abc", temperature=-1),
        line("d", "/v1/nothing"),
        line("e", prompt="BREAK"),
        line("f", prompt="abc", stream=True),
        line("g", "/tokenize", prompt="abc"),
        json.dumps({"custom_id": "h", "method": "GET", "url": "/health", "body": {}}),
        json.dumps({"method": "POST", "url": COMPLETIONS, "body": {}}),
    )
    done = run(folder, "--errors", str(folder / "errors.jsonl"))
    assert done.stdout == f"10 answered, 7 of them errors: {folder / 'out.jsonl'}\n"
    good, bad = answers(folder / "out.jsonl"), answers(folder / "errors.jsonl")
    assert set(good) == {"a", "b", "g"}
    assert good["a"]["response"]["body"]["choices"][0]["text"] == "abca"
    assert good["a"]["response"]["body"]["id"] == f"cmpl-{good['a']['response']['request_id']}"
    assert good["b"]["response"]["body"]["choices"][0]["message"]["content"] == "he"
    assert (good["g"]["response"]["status_code"], good["g"]["error"]) == (200, None)
    status = {name: its["response"]["status_code"] for name, its in bad.items() if its["response"]}
    assert status == {"c": 400, "d": 404, "e": 500}
    assert bad["c"]["response"]["body"]["error"]["param"] == "temperature"
    assert bad["f"]["error"]["message"] == "line 8: a batch has no streams: leave stream out"
    assert bad["h"]["error"]["code"] == "invalid_line"
    lines = [json.loads(its)["error"] for its in (folder / "errors.jsonl").read_text().splitlines()]
    assert sorted(its["line"] for its in lines if its) == [4, 8, 10, 11]
    assert run(folder, "--errors", str(folder / "errors.jsonl")).stdout.startswith("0 answered, 10 before: ")
    assert len(answers(folder / "out.jsonl")) == 3


@pytest.mark.server
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_was_cut_short_goes_on(folder: Path, number: int) -> None:
    names = [f"n{index}" for index in range(40)]
    prompts = ["STUCK" if name == "n30" else "ab." for name in names]
    write(folder / "in.jsonl", *(line(name, prompt=its) for name, its in zip(names, prompts, strict=True)))
    out = folder / "out.jsonl"
    with subprocess.Popen(
        command(folder, "--concurrency", "4"), cwd=ROOT, text=True, stdout=subprocess.PIPE
    ) as process:
        wait_for_lines(out, 39, process)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert (process.communicate()[0], process.returncode) == (f"39 answered: {out}\n", 130)
    assert not psutil.wait_procs(children, timeout=PATIENCE)[1]
    kept = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(kept[:20]) + kept[20][:50])
    write(folder / "in.jsonl", *(line(name, prompt="ab.") for name in names))
    assert run(folder).stdout == f"20 answered, 20 before: {out}\n"
    assert set(answers(out)) == set(names)
    assert out.read_bytes().startswith(b"".join(kept[:20]))


@pytest.mark.server
def test_an_engine_that_dies_ends_the_run_and_what_was_answered_stays(folder: Path) -> None:
    write(folder / "in.jsonl", line("a", prompt="ab."), line("b", prompt="STUCK"))
    out = folder / "out.jsonl"
    options: Any = {"cwd": ROOT, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command(folder), **options) as process:
        wait_for_lines(out, 1, process)
        children = {child.name(): child for child in psutil.Process(process.pid).children(recursive=True)}
        children["tm-scheduler-0"].kill()
        _, errors = process.communicate()
    assert process.returncode == 2
    assert "the scheduler-0 process has ended: killed by SIGKILL (out of memory?). Run the same command" in errors
    assert set(answers(out)) == {"a"}


def test_a_busy_server_is_asked_again() -> None:
    asked = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append((await receive())["body"])
        status = 503 if len(asked) < 3 else 200
        headers = [(b"content-type", b"application/json"), (b"retry-after", b"0"), (b"x-request-id", b"i")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})
        raise ZeroDivisionError("after the answer")

    request = parse_line(1, line("a", prompt="x").encode())
    assert isinstance(request, BatchRequest)
    response = asyncio.run(_ask(app, request))
    assert (response.status_code, response.request_id, bytes(response.body)) == (200, "i", b"{}")
    assert asked == [b'{"prompt":"x"}'] * 3


def test_custom_ids_must_differ(tmp_path: Path) -> None:
    path = write(tmp_path / "in", line("a"), "x", line("b"), line("a"))
    with pytest.raises(ConfigError, match="lines 1 and 4 have the same custom_id 'a'"):
        check_names(path, Done())
    with pytest.raises(ConfigError, match="No such file"):
        check_names(tmp_path / "none", Done())
    assert check_names(write(path, line("a"), "x", "", line("b")), Done({"a", "c"}, {2})) == (3, 2)


def test_input_and_output_must_differ(folder: Path) -> None:
    write(folder / "in.jsonl", line("a"))
    assert "must be different files" in run(folder, "--errors", str(folder / "in.jsonl"), code=2).stderr


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"{",
        b"\xff",
        b"[" * 9000,
        line("a").replace("custom_id", "id").encode(),
        line("a").replace("POST", "GET").encode(),
        line("a").replace('"url"', '"uri"').encode(),
        line("a").replace("{}", "[]").encode(),
        line("a", stream=True).encode(),
        b'{"custom_id": 5, "method": "POST", "url": "/", "body": {}}',
    ],
)
def test_lines_that_are_no_requests(text: bytes) -> None:
    problem = parse_line(7, text)
    assert isinstance(problem, BatchError)
    assert (problem.line, problem.message[:8]) == (7, "line 7: ")
    assert isinstance(parse_line(7, line("a", stream=False).encode()), BatchRequest)


@pytest.mark.parametrize("text", [b"mine", b"mine\n", b'{"a": 1}\n', ANSWER_START + b'1"}\nnot an answer\n'])
def test_other_files_are_left_alone(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "out"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="no answer of a batch"):
        resume(path, Done())
    assert path.read_bytes() == text


@pytest.mark.parametrize("torn", [b"", b"{", ANSWER_START + b"12"])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    path, done = tmp_path / "out", Done()
    whole = ANSWER_START + b'1","custom_id":"a"}\n' + ANSWER_START
    whole += b'2","custom_id":null,"response":null,"error":{"code":"c","message":"m","line":9}}\n'
    path.write_bytes(whole + torn)
    resume(path, done)
    assert path.read_bytes() == whole
    assert (done.names, done.lines) == ({"a"}, {9})
