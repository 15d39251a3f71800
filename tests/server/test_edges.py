"""Request ids, keys, CORS, HEAD, OPTIONS, cancel, readiness, metrics and timings over a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.site import COMPLETIONS, SETTINGS, Site, error_of, user
from tests.server.test_leaving import Connection, until
from tokenmill.errors import ConfigError
from tokenmill.schema import check
from tokenmill.server.apis import ANSWERS
from tokenmill.server.app import EdgeSettings, create_app
from tokenmill.server.keys import Keys, read_keys
from tokenmill.server.sse import Heartbeat

CHAT = "/v1/chat/completions"
GET_ROUTES = ("/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/org/tiny", "/v1/cache", "/docs")
POST_ROUTES = (CHAT, COMPLETIONS, "/v1/cache/flush", "/v1/requests/x/cancel")


def guarded(*keys: str, origins: tuple[str, ...] = ()) -> Site:
    site = Site()
    site.app = create_app(site.engine.client, SETTINGS, EdgeSettings(Keys(keys), origins))
    return site


@pytest.mark.parametrize("path", [*GET_ROUTES, "/openapi.json"])
def test_head_is_get_without_the_body(site: Site, path: str) -> None:
    head = site.request("HEAD", path)
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["content-length"]) > 0
    assert Site().request("OPTIONS", path).headers["allow"] == "GET, HEAD, OPTIONS"


@pytest.mark.parametrize("path", POST_ROUTES)
def test_options_and_wrong_methods_tell_what_is_allowed(site: Site, path: str) -> None:
    options = site.request("OPTIONS", path)
    assert (options.status_code, options.headers["allow"], options.content) == (204, "OPTIONS, POST", b"")
    for method in ("GET", "HEAD", "PUT", "DELETE"):
        wrong = Site().request(method, path)
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "OPTIONS, POST")
    assert Site().request("OPTIONS", "/v1/nothing").status_code == 404


def test_answers_are_as_openapi_says(site: Site) -> None:
    for path in ("/v1/models", "/health", "/ready", "/version"):
        check(Site().request("GET", path).json(), ANSWERS[path], path)
    check(site.request("GET", "/v1/models/org/tiny").json(), ANSWERS["/v1/models/{name}"], "model")
    paths = Site().request("GET", "/openapi.json").json()["paths"]
    for path, methods in paths.items():
        for operation in methods.values():
            assert set(operation["responses"]) == {"200", "default"}, path
            error = operation["responses"]["default"]["content"]["application/json"]["schema"]
            assert error["required"] in (["error"], ["type", "error"])
    assert list(paths["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]


def test_every_answer_has_a_request_id(site: Site) -> None:
    async def run() -> list[Any]:
        async with site.open() as http:
            paths = [("GET", "/health"), ("GET", "/nothing"), ("PUT", CHAT), ("OPTIONS", CHAT), ("POST", COMPLETIONS)]
            answers = [await http.request(method, path, headers={"x-request-id": "mine"}) for method, path in paths]
            return answers + [await http.request(method, path) for method, path in paths]

    answers = asyncio.run(run())
    assert [answer.headers["x-request-id"] for answer in answers[:5]] == ["mine"] * 5
    assert len({answer.headers["x-request-id"] for answer in answers[5:]}) == 5
    bad = Site().request("GET", "/health", headers={"x-request-id": "a" * 300})
    assert (bad.status_code, error_of(bad)["param"]) == (400, "X-Request-Id")
    assert len(bad.headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({}, "asks for an API key"),
        ({"authorization": "Bearer wrong"}, "is not valid"),
        ({"authorization": "Basic b25l"}, "asks for an API key"),
        ({"authorization": "Bearer "}, "asks for an API key"),
        ({"x-api-key": "on"}, "is not valid"),
        ({"x-api-key": b"on\xe9"}, "is not valid"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/models", "/metrics", "/docs", "/v1/nothing"])
def test_without_a_valid_key(headers: dict[str, Any], words: str, path: str) -> None:
    response = guarded("one", "two").request("GET", path, headers=headers)
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
    assert words in error["message"]
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    "headers", [{"authorization": "Bearer one"}, {"authorization": "bearer two"}, {"x-api-key": "two"}]
)
def test_with_a_valid_key(headers: dict[str, str]) -> None:
    assert guarded("one", "two").request("GET", "/v1/models", headers=headers).status_code == 200


def test_the_official_clients_see_a_wrong_key_as_what_it_is() -> None:
    site = guarded("one")

    async def run() -> None:
        async with site.engine.running():
            kinds = (httpx, httpx2)
            https = [its.AsyncClient(transport=its.ASGITransport(site.app), base_url="http://test") for its in kinds]
            messages: Any = user("ab.")
            for key, expected in (("two", True), ("one", False)):
                options: dict[str, Any] = {"api_key": key, "max_retries": 0}
                ours = openai.AsyncOpenAI(base_url="http://test/v1", http_client=https[0], **options)
                theirs = anthropic.AsyncAnthropic(base_url="http://test", http_client=https[1], **options)
                for create, error in (
                    (ours.chat.completions.create, openai.AuthenticationError),
                    (theirs.messages.create, anthropic.AuthenticationError),
                ):
                    with pytest.raises(error) if expected else contextlib.nullcontext():
                        await create(model="org/tiny", messages=messages, max_tokens=5)
            for client in https:
                await client.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/health", "/ready", "/version"])
def test_routes_that_are_open_without_a_key(path: str) -> None:
    assert guarded("one").request("GET", path).status_code == 200


def test_a_key_and_its_users_are_tenants() -> None:
    site = guarded("one", "two")
    for key, fields in (("one", {}), ("two", {}), ("one", {"user": "u"}), ("two", {"user": "u"})):
        site.post(COMPLETIONS, {"x-api-key": key}, prompt=".", **fields)
    assert [its.tenant for its in site.engine.scheduler.seen] == ["key-1/", "key-2/", "key-1/u", "key-2/u"]


def test_keys_of_a_file(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\n  alpha \nbeta\n")
    keys = read_keys(("gamma",), str(file))
    assert [keys.holder([shown]) for shown in ("gamma", "alpha", "beta")] == ["key-1", "key-2", "key-3"]
    assert "alpha" not in repr(vars(keys))


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "holds no key"), ("# x\n", "holds no key"), ("a\nb c\n", "line 2"), (None, "cannot be read")],
)
def test_files_that_hold_no_keys(tmp_path: Any, text: str | None, words: str) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        read_keys((), str(file))
    assert "b c" not in caught.value.message
    with pytest.raises(ConfigError, match="number 2"):
        read_keys(("a", "schlüssel"), None)


def test_cors_is_off_unless_asked_for(site: Site) -> None:
    response = site.request("GET", "/v1/models", headers={"origin": "https://a.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize(("origins", "allowed"), [(("https://a.example",), "https://a.example"), (("*",), "*")])
def test_cors(origins: tuple[str, ...], allowed: str) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    site = guarded("one", origins=origins)
    preflight = site.request("OPTIONS", CHAT, headers={"origin": "https://a.example", **asked})
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, allowed)
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
    refused = guarded("one", origins=origins).request("GET", "/v1/models", headers={"origin": "https://a.example"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, allowed)
    other = guarded(origins=("https://b.example",)).request("GET", "/version", headers={"origin": "https://a.example"})
    assert "access-control-allow-origin" not in other.headers


def test_ready_until_the_server_ends(site: Site) -> None:
    assert site.request("GET", "/ready").json() == {"status": "ready"}
    site.engine.client.drain()
    for method, path in (("GET", "/ready"), ("POST", COMPLETIONS)):
        ending = site.request(method, path, json={"prompt": "x"})
        assert (ending.status_code, error_of(ending)["message"]) == (503, "the server is shutting down")


def test_metrics(site: Site) -> None:
    response = site.request("GET", "/metrics", headers={"accept": "text/plain;version=x.y.z"})
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    assert families["tokenmill:num_requests_running"].samples[0].labels == {"model_name": "org/tiny"}
    assert families["tokenmill:kv_cache_usage_perc"].samples[0].value == 0.25
    assert families["tokenmill:generation_tokens"].samples[0].name == "tokenmill:generation_tokens_total"
    assert families["tokenmill:generation_tokens"].type == "counter"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["STUCK", "WAIT", "PAUSED", ["ab.", "STUCK"]])
def test_a_cancelled_request_ends_with_what_it_has(site: Site, prompt: Any, stream: bool) -> None:
    async def run() -> list[dict[str, Any]]:
        engine, scheduler = site.engine, site.engine.scheduler
        engine.tokenizers[0].is_paused = prompt == "PAUSED"
        async with site.open() as http:
            body = {"prompt": prompt, "request_id": "mine", "stream": stream}
            serving = asyncio.create_task(http.post(COMPLETIONS, json=body))
            await until(lambda: engine.client.open_entries > 0)
            if prompt not in ("PAUSED", "WAIT"):
                await until(lambda: [scheduler.made[uid] for uid in scheduler.jobs] == [1])
            answer = await http.post("/v1/requests/cmpl-mine/cancel")
            assert answer.json() == {"id": "cmpl-mine", "object": "request.cancelled", "cancelled": 1}
            engine.tokenizers[0].is_paused = False
            response = await serving
            assert response.status_code == 200
            again = await http.post("/v1/requests/mine/cancel")
            assert (again.status_code, error_of(again)["type"]) == (404, "NotFoundError")
            if not stream:
                choices: list[dict[str, Any]] = response.json()["choices"]
                return choices
            *events, done = response.text.strip().split("\n\n")
            assert done == "data: [DONE]"
            return [choice for event in events for choice in json.loads(event[6:])["choices"]]

    choices = sorted(asyncio.run(run()), key=lambda choice: choice["index"])
    last = [choice for choice in choices if choice["finish_reason"]]
    assert [choice["finish_reason"] for choice in last] == [*["stop"] * isinstance(prompt, list), "abort"]
    texts = {"STUCK": "S", "WAIT": "", "PAUSED": ""}
    assert "".join(choice["text"] for choice in choices) == texts.get(str(prompt), "abS")


def test_nobody_can_cancel_requests_of_another_key() -> None:
    site = guarded("one", "two")

    async def run() -> None:
        async with site.open() as http:
            mine = {"x-api-key": "one"}
            serving = asyncio.create_task(
                http.post(COMPLETIONS, json={"prompt": "STUCK", "request_id": "mine"}, headers=mine)
            )
            await until(lambda: bool(site.engine.scheduler.jobs))
            other = await http.post("/v1/requests/mine/cancel", headers={"x-api-key": "two"})
            assert other.status_code == 404
            own = await http.post("/v1/requests/mine/cancel", headers=mine)
            assert own.json()["cancelled"] == 1
            await serving

    asyncio.run(run())


def test_a_stream_without_news_gets_comments(site: Site) -> None:
    site.app = create_app(site.engine.client, replace(SETTINGS, sse_keep_alive=0.001))

    async def run() -> None:
        connection = Connection(COMPLETIONS, {"prompt": "WAIT", "stream": True})
        async with site.engine.running():
            serving = asyncio.create_task(site.app(connection.scope, connection.incoming.get, connection.send))
            await until(lambda: len(connection.sent) > 3)
            connection.leave()
            await serving
        assert {message["body"] for message in connection.sent[1:4]} == {b": keep-alive\n\n"}

    asyncio.run(run())


def test_a_heart_beats_only_after_a_rest() -> None:
    async def run() -> list[None]:
        beats: list[None] = []
        beat = Heartbeat(60, lambda: beats.append(None))
        beat._look()
        assert beats == []
        beat._rested -= 61
        beat._look()
        beat.stop()
        return beats

    assert len(asyncio.run(run())) == 1


@pytest.mark.parametrize(("by_flag", "asked"), [(True, {}), (False, {"timings": True}), (False, {})])
def test_timings_on_request_or_by_flag(site: Site, by_flag: bool, asked: dict[str, bool]) -> None:
    site.app = create_app(site.engine.client, replace(SETTINGS, timings=by_flag))
    expected = {"queue": 0.02, "prefill": 0.03, "decode": 0.5, "tokens_per_second": 10.0}
    body = site.post(CHAT, messages=user("abc"), max_tokens=6, **asked).json()
    assert body.get("timings") == (expected if by_flag or asked else None)
    stream = site.post(CHAT, messages=user("abc"), max_tokens=6, stream=True, **asked).text.strip().split("\n\n")
    events = [json.loads(event[6:]) for event in stream[:-1]]
    assert events[-1].get("timings") == (expected if by_flag or asked else None)
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert not any("timings" in event for event in events[:-1])
