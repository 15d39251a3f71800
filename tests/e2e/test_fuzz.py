"""Mutated bodies against a real server. TOKENMILL_FUZZ=20000 sends so many, TOKENMILL_FUZZ_SEED=1 others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.support.described import hold_to_schema
from tests.support.judge import fault_of
from tests.support.mutations import SEEDS, WEATHER, Shot, shots
from tests.support.server import Server, serving, settled
from tests.support.tiny_models import make_tiny_llama

pytestmark = pytest.mark.server
COUNT = int(os.environ.get("TOKENMILL_FUZZ", "500"))
SEED = int(os.environ.get("TOKENMILL_FUZZ_SEED", "0"))
CLIENTS = 6
MORE_THINGS, MORE_MEMORY = 24, 64  # connections that are still open, and caches that fill
FLAGS = ("--served-model-name", "tiny", "--dtype", "float32", "--threads", "1", "--tokenizers", "1", "--debug-checks")
PROBES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "Once upon", "max_tokens": 16, "ignore_eos": True, "logprobs": 1, "echo": True}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 9, "temperature": 1, "seed": 5, "n": 2, "ignore_eos": True}),
    ("/v1/chat/completions", {**SEEDS["/v1/chat/completions"][3], "seed": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "tools": [WEATHER]}),
    ("/v1/embeddings", {"input": "a text"}),
    ("/tokenize", {"prompt": "a text"}),
)
PLAIN = {"temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """What is not bounded by its request ends with this model's context."""
    model = make_tiny_llama(tmp_path_factory.mktemp("fuzz"), max_position=1024)
    with serving(model, *FLAGS) as running:
        yield running


def answers(server: Server) -> list[Any]:
    """What the probes are answered, without what is new each time."""
    found = []
    for path, fields in PROBES:
        response = server.post(path, **(PLAIN if path.endswith("completions") else {}) | fields)
        assert response.status_code == 200, response.text
        found.append({name: value for name, value in response.json().items() if name in ("choices", "data", "tokens")})
    return found


def fire(base: str, every: list[Shot]) -> list[str]:
    """Send them one after the other; returns what was wrong with answers."""
    faults = []
    with httpx.Client(base_url=base, timeout=60) as client:
        for shot in every:
            try:
                response = client.request(shot.method, shot.path, content=shot.body, headers=shot.headers)
                fault = fault_of(response)
            except httpx.HTTPError as error:
                fault = repr(error)
            if fault is not None:
                faults.append(f"{fault}: {shot.method} {shot.path} {shot.headers} {shot.body[:2000]!r}")
    return faults


def volley(server: Server, every: list[Shot]) -> None:
    """Send them by several clients at once; all answers must be right in form."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        parts = [every[index::CLIENTS] for index in range(CLIENTS)]
        faults = [fault for some in pool.map(fire, [server.base] * CLIENTS, parts) for fault in some]
    assert not faults, "\n".join(faults[:20])


def held(server: Server) -> tuple[int, int, int]:
    """Processes, their threads and descriptors, and the MiB that they share with nobody."""
    processes = (psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True))
    used = sum(its.memory_full_info().uss for its in processes) >> 20
    return len(processes), sum(its.num_fds() + its.num_threads() for its in processes), used


def test_answers_are_as_described(server: Server) -> None:
    with httpx.Client(timeout=60) as client:

        def send(request: httpx.Request) -> httpx.Response:
            url = request.url.copy_with(host="127.0.0.1", port=server.port)
            return client.send(httpx.Request(request.method, url, headers=request.headers, content=request.read()))

        document = server.get("/openapi.json").json()
        assert hold_to_schema(send, document) > len(document["paths"])


def test_nothing_that_comes_in_harms_the_server(server: Server) -> None:
    before = answers(server)
    every = list(shots(SEED, COUNT))
    quarter = len(every) // 4
    volley(server, every[:quarter])
    answers(server)
    processes, things, used = held(server)
    volley(server, every[quarter:])
    pulse = settled(server.pulse, lambda pulse: pulse["running"] + pulse["waiting"] == 0)
    assert pulse["running"] + pulse["waiting"] == 0
    assert answers(server) == before
    assert server.post("/v1/cache/flush", with_pins=True).status_code == 200
    pulse = server.pulse()
    assert pulse["free_pages"] == pulse["num_pages"]
    after = held(server)
    print(f"{COUNT} requests: {(processes, things, used)} after a quarter, {after} at the end")
    assert after[0] <= processes
    assert after[1] <= things + MORE_THINGS
    assert after[2] <= used + MORE_MEMORY
