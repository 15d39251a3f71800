"""A rank that is silent, or behind, is told of by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from queue import SimpleQueue

import pytest
import zmq

from tokenmill.wire.channel import address
from tokenmill.worker.watch import BEAT, Watch


@pytest.fixture
def watches(tmp_path: Path) -> Iterator[list[Watch]]:
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        yield [
            stack.enter_context(
                closing(Watch(context, address(tmp_path, f"beat-{rank}"), rank, 3, silence=0.8, lateness=1.2))
            )
            for rank in range(3)
        ]


def begin(watches: list[Watch], among: list[Watch]) -> SimpleQueue[str]:
    words: SimpleQueue[str] = SimpleQueue()
    for watch in among:
        watch.begin([its.address for its in watches], words.put)
    return words


def test_a_silent_rank_is_named(watches: list[Watch]) -> None:
    words = begin(watches, watches[:2])
    assert words.get(timeout=30) == "rank 2 has given no sign of life for 0.8 s"


def test_the_silence_of_a_trusted_rank_means_nothing(tmp_path: Path) -> None:
    limits = {"silence": 0.4, "lateness": 60.0}
    with zmq.Context() as context, ExitStack() as stack:
        watches = [
            stack.enter_context(
                closing(Watch(context, address(tmp_path, f"beat-{rank}"), rank, 3, trusted=0, **limits))  # type: ignore[arg-type]
            )
            for rank in range(3)
        ]
        words = begin(watches, watches[1:2])
        assert words.get(timeout=30) == "rank 2 has given no sign of life for 0.4 s", "rank 0 was as silent"


def test_a_rank_that_stays_behind_is_named(watches: list[Watch]) -> None:
    watches[0].turns = watches[1].turns = 7
    watches[2].turns = 6
    words = begin(watches, watches)
    assert words.get(timeout=30) == "rank 2 hangs: the other ranks have waited for it for 1.2 s"


def test_ranks_that_live_know_one_another(watches: list[Watch], tmp_path: Path) -> None:
    watches[2].turns, watches[2].num_bytes = 5, 1 << 40
    watches[0].turns = watches[1].turns = 5
    words = begin(watches, watches)
    context: zmq.Context[zmq.Socket[bytes]]
    with zmq.Context() as context, context.socket(zmq.SUB) as listener:
        listener.setsockopt(zmq.SUBSCRIBE, b"")
        listener.connect(watches[0].address)
        for _ in range(12):  # longer than any silence that would be told of
            assert BEAT.unpack(listener.recv()) == (0, 5, 0)
    assert (watches[0].lives[2].turns, watches[0].lives[2].num_bytes) == (5, 1 << 40)
    assert words.empty()
