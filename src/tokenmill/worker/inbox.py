"""Where a rank's messages come from: its own pipe, or, on ranks above 0, what rank 0 received.

Every rank takes in the same messages between the same two steps, so that all schedulers plan alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import zmq

from tokenmill.clock import milliseconds
from tokenmill.text.grammar_gate import GrammarGate
from tokenmill.types import StructuredOutputs
from tokenmill.wire.channel import PullChannel, PushChannel, Receiver, Sender, address
from tokenmill.wire.messages import Tick, ToScheduler


class LeaderInbox:
    """Rank 0's pipe: every batch of messages begins with the time, and is handed on to the followers."""

    def __init__(
        self,
        source: Receiver[ToScheduler],
        followers: Sequence[Sender[list[ToScheduler]]] = (),
        now: Callable[[], int] = milliseconds,
    ) -> None:
        self._source = source
        self._followers = followers
        self._now = now

    def receive(self, timeout: float | None = None) -> list[ToScheduler]:
        """The time and new messages, once they are on their way to the followers."""
        arrived = self._source.receive(timeout)
        messages = [Tick(self._now()), *arrived]
        for follower in self._followers:
            follower.send(messages)
        return messages

    def close(self) -> None:
        """Close all pipes."""
        self._source.close()
        for follower in self._followers:
            follower.close()


class FollowerInbox:
    """What rank 0 took in, one batch a call. The timeout is rank 0's: this waits for its batch."""

    def __init__(self, source: Receiver[list[ToScheduler]]) -> None:
        self._source = source
        self._batches: deque[list[ToScheduler]] = deque()

    def receive(self, timeout: float | None = None) -> list[ToScheduler]:
        """The messages of rank 0's next batch."""
        if not self._batches:
            self._batches.extend(self._source.receive())
        return self._batches.popleft()

    def close(self) -> None:
        """Close the pipe."""
        self._source.close()


def open_followers(context: zmq.Context[Any], addresses: Sequence[str]) -> list[Sender[list[ToScheduler]]]:
    """Rank 0's pipes to the others, which own the addresses."""
    return [PushChannel(context, where) for where in addresses]


def open_leader(
    context: zmq.Context[Any],
    directory: Path,
    followers: Sequence[str],
    compile_grammar: Callable[[StructuredOutputs], Future[Any]],
) -> LeaderInbox:
    """Rank 0's inbox, at the address "scheduler": it takes jobs in once their grammars are compiled.

    The others compile grammars when they are needed.
    """
    pipe = PullChannel[ToScheduler](context, address(directory, "scheduler"), ToScheduler)
    return LeaderInbox(GrammarGate(pipe, compile_grammar), open_followers(context, followers))
