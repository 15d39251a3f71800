"""Full queues, deadlines, priorities and the prefix cache's routes against real servers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.server import Server, serving, settled

pytestmark = pytest.mark.server
PATH = "/v1/completions"
NAME = "tiny"
SMALL = ("--served-model-name", NAME, "--dtype", "float32", "--threads", "1", "--debug-checks", "--debug-ranks")
ENDLESS: dict[str, Any] = {"prompt": "Once", "max_tokens": 30_000, "ignore_eos": True}


@contextlib.contextmanager
def running(server: Server, **fields: Any) -> Iterator[httpx.Response]:
    """A stream that has its first token and does not end by itself, when all that were before it have left."""
    settled(server.pulse, lambda pulse: not pulse["running"] and not pulse["waiting"])
    with server.stream(PATH, **ENDLESS | fields) as response:
        lines = response.iter_lines()  # a generator that is dropped closes the response
        assert next(lines).startswith("data: ")
        yield response


@contextlib.contextmanager
def waiting(server: Server, count: int, **fields: Any) -> Iterator[None]:
    """Streams that wait in the queue."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            assert stack.enter_context(server.stream(PATH, **ENDLESS | fields)).status_code == 200
        assert server.pulse()["waiting"] == count
        yield


@pytest.fixture(scope="module")
def narrow(tiny: Path) -> Iterator[Server]:
    """One request runs, four wait."""
    limits = ("--max-running", "1", "--max-waiting", "4", "--max-waiting-tokens", "400")
    with serving(tiny, *SMALL, *limits, "--policy", "priority") as server:
        yield server


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    return error


def test_a_full_queue_is_a_503_and_the_connection_stays_of_use(narrow: Server) -> None:
    with running(narrow), waiting(narrow, 4), httpx.Client(base_url=narrow.base) as client:
        for stream in (False, True):
            refused = client.post(PATH, json={"prompt": "x", "stream": stream})
            assert refused.status_code == 503
            assert "4 requests are waiting" in error_of(refused)["message"]
            assert int(refused.headers["retry-after"]) >= 1
        assert client.get("/version").status_code == 200
        assert len(client._transport._pool.connections) == 1  # type: ignore[attr-defined]
    with running(narrow), waiting(narrow, 1, prompt="x" * 300):
        refused = narrow.post(PATH, prompt="y" * 101)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "300 tokens, of at most 400" in error_of(refused)["message"]
    assert narrow.post(PATH, prompt="x", n=9, max_tokens=1).status_code == 400
    assert narrow.complete("x", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2


def test_the_official_client_tries_again_when_told_to(narrow: Server) -> None:
    holder = contextlib.ExitStack()
    holder.enter_context(running(narrow))
    holder.enter_context(waiting(narrow, 4))
    seen: list[int] = []

    def look(response: httpx.Response) -> None:
        seen.append(response.status_code)
        holder.close()

    with httpx.Client(event_hooks={"response": [look]}) as http:
        client = openai.OpenAI(base_url=f"{narrow.base}/v1", api_key="none", http_client=http, max_retries=2)
        answer = client.completions.create(model=NAME, prompt="x", max_tokens=1, temperature=0)
    assert answer.choices[0].finish_reason == "length"
    assert seen == [503, 200]


@pytest.mark.parametrize("stream", [False, True])
def test_deadlines_end_requests_that_wait(narrow: Server, stream: bool) -> None:
    with running(narrow):
        response = narrow.post(PATH, prompt="x", deadline_ms=150, stream=stream)
        if stream:
            assert response.status_code == 200
            assert response.text.startswith('data: {"error":')
            assert "504" in response.text
            assert "[DONE]" not in response.text
        else:
            assert (response.status_code, response.headers["x-should-retry"]) == (504, "false")
        pulse = narrow.pulse()
        assert (pulse["running"], pulse["waiting"]) == (1, 0)


def test_deadlines_end_requests_that_run_and_keep_their_text(narrow: Server) -> None:
    answer = narrow.complete("Once", max_tokens=30_000, ignore_eos=True, timeout=0.5)
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "deadline")
    assert 0 < answer["usage"]["completion_tokens"] < 30_000
    client = openai.OpenAI(base_url=f"{narrow.base}/v1", api_key="none", max_retries=0)
    more = {"ignore_eos": True, "deadline_ms": 300}
    stream = client.completions.create(model=NAME, prompt="Once", max_tokens=30_000, stream=True, extra_body=more)
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "abort"
    assert narrow.pulse()["running"] == 0


def test_a_higher_priority_overtakes(narrow: Server) -> None:
    order: list[int] = []

    def ask(priority: int) -> None:
        # Long enough for a slow thread of a busy machine to note its end before the next ends.
        fields = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "priority": priority}
        assert httpx.post(narrow.base + PATH, json=fields, timeout=120).is_success
        order.append(priority)

    with contextlib.ExitStack() as stack:
        stack.enter_context(running(narrow))
        threads = []
        for count, priority in enumerate((1, 3, 2, 3), 1):
            threads.append(threading.Thread(target=ask, args=(priority,)))
            threads[-1].start()
            settled(narrow.pulse, lambda pulse, count=count: pulse["waiting"] == count)
        stack.close()
        for thread in threads:
            thread.join()
    assert narrow.pulse()["waiting"] == 0
    assert sorted(order[:2]) == [3, 3]
    assert order[2:] == [2, 1]


def test_priorities_are_refused_where_nobody_looks_at_them(server: Server) -> None:
    response = server.post(PATH, prompt="x", priority=1)
    assert (response.status_code, error_of(response)["param"]) == (400, "priority")


def test_the_prefix_cache_as_a_tool(tiny: Path) -> None:
    prompt, salted = "a" * 40, {"cache_salt": "mine"}
    with serving(tiny, *SMALL, "--num-pages", "16") as server:

        def post(verb: str, **fields: Any) -> dict[str, Any]:
            response = server.post(f"/v1/cache/{verb}", **fields)
            assert response.status_code == 200, response.text
            return response.json()

        assert post("probe", prompt=prompt)["hit_tokens"] == 0
        for cached in (0, 32):
            usage = server.complete(prompt, max_tokens=2, **salted)["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached
        assert post("probe", prompt=prompt)["hit_tokens"] == 0, "of another salt"
        assert post("pin", prompt=prompt, ttl=60, **salted)["pinned_tokens"] == 32
        for letter in "bcdefgh":
            server.complete(letter * 60, max_tokens=2)
        assert post("probe", prompt=prompt, **salted)["hit_tokens"] == 32
        assert post("probe", prompt="b" * 60)["hit_tokens"] == 0, "evicted"
        stats = server.get("/v1/cache").json()
        assert (stats["num_pins"], stats["hits"], stats["pages"]["pinned"]) == (1, 1, 2)
        assert stats["evicted_pages"] > 0
        server.complete("z" * 200, max_tokens=2)
        refused = server.post("/v1/cache/pin", prompt="z" * 200, ttl=60)
        assert (refused.status_code, "at most 128" in error_of(refused)["message"]) == (400, True)
        assert post("unpin", prompt=prompt, **salted)["unpinned_tokens"] == 32
        tree = server.get("/v1/cache/tree?format=text").text
        assert "32 tokens [" in tree
        assert "mine" not in tree
        assert post("flush", with_pins=True)["freed_pages"] > 0
        assert server.get("/v1/cache").json()["pages"]["free"] == 16


def test_schedulers_that_disagree_end_the_server(tiny: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("import random\ndef order(request, queue): return random.random()\n")
    flags = ("--policy", f"{own}:order", "--max-running", "1", "--debug-ranks")
    with serving(tiny, *flags) as server:
        response = server.post(PATH, prompt=[[5 + i] for i in range(99)], max_tokens=2)
        assert response.status_code == 500
        assert "different plans" in error_of(response)["message"]
        assert server.end() == 1
        assert "different plans" in server.log
        assert "Traceback" not in server.log
