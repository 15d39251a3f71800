"""A server of several ranks: answers, faults, neighbours, and two hosts on one machine."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.test_faults import error_at_the_end, streaming
from tests.support.server import PATIENCE, ROOT, Server, serving

pytestmark = [pytest.mark.server, pytest.mark.slow]
FLAGS = ("--dtype", "float32", "--threads", "1", "--num-pages", "256", "--debug-ranks")
GREEDY = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}


def answers(server: Server) -> list[str]:
    prompts = ["Once", "upon a time", "x" * 100]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda prompt: server.complete(prompt, **GREEDY), prompts))
    return [answer["choices"][0]["text"] for answer in found]


def test_two_servers_of_two_ranks_answer_as_one_rank_does(tiny: Path, server: Server) -> None:
    expected = answers(server)
    with serving(tiny, *FLAGS, "--tp", "2") as first, serving(tiny, *FLAGS, "--tp", "2", "--loop", "serial") as second:
        assert answers(first) == answers(second) == expected
        assert "tm-scheduler-1" in first.children
        metrics = first.get("/metrics").text
        assert 'tokenmill:rank_memory_bytes{model_name="' in metrics
        assert 'rank="1"' in metrics
        assert first.end(signal.SIGTERM) == 0
        assert answers(second) == expected


@pytest.mark.parametrize(
    ("number", "victim", "words"),
    [
        (signal.SIGKILL, 1, "the scheduler-1 process has ended: killed by SIGKILL"),
        (signal.SIGSTOP, 1, "rank 1 has given no sign of life for 3 s"),
        (signal.SIGSTOP, 0, "rank 0 has given no sign of life for 3 s"),
    ],
)
def test_a_rank_that_dies_or_hangs_ends_the_server(tiny: Path, number: int, victim: int, words: str) -> None:
    with (
        serving(tiny, *FLAGS, "--num-pages", "2200", "--tp", "2", "--rank-timeout", "3") as server,
        streaming(server) as events,
    ):
        server.children[f"tm-scheduler-{victim}"].send_signal(number)
        assert words in error_at_the_end(events)
        assert server.end() == 1
        assert words in server.log


def test_ranks_on_two_hosts_answer_together_and_end_together(tiny: Path, server: Server) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = (*FLAGS, "--tp", "2", "--nnodes", "2", "--rendezvous", place, "--rank-timeout", "4")
    command = [sys.executable, "-m", "tokenmill", "serve", str(tiny), *flags, "--node-rank", "1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as other:
        try:
            with serving(tiny, *flags) as leader:
                assert other.stdout is not None
                assert other.stdout.readline() == "tokenmill: ranks 1 to 1 of 2 ready; Ctrl-C stops\n"
                assert answers(leader) == answers(server)
                assert leader.end(signal.SIGTERM) == 0
            _, log = other.communicate(timeout=PATIENCE)
            assert other.returncode == 1
            assert "rank 0 has given no sign of life for 4 s" in log
        finally:
            other.kill()
