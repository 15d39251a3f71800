"""Clients that leave, and processes that die, over a fake engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.site import COMPLETIONS, Site
from tokenmill.errors import WorkerDied


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
