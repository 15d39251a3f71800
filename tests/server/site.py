"""The app over a fake engine, and a client for it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tests.server.fakes import FakeEngine
from tokenmill.server.app import create_app
from tokenmill.server.routes import AppSettings

SETTINGS = AppSettings(
    model="org/tiny",
    max_model_len=1000,
    max_body_bytes=20_000,
    has_priorities=False,
    answer_timeout=0.05,
    created=7,
)
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


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == response.status_code
    return error
