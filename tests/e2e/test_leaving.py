"""Clients that leave at any moment: no page, no slot and no file descriptor stays behind."""

from __future__ import annotations

import json
import random
import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.server import Server, serving, settled

pytestmark = pytest.mark.server
CLIENTS = 200
POOL = 1024
FLAGS = (
    "--dtype",
    "float32",
    "--page-size",
    "4",
    "--num-pages",
    str(POOL // 4),
    "--prefill-budget",
    "32",
    "--max-running",
    "4",
    "--max-waiting",
    "1000",
    "--threads",
    "1",
)


@pytest.fixture(scope="module", params=["overlap", "serial"])
def small(tiny: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """Few pages and slots, so that most requests wait, and prompts take many steps."""
    with serving(tiny, *FLAGS, "--tokenizers", "2", "--debug-checks", "--loop", request.param) as server:
        yield server


def request_of(draw: random.Random) -> bytes:
    """Any request that the server accepts, which runs long."""
    shared = draw.choice([0, 40, 300])
    prompt = [5 + i % 200 for i in range(shared)] + [draw.randrange(4, 260) for _ in range(draw.randrange(1, 300))]
    fields: dict[str, Any] = {
        "prompt": draw.choice([prompt, [prompt, [*prompt[:shared], 9]]]),
        "max_tokens": POOL - len(prompt),
        "ignore_eos": True,
        "stream": draw.random() < 0.8,
        "n": draw.choice([1, 1, 3]),
    }
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def visit(port: int, seed: int) -> None:
    """Send a part or the whole of a request, read a part of the answer, and leave, politely or not."""
    draw = random.Random(seed)
    request = request_of(draw)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        if draw.random() < 0.3:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))
        stage = draw.randrange(5)
        connection.sendall(request if stage else request[: draw.randrange(len(request))])
        if stage == 1:
            select.select([connection], [], [], draw.random() / 5)
        elif stage > 2 and b'"stream": true' in request:
            # The head comes while a request waits for a slot; its prompt is computed before the first event.
            events, head = draw.choice([0, 1, 2, 20]), b""
            while head.count(b"data: ") < events or b"\r\n\r\n" not in head:
                data = connection.recv(65536)
                assert data, head
                head += data


def connect_all(server: Server) -> None:
    """Use every pipe between the processes: they are connected in the background, with descriptors of their own."""
    answer = server.complete(
        ["through one tokenizer", "and the other"], stop="aa", logit_bias={"68": 100}, max_tokens=900
    )
    assert [choice["stop_reason"] for choice in answer["choices"]] == ["aa", "aa"]
    # The detokenizer found the stop strings, and only its word ends these requests this soon.
    assert settled(server.pulse, lambda pulse: not pulse["running"])["generated_tokens"] < 1800


def descriptors(server: Server) -> dict[str, int]:
    processes = {"server": psutil.Process(server.pid)} | server.children
    return {name: process.num_fds() for name, process in processes.items()}


def test_clients_that_leave_leave_nothing(small: Server) -> None:
    connect_all(small)
    before = descriptors(small)
    with ThreadPoolExecutor(40) as pool:
        list(pool.map(visit, [small.port] * CLIENTS, range(CLIENTS)))
    pulse = settled(small.pulse, lambda pulse: not pulse["running"] and not pulse["waiting"])
    assert (pulse["running"], pulse["waiting"]) == (0, 0)
    assert pulse["free_pages"] + pulse["cached_pages"] == pulse["num_pages"]
    assert pulse["steps"] > CLIENTS
    after = settled(lambda: descriptors(small), lambda after: all(after[name] <= before[name] for name in before))
    assert all(after[name] <= before[name] for name in before), (before, after)
    # Only with every page free or evictable is there room for this one.
    for seed in (0, 5):
        filling = [4 + seed + i * i % 250 for i in range(POOL - 1)]
        assert small.complete(filling, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert "ERROR" not in small.log
