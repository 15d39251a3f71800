"""Ranks watch one another: one that hangs is named, where a collective would only wait."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

BEAT = struct.Struct("!iqq")  # rank, turns, bytes of memory


@dataclass(slots=True)
class Life:
    """What is known of another rank; times in seconds."""

    turns: int = 0
    num_bytes: int = 0
    silent: float = 0.0  # without a beat
    behind: float = 0.0  # without a turn, while another rank has made more


class Watch:
    """A rank's heart. It beats a few times in `silence` seconds, and hears those of all others.

    A rank that has not beaten for `silence` seconds, or is behind the others for `lateness`, is told of once.
    The silence of rank `trusted` means nothing.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        where: str,
        rank: int,
        size: int,
        *,
        silence: float,
        lateness: float,
        trusted: int | None = None,
    ) -> None:
        self.turns = 0  # of the loop; written by the thread that makes them
        self.num_bytes = 0
        self.lives = [Life() for _ in range(size)]
        self._rank, self._silence, self._lateness, self._trusted = rank, silence, lateness, trusted
        self._own: zmq.Socket[bytes] = context.socket(zmq.PUB)
        self._others: zmq.Socket[bytes] = context.socket(zmq.SUB)
        for its in (self._own, self._others):
            its.setsockopt(zmq.LINGER, 0)
        self._own.bind(where)
        self.address = self._own.getsockopt_string(zmq.LAST_ENDPOINT)
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, addresses: Sequence[str], lost: Callable[[str], None]) -> None:
        """Watch from now on; `lost` gets the words that name a rank, in a thread of this."""
        self._others.setsockopt(zmq.SUBSCRIBE, b"")
        for rank, address in enumerate(addresses):
            if rank != self._rank:
                self._others.connect(address)
        self._thread = threading.Thread(target=self._run, args=(lost,), name="rank-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the watch."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        self._own.close()
        self._others.close()

    def wait(self) -> None:
        """Until what a failed collective may mean has been told of, or the parent ends this process."""
        self._is_over.wait(self._silence + 2)

    def _run(self, lost: Callable[[str], None]) -> None:
        pause = self._silence / 8
        looked = time.monotonic()
        while not self._is_over.is_set():
            self._own.send(BEAT.pack(self._rank, self.turns, self.num_bytes))
            beat_at = time.monotonic() + pause
            while (left := beat_at - time.monotonic()) > 0 and self._others.poll(int(left * 1000) + 1):
                rank, turns, num_bytes = BEAT.unpack(self._others.recv())
                life = self.lives[rank]
                life.silent, life.behind = 0.0, life.behind if turns == life.turns else 0.0
                life.turns, life.num_bytes = turns, num_bytes
            now = time.monotonic()
            # A pause of this process itself, as when the machine sleeps, says nothing of the others.
            if words := self._look(min(now - looked, 2 * pause)):
                lost(words)
                return
            looked = now

    def _look(self, passed: float) -> str | None:
        most = max(self.turns, *(life.turns for life in self.lives))
        for rank, life in enumerate(self.lives):
            if rank == self._rank:
                life.turns, life.num_bytes = self.turns, self.num_bytes
                continue
            life.silent += passed
            life.behind = life.behind + passed if life.turns < most else 0.0
            if life.silent > self._silence and rank != self._trusted:
                return f"rank {rank} has given no sign of life for {self._silence:g} s"
            if life.behind > self._lateness:
                return f"rank {rank} hangs: the other ranks have waited for it for {self._lateness:g} s"
        return None
