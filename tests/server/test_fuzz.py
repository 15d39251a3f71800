"""Requests of every kind, right and wrong, against the app over a fake engine. TOKENMILL_EXAMPLES=100 makes more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace

import httpx
import pytest

from tests.server.fakes import FakeEngine
from tests.server.site import SETTINGS, Site
from tests.support.described import CONFORMANCE, hold_to_schema
from tests.support.judge import fault_of
from tests.support.mutations import SEEDS, shots
from tokenmill.server.app import create_app

Send = Callable[[httpx.Request], httpx.Response]


@pytest.fixture
def send() -> Iterator[Send]:
    """Asks the app, which must have put everything away at the end."""
    site = Site()
    site.engine = FakeEngine(max_waiting=20)
    site.app = create_app(site.engine.client, replace(SETTINGS, answer_timeout=60.0))
    with asyncio.Runner() as runner:
        opened = site.open()
        http = runner.run(opened.__aenter__())
        yield lambda request: runner.run(http.send(request))
        runner.run(opened.__aexit__(None, None, None))


def test_what_the_schema_tells(send: Send) -> None:
    document = send(httpx.Request("GET", "http://test/openapi.json")).json()
    assert hold_to_schema(send, document, CONFORMANCE[:2]) > len(document["paths"])


def test_mutated_bodies(send: Send) -> None:
    for shot in shots(0, 300):
        url = httpx.URL("http://test", path=shot.path)
        response = send(httpx.Request(shot.method, url, headers=shot.headers, content=shot.body))
        fault = fault_of(response)
        assert fault is None, f"{fault}: {shot} {response.text[:500]}"


def test_every_route_that_takes_a_body_is_tried(send: Send) -> None:
    paths = send(httpx.Request("GET", "http://test/openapi.json")).json()["paths"]
    assert {path for path in paths if "post" in paths[path]} == set(SEEDS)
