"""Limits on what clients send, over real sockets and a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import uvicorn

from tests.server.site import COMPLETIONS, Site
from tests.server.test_leaving import until
from tokenmill.server.connections import ConnectionLimits, LimitedConnection

LIMITS = ConnectionLimits(max_header_bytes=1000, max_headers=10, head_timeout=60, body_timeout=60, send_timeout=60)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "ab", "max_tokens": 2}'
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def listening(
    site: Site, limits: ConnectionLimits, keep_alive: float = 60, kind: type[LimitedConnection] = LimitedConnection
) -> AsyncIterator[Callable[[], Any]]:
    """The site on a socket; yields what connects to it."""
    options: dict[str, Any] = {"http": partial(kind, limits), "timeout_keep_alive": keep_alive}
    server = uvicorn.Server(uvicorn.Config(site.app, port=0, lifespan="off", log_config=None, ws="none", **options))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    async with site.engine.running():
        await server.startup()
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield partial(asyncio.open_connection, "127.0.0.1", port)
        finally:
            await server.shutdown()


def talk(
    *pieces: bytes, limits: ConnectionLimits = LIMITS, keep_alive: float = 60, prompt_end: bool = False
) -> tuple[int, dict[str, str], bytes]:
    """What a client that sends these pieces gets before the server closes: status, headers, body."""

    async def run() -> bytes:
        site = Site()
        async with listening(site, limits, keep_alive) as connect:
            reader, writer = await connect()
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if prompt_end:
                writer.write_eof()
            async with asyncio.timeout(30):  # far less than a connection is kept open
                data: bytes = await reader.read()
            writer.close()
            await until(lambda: site.engine.client.open_entries == 0)
            return data

    data = asyncio.run(run())
    if not data:
        return 0, {}, b""
    head, _, body = data.partition(b"\r\n\r\n")
    line, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(line.split()[1]), headers, body


def refusal(answer: tuple[int, dict[str, str], bytes]) -> tuple[int, str]:
    status, headers, body = answer
    assert headers["connection"] == "close"
    assert len(body) == int(headers["content-length"])
    assert headers["x-request-id"]
    error = json.loads(body)["error"]
    assert error["code"] == status
    return status, error["message"]


@pytest.mark.parametrize(
    "pieces",
    [
        (HEAD + b"X-Long: " + b"a" * 1000 + b"\r\n\r\n",),
        (HEAD + b"X-Endless: ", b"a" * 600, b"a" * 600),
        (b"GET /" + b"a" * 600, b"a" * 600),
        (b"GET /", *[b"a" * 100_000] * 50),  # the answer must reach those that send on
        (b"GET /" + b"a" * 1001 + b" HTTP/1.1\r\n\r\n",),
        (HEAD, *[b"X-%d: %s\r\n" % (i, b"a" * 300) for i in range(5)]),
    ],
)
def test_heads_that_are_too_large(pieces: tuple[bytes, ...]) -> None:
    status, message = refusal(talk(*pieces))
    assert (status, message[:40]) == (431, "the head of the request is over 1000 byt")


def test_too_many_headers() -> None:
    status, message = refusal(talk(HEAD + b"".join(b"X-%d: a\r\n" % i for i in range(9)) + b"\r\n"))
    assert (status, message[:26]) == (431, "there are over 10 headers:")


@pytest.mark.parametrize("text", [b"nonsense", b"GET / HTTP/1.1\r\nbad header\r\n\r\n", b"\x16\x03\x01\x02\x00"])
def test_what_is_not_http(text: bytes) -> None:
    assert refusal(talk(text)) == (400, "this is not valid HTTP")


def test_a_slow_head_is_refused_and_a_silent_connection_closed() -> None:
    limits = replace(LIMITS, head_timeout=0.05)
    assert refusal(talk(b"POST /v1/comp", limits=limits))[0] == 408
    assert talk(limits=limits) == (0, {}, b"")
    assert talk(b"\r\n", limits=limits) == (0, {}, b"")


def test_a_slow_body_is_refused() -> None:
    head = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY)
    status, message = refusal(talk(head + BODY[:5], limits=replace(LIMITS, body_timeout=0.05)))
    assert (status, message[:31]) == (408, "the body did not come in time: ")
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
    assert refusal(talk(chunked, limits=replace(LIMITS, body_timeout=0.05)))[0] == 408


def test_what_comes_at_a_good_pace_may_take_longer() -> None:
    # 32 KiB are worth two seconds more than the timeout.
    body = BODY[:-1] + b" " * 33_000 + b"}"
    limits = replace(LIMITS, body_timeout=0.001)

    async def run() -> bytes:
        site, looked = Site(), asyncio.Event()

        class Watched(LimitedConnection):
            def _look(self) -> None:
                super()._look()
                if self._in_body:
                    looked.set()

        async with listening(site, limits, kind=Watched) as connect:
            reader, writer = await connect()
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body[:-1])
            await looked.wait()
            writer.write(body[-1:] + b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n")
            data: bytes = await reader.read()
            writer.close()
            return data

    assert asyncio.run(run()).startswith(b"HTTP/1.1 413")


def test_the_body_of_a_server_that_does_not_read_has_time() -> None:
    async def run() -> bytes:
        site, looked = Site(), asyncio.Event()

        class Paused(LimitedConnection):
            def _look(self) -> None:
                self.flow.pause_reading()
                super()._look()
                self.flow.resume_reading()
                self._stop_waiting()
                looked.set()

        async with listening(site, replace(LIMITS, body_timeout=0.001), kind=Paused) as connect:
            reader, writer = await connect()
            writer.write(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY[:-1])
            await looked.wait()
            writer.write(BODY[-1:])
            data: bytes = await reader.read()
            writer.close()
            return data

    assert asyncio.run(run()).startswith(b"HTTP/1.1 200")


def test_heads_of_one_connection_are_counted_apart() -> None:
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY

    async def run() -> bytes:
        site, came = Site(), asyncio.Event()

        class Watched(LimitedConnection):
            def data_received(self, data: bytes) -> None:
                super().data_received(data)
                came.set()

        async with listening(site, LIMITS, kind=Watched) as connect:
            reader, writer = await connect()
            for piece in (*[request] * 9, b"GET /health HTTP/1.1\r\n", b"Connection: close\r\n\r\n"):
                came.clear()
                writer.write(piece)
                await came.wait()
            data: bytes = await reader.read()
            writer.close()
            return data

    data = asyncio.run(run())
    assert (data.count(b'"text":"ab"'), data.count(b'"status":"ok"')) == (9, 1)


def test_a_connection_without_requests_is_closed_and_one_with_goes_on() -> None:
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    status, headers, body = talk(request, keep_alive=0.01, limits=replace(LIMITS, head_timeout=0.02))
    assert (status, "connection" in headers) == (200, False)
    assert json.loads(body)["choices"][0]["text"] == "ab"


def test_two_requests_at_once_on_one_connection() -> None:
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    _, _, rest = talk(request + request.replace(b"Host: x", b"Connection: close"))
    assert rest.count(b"HTTP/1.1 200") == 1
    assert rest.count(b'"text":"ab"') == 2


def test_what_came_before_something_bad_is_answered() -> None:
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    for bad in (b"nonsense", b"GET /" + b"a" * 1001 + b" HTTP/1.1\r\n"):
        status, _, body = talk(request + bad)
        assert (status, json.loads(body)["choices"][0]["text"]) == (200, "ab")
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n"
    assert refusal(talk(chunked)) == (400, "this is not valid HTTP")
    unknown = HEAD.replace(b"/v1/completions", b"/none") + b"Transfer-Encoding: chunked\r\n\r\n"
    assert talk(unknown, b"2\r\n{}\r\n", b"nonsense\r\n")[0] in (400, 404)


def test_a_client_that_does_not_read_is_disconnected() -> None:
    async def run() -> None:
        site = Site()
        async with listening(site, replace(LIMITS, send_timeout=0.05)) as connect:
            _, writer = await connect()
            body = json.dumps({"prompt": ["x" * 400] * 5, "n": 100, "max_tokens": 500, "stream": True}).encode()
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await until(lambda: site.engine.client.open_entries > 0)
            await until(lambda: site.engine.client.open_entries == 0)
            assert site.engine.scheduler.aborted or site.engine.scheduler.jobs == {}
            writer.close()

    asyncio.run(run())


def test_the_health_of_a_site_behind_limits() -> None:
    status, _, body = talk(b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert (status, json.loads(body)["status"]) == (200, "ok")
    assert talk(b"HEAD /health HTTP/1.1\r\nConnection: close\r\n\r\n")[2] == b""
    assert COMPLETIONS.encode() in HEAD
