"""The HTTP API over a fake engine: shapes, streams and errors."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.server.site import COMPLETIONS, SETTINGS, Site, error_of, user
from tokenmill.clock import milliseconds
from tokenmill.server import routes
from tokenmill.server.app import create_app
from tokenmill.server.sse import Chunks, encode_event

CHAT = "/v1/chat/completions"


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
        ({}, {"content-encoding": "gzip"}, 415, None),
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


def test_bodies_nested_however_deeply_are_answered_or_refused(site: Site) -> None:
    async def run() -> set[int]:
        found = set()
        async with site.open() as http:
            for depth in range(800, 1000, 4):
                deep = '{"a":' * depth + "1" + "}" * depth
                tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}'
                form = f'{{"type": "json_schema", "json_schema": {{"schema": {deep}}}}}'
                for field in (f'"tools": [{tool}], "tool_choice": "required"', f'"response_format": {form}'):
                    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "max_tokens": 1, {field}}}'
                    response = await http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
                    found.add(response.status_code)
        return found

    assert asyncio.run(run()) <= {200, 400}


@pytest.mark.parametrize(
    "content_type", [None, "application/json; charset=utf-8", "Application/JSON", "application/a+json"]
)
def test_content_types_that_are_json(site: Site, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = site.request("POST", COMPLETIONS, content=b'{"prompt":"x"}', headers=headers)
    assert response.status_code == 200


def test_large_bodies_are_read_on_a_thread(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    read_by: list[str] = []
    decode = routes.decode_body

    def noted(body: bytes) -> dict[str, Any]:
        read_by.append(threading.current_thread().name)
        return decode(body)

    monkeypatch.setattr(routes, "decode_body", noted)
    for size in (0, 10**6):
        monkeypatch.setattr(routes, "LARGE", size)
        assert site.post(COMPLETIONS, prompt="ab", max_tokens=2).json()["choices"][0]["text"] == "ab"
        assert error_of(site.post(COMPLETIONS, prompt=5))["param"] == "prompt"
    main = threading.main_thread().name
    assert [name == main for name in read_by] == [False, False, True, True]


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
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "OPTIONS, POST")
    assert "GET" in error_of(wrong)["message"]


def test_health_tells_whether_the_scheduler_moves(site: Site) -> None:
    healthy = site.request("GET", "/health")
    assert healthy.status_code == 200
    assert healthy.json()["num_pages"] == 20
    site.engine.scheduler.is_silent = True
    for path in ("/health", "/v1/cache"):
        sick = site.request("GET", path)
        assert (sick.status_code, error_of(sick)["type"]) == (503, "ServiceUnavailableError")


def test_a_bug_is_a_500_with_an_error_object(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(timeout: float) -> Awaitable[None]:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(site.engine.client, "probe", broken)
    response = site.request("GET", "/health")
    assert response.status_code == 500
    assert "secret" not in error_of(response)["message"]


def test_events_have_no_line_ends_of_any_kind_inside() -> None:
    text = "a\nb\rc\u2028d\u2029e\x85f\x0bg\x0ch\x1ci"
    data = encode_event({"text": text})
    assert len(data.decode().splitlines()) == 2
    assert json.loads(data.removeprefix(b"data: ")) == {"text": text}
    chunk = Chunks({"model": text}, {"usage": None}).encode({"text": text}, {"timings": text})
    assert len(chunk.decode().splitlines()) == 2
    whole = {"model": text, "choices": [{"text": text}], "usage": None, "timings": text}
    assert json.loads(chunk.removeprefix(b"data: ")) == whole
    assert Chunks({"model": "m"}, {}).encode(1, {}) == b'data: {"model":"m","choices":[1]}\n\n'
