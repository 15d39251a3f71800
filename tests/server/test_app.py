"""The HTTP API over a fake engine: shapes, streams, errors, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.server.fakes import TREE, FakeEngine
from tokenmill.clock import milliseconds
from tokenmill.errors import WorkerDied
from tokenmill.server.app import create_app
from tokenmill.server.routes import AppSettings
from tokenmill.server.sse import encode_event

SETTINGS = AppSettings(
    model="org/tiny",
    max_model_len=1000,
    max_body_bytes=20_000,
    has_priorities=False,
    answer_timeout=0.05,
    created=7,
)
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class Site:
    """The app and a client for it."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.app = create_app(self.engine.client, SETTINGS)

    @asynccontextmanager
    async def open(self) -> Any:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with self.engine.running(), httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield http
            self.engine.settle()
            assert self.engine.client.open_entries == 0
            assert self.engine.scheduler.jobs == {}

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def run() -> httpx.Response:
            async with self.open() as http:
                response: httpx.Response = await http.request(method, path, **options)
                return response

        return asyncio.run(run())

    def post(self, path: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return self.request("POST", path, json=fields, headers=headers)


@pytest.fixture
def site() -> Site:
    return Site()


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def events(response: httpx.Response) -> list[Any]:
    """The stream's events, "[DONE]" as that string; asserts that each is one data line and a blank line."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, rest = response.text.split("\n\n")
    assert rest == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def choices(stream: list[Any], index: int) -> Iterator[Any]:
    for event in stream:
        if event != "[DONE]":
            yield from (choice for choice in event["choices"] if choice["index"] == index)


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == response.status_code
    return error


def test_a_chat_answer(site: Site) -> None:
    response = site.post(CHAT, model="org/tiny", messages=user("abc"), max_tokens=4)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    answer = response.json()
    assert answer["id"] == f"chatcmpl-{response.headers['x-request-id']}"
    assert isinstance(answer["created"], int)
    assert {key: answer[key] for key in ("object", "model", "choices", "usage")} == {
        "object": "chat.completion",
        "model": "org/tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "abca", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_a_completion_answer_with_echo_and_a_stop_id(site: Site) -> None:
    response = site.post(COMPLETIONS, prompt="abc", stop_token_ids=[ord("c")], echo=True)
    (choice,) = response.json()["choices"]
    assert choice == {
        "index": 0,
        "text": "abcab",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": ord("c"),
    }
    assert response.json()["object"] == "text_completion"
    assert response.json()["id"].startswith("cmpl-")


def test_an_end_token_first_is_an_empty_answer(site: Site) -> None:
    choice = site.post(CHAT, messages=user(".")).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", None)
    stream = events(Site().post(CHAT, messages=user("."), stream=True))
    assert [choice["delta"] for choice in choices(stream, 0)] == [{"role": "assistant", "content": ""}, {}]
    assert stream[-1] == "[DONE]"


def test_a_chat_stream(site: Site) -> None:
    stream = events(site.post(CHAT, messages=user("abc"), max_tokens=5, stream=True))
    assert stream.pop() == "[DONE]"
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in stream}) == 1
    assert stream[0]["object"] == "chat.completion.chunk"
    assert all("usage" not in event for event in stream)
    first, *middle, last = choices(stream, 0)
    assert first == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    assert "".join(choice["delta"]["content"] for choice in middle) == "abcab"
    assert all(choice["finish_reason"] is None for choice in middle)
    assert last == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length", "stop_reason": None}


def test_a_completion_stream_of_several_choices_with_usage(site: Site) -> None:
    response = site.post(
        COMPLETIONS, prompt=["ab", "xyz"], n=2, max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    stream = events(response)
    assert stream.pop() == "[DONE]"
    for index, text in enumerate(["aba", "aba", "xyz", "xyz"]):
        parts = list(choices(stream, index))
        assert "".join(part["text"] for part in parts) == text
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]
    usage = stream.pop()
    assert usage["choices"] == []
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (5, 12)
    assert all(event["usage"] is None for event in stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("prompt", "status"), [("REFUSE", 400), ("FULL", 503), ("", 400)])
def test_a_refusal_comes_as_a_status_also_for_a_stream(site: Site, stream: bool, prompt: str, status: int) -> None:
    response = site.post(COMPLETIONS, prompt=["fine", prompt], max_tokens=500, stream=stream)
    assert response.status_code == status
    assert error_of(response)["message"]
    assert response.headers.get("retry-after") == ("7" if status == 503 else None)


def test_a_failure_in_mid_stream_is_an_event_and_the_end(site: Site) -> None:
    stream = events(site.post(CHAT, messages=user("BREAK"), stream=True))
    assert "".join(choice["delta"].get("content", "") for choice in choices(stream[:-1], 0)) == "BR"
    assert stream[-1] == {
        "error": {"message": "the model broke", "type": "InternalServerError", "param": None, "code": 500}
    }


def test_a_failure_without_a_stream_is_a_status(site: Site) -> None:
    response = site.post(COMPLETIONS, prompt=["fine", "BREAK"])
    assert (response.status_code, error_of(response)["message"]) == (500, "the model broke")


@pytest.mark.parametrize("prompts", ["LATE", ["LATE", "LATE"]])
def test_a_deadline_before_the_first_token_is_504_and_not_to_be_tried_again(site: Site, prompts: Any) -> None:
    response = site.post(COMPLETIONS, prompt=prompts, deadline_ms=5000)
    assert (response.status_code, error_of(response)["type"]) == (504, "DeadlinePassedError")
    assert response.headers["x-should-retry"] == "false"
    assert Site().post(COMPLETIONS, prompt=prompts, deadline_ms=5000, stream=True).status_code == 504


def test_a_deadline_in_mid_answer_keeps_what_there_is_and_says_so(site: Site) -> None:
    ends = {"finish_reason": "abort", "stop_reason": "deadline"}
    answer = site.post(COMPLETIONS, prompt=["SLOW", "x."], timeout=5).json()
    assert [choice["text"] for choice in answer["choices"]] == ["SL", "x"]
    assert ends.items() <= answer["choices"][0].items()
    assert answer["choices"][1]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 4
    stream = events(Site().post(CHAT, messages=user("SLOW"), stream=True, timeout=5))
    assert stream.pop() == "[DONE]"
    assert ends.items() <= list(choices(stream, 0))[-1].items()


def test_what_is_sent_along_to_the_queue(site: Site) -> None:
    site.post(COMPLETIONS, prompt=["STUCK.", "x"], max_tokens=1, user="u", cache_salt="s", deadline_ms=10_000)
    seen = site.engine.scheduler.seen
    assert len(seen) == 2
    for scheduling in seen:
        assert (scheduling.priority, scheduling.tenant, scheduling.salt) == (0, "u", "s")
        assert scheduling.deadline is not None
        assert 0 < scheduling.deadline - milliseconds() <= 10_000


def test_priorities_are_refused_where_no_policy_looks_at_them(site: Site) -> None:
    response = site.post(COMPLETIONS, prompt="x.", priority=1)
    assert (response.status_code, error_of(response)["param"]) == (400, "priority")
    assert "--policy priority" in error_of(response)["message"]
    site.app = create_app(site.engine.client, replace(SETTINGS, has_priorities=True))
    assert site.post(COMPLETIONS, prompt="x.", priority=1).status_code == 200
    assert site.engine.scheduler.seen[-1].priority == 1


CACHE = "/v1/cache"


def test_questions_to_the_prefix_cache(site: Site) -> None:
    ids = list(map(ord, "abc"))
    assert site.request("GET", CACHE).json() == {"serial": 0, "verb": "stats", "token_ids": []}
    assert site.post(f"{CACHE}/probe", prompt="abc").json() == {"serial": 0, "verb": "probe", "token_ids": ids}
    pin = site.post(f"{CACHE}/pin", messages=user("abc"), cache_salt="s", ttl=2.5).json()
    assert pin == {"serial": 0, "verb": "pin", "token_ids": ids, "salt": "s", "ttl": 2500}
    assert site.post(f"{CACHE}/unpin", prompt=ids).json()["token_ids"] == ids
    assert site.post(f"{CACHE}/flush", with_pins=True).json()["with_pins"] is True
    assert site.request("POST", f"{CACHE}/flush").json()["verb"] == "flush", "also without a body"
    assert site.request("GET", f"{CACHE}/tree?max_nodes=5").json() == TREE
    text = site.request("GET", f"{CACHE}/tree?format=text")
    assert text.headers["content-type"].startswith("text/plain")
    assert text.text.splitlines()[1:] == ["salt (none)", "  ... 2 more"]
    paths = site.request("GET", "/openapi.json").json()["paths"]
    assert {path for path in paths if path.startswith(CACHE)} == {
        CACHE,
        *(f"{CACHE}/{verb}" for verb in ("probe", "pin", "unpin", "flush", "tree")),
    }
    assert "ttl" in paths[f"{CACHE}/pin"]["post"]["requestBody"]["content"]["application/json"]["schema"]["required"]


@pytest.mark.parametrize(
    ("verb", "fields", "param"),
    [
        ("probe", {"prompt": "REFUSE"}, "prompt"),
        ("probe", {"prompt": ["a", "b"]}, "prompt"),
        ("pin", {"prompt": "a"}, "ttl"),
        ("unpin", {"prompt": "a", "ttl": 1}, "ttl"),
        ("flush", {"cache_salt": 1}, "cache_salt"),
        ("flush", {"prompt": "a"}, "prompt"),
    ],
)
def test_bad_questions_to_the_prefix_cache(site: Site, verb: str, fields: dict[str, Any], param: str) -> None:
    response = site.post(f"{CACHE}/{verb}", **fields)
    assert (response.status_code, error_of(response)["param"]) == (400, param)


@pytest.mark.parametrize("query", ["max_nodes=0", "max_nodes=x", "max_depth=65", "format=xml", "nodes=5"])
def test_bad_queries_for_the_tree(site: Site, query: str) -> None:
    response = site.request("GET", f"{CACHE}/tree?{query}")
    assert (response.status_code, error_of(response)["param"]) == (400, query.partition("=")[0])


GOOD = {CHAT: {"messages": user("x")}, COMPLETIONS: {"prompt": "x"}}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("body", [b"{", b"[", b"", b"[" * 9000 + b"]" * 9000, b"[]"])
def test_bodies_that_are_no_object(site: Site, path: str, body: bytes) -> None:
    response = site.request("POST", path, content=body)
    assert (response.status_code, error_of(response)["type"]) == (400, "BadRequestError")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "headers", "status", "param"),
    [
        ({"x_extra": 1}, {}, 400, "x_extra"),
        ({"temperature": "x" * 10_000}, {}, 400, "temperature"),
        ({"model": "no-such-model"}, {}, 404, "model"),
        ({}, {"content-type": "application/x-www-form-urlencoded"}, 415, None),
        ({"user": "x" * 20_000}, {}, 413, None),
        ({}, {"x-request-id": "a" * 300}, 400, "X-Request-Id"),
    ],
)
def test_bad_requests(
    site: Site, path: str, fields: dict[str, Any], headers: dict[str, str], status: int, param: str | None
) -> None:
    response = site.post(path, headers, **GOOD[path], **fields)
    assert response.status_code == status
    error = error_of(response)
    assert error["param"] == param
    assert 0 < len(error["message"]) <= 2000


@pytest.mark.parametrize(
    "content_type", [None, "application/json; charset=utf-8", "Application/JSON", "application/a+json"]
)
def test_content_types_that_are_json(site: Site, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = site.request("POST", COMPLETIONS, content=b'{"prompt":"x"}', headers=headers)
    assert response.status_code == 200


def test_a_body_in_pieces_is_put_together_and_bounded(site: Site) -> None:
    async def pieces(count: int) -> Any:
        yield b'{"prompt":"ab","max_tokens":2'
        for _ in range(count):
            yield b" " * 1000
        yield b"}"

    response = site.request("POST", COMPLETIONS, content=pieces(1))
    assert response.json()["choices"][0]["text"] == "ab"
    assert Site().request("POST", COMPLETIONS, content=pieces(21)).status_code == 413
    assert Site().request("POST", COMPLETIONS, content=pieces(500)).status_code == 413


def test_request_ids(site: Site) -> None:
    response = site.post(COMPLETIONS, {"x-request-id": "mine"}, prompt="x")
    assert (response.headers["x-request-id"], response.json()["id"]) == ("mine", "cmpl-mine")
    response = Site().post(CHAT, {"x-request-id": "mine"}, messages=user("x."), request_id="other", stream=True)
    assert (response.headers["x-request-id"], events(response)[0]["id"]) == ("other", "chatcmpl-other")


def test_one_request_id_twice_at_a_time(site: Site) -> None:
    async def run() -> list[str]:
        async with site.open() as http:
            bodies = [{"prompt": prompt, "max_tokens": 40, "request_id": "same"} for prompt in ("a", "b")]
            answers = await asyncio.gather(*(http.post(COMPLETIONS, json=body) for body in bodies))
            return [answer.json()["choices"][0]["text"] for answer in answers]

    assert asyncio.run(run()) == ["a" * 40, "b" * 40]


def test_models_version_and_unknown_routes(site: Site) -> None:
    card = {"id": "org/tiny", "object": "model", "created": 7, "owned_by": "tokenmill", "max_model_len": 1000}
    assert site.request("GET", "/v1/models").json() == {"object": "list", "data": [card]}
    assert site.request("GET", "/v1/models/org/tiny").json() == card
    assert site.request("GET", "/version").json()["version"]
    assert error_of(site.request("GET", "/v1/models/none"))["type"] == "NotFoundError"
    assert error_of(site.request("GET", "/v1/nothing"))["type"] == "NotFoundError"
    assert site.request("GET", "/docs").status_code == 200
    body = site.request("GET", "/openapi.json").json()["paths"][CHAT]["post"]["requestBody"]
    assert "messages" in body["content"]["application/json"]["schema"]["properties"]
    wrong = site.request("GET", COMPLETIONS)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert "GET" in error_of(wrong)["message"]


def test_health_tells_whether_the_scheduler_moves(site: Site) -> None:
    healthy = site.request("GET", "/health")
    assert healthy.status_code == 200
    assert healthy.json()["num_pages"] == 10
    site.engine.scheduler.is_silent = True
    for path in ("/health", CACHE):
        sick = site.request("GET", path)
        assert (sick.status_code, error_of(sick)["type"]) == (503, "ServiceUnavailableError")


def test_a_bug_is_a_500_with_an_error_object(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(timeout: float) -> Awaitable[None]:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(site.engine.client, "probe", broken)
    response = site.request("GET", "/health")
    assert response.status_code == 500
    assert "secret" not in error_of(response)["message"]


class Connection:
    """A raw ASGI connection whose client can leave."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
        }
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        self.sent: list[dict[str, Any]] = []

    def leave(self) -> None:
        self.incoming.put_nowait({"type": "http.disconnect"})

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("fields", "ready"),
    [
        ({"prompt": "STUCK"}, lambda site, connection: bool(site.engine.scheduler.jobs)),
        ({"prompt": "STUCK", "stream": True}, lambda site, connection: len(connection.sent) >= 2),
        ({"prompt": ["ab.", "STUCK"], "n": 3, "stream": True}, lambda site, connection: len(connection.sent) >= 3),
        ({"prompt": "x"}, lambda site, connection: not site.engine.client.idle.is_set()),
    ],
)
def test_leaving_aborts_and_leaves_nothing(
    site: Site, fields: dict[str, Any], ready: Callable[[Site, Connection], bool]
) -> None:
    async def run() -> None:
        connection = Connection(COMPLETIONS, fields)
        engine = site.engine
        engine.tokenizers[0].is_paused = fields["prompt"] == "x"
        async with engine.running():
            serving = asyncio.create_task(site.app(connection.scope, connection.incoming.get, connection.send))
            await until(lambda: ready(site, connection))
            connection.leave()
            await serving
            engine.tokenizers[0].is_paused = False
        engine.settle()
        assert engine.client.open_entries == 0
        assert engine.scheduler.jobs == {}
        assert engine.scheduler.aborted

    asyncio.run(run())


def test_leaving_in_the_middle_of_the_body(site: Site) -> None:
    async def run() -> None:
        connection = Connection(COMPLETIONS, {"prompt": "x"})
        connection.incoming.get_nowait()
        connection.incoming.put_nowait({"type": "http.request", "body": b'{"pro', "more_body": True})
        connection.leave()
        await site.app(connection.scope, connection.incoming.get, connection.send)
        assert site.engine.client.open_entries == 0

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_process_ends_open_requests_with_an_error(site: Site, stream: bool) -> None:
    async def run() -> None:
        connection = Connection(COMPLETIONS, {"prompt": "STUCK", "stream": stream})
        async with site.engine.running():
            serving = asyncio.create_task(site.app(connection.scope, connection.incoming.get, connection.send))
            await until(lambda: site.engine.scheduler.made.get(1) == 1 and (not stream or len(connection.sent) > 1))
            site.engine.client.fail(WorkerDied("the scheduler-0 process has ended: killed by SIGKILL"))
            await serving
        assert connection.sent[0]["status"] == (200 if stream else 500)
        body = b"".join(message.get("body", b"") for message in connection.sent)
        assert b'{"error":{"message":"the scheduler-0 process has ended' in body
        assert not connection.sent[-1].get("more_body")

    asyncio.run(run())
    assert site.post(COMPLETIONS, prompt="x").status_code == 500


def test_events_have_no_line_ends_of_any_kind_inside() -> None:
    text = "a\nb\rc\u2028d\u2029e\x85f\x0bg\x0ch\x1ci"
    data = encode_event({"text": text})
    assert len(data.decode().splitlines()) == 2
    assert json.loads(data.removeprefix(b"data: ")) == {"text": text}
