"""Where a rank's messages come from: its own pipe, or, on ranks above 0, what rank 0 received.

Every rank takes in the same messages between the same two steps, so that all schedulers plan alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import zmq

from tokenmill.wire.channel import PullChannel, Receiver, address
from tokenmill.wire.messages import ToScheduler


class LeaderInbox:
    """Rank 0's pipe, with every batch of frames handed on to the followers, empty ones too."""

    def __init__(self, source: PullChannel[ToScheduler], followers: list[zmq.Socket[bytes]]) -> None:
        self._source = source
        self._followers = followers

    def receive(self, timeout: float | None = None) -> list[ToScheduler]:
        """New messages, once they are on their way to the followers."""
        frames = self._source.receive_frames(timeout)
        for follower in self._followers:
            follower.send_multipart([b"", *frames])
        return [self._source.decode(frame) for frame in frames]

    def close(self) -> None:
        """Close all sockets."""
        self._source.close()
        for follower in self._followers:
            follower.close()


class FollowerInbox:
    """What rank 0 took in, one batch a call. The timeout is rank 0's: this waits for its batch."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._decode = msgspec.msgpack.Decoder(ToScheduler).decode

    def receive(self, timeout: float | None = None) -> list[ToScheduler]:
        """The messages of rank 0's next batch."""
        _, *frames = self._socket.recv_multipart()
        return [self._decode(frame) for frame in frames]

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def open_inbox(context: zmq.Context[Any], directory: Path, rank: int, size: int) -> Receiver[ToScheduler]:
    """The inbox of a rank. Rank 0 owns the address "scheduler", the others "rank-1", "rank-2", ..."""
    if rank > 0:
        socket: zmq.Socket[bytes] = context.socket(zmq.PULL)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address(directory, f"rank-{rank}"))
        return FollowerInbox(socket)
    followers: list[zmq.Socket[bytes]] = []
    for follower in range(1, size):
        push: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        push.setsockopt(zmq.SNDHWM, 0)
        push.setsockopt(zmq.LINGER, 500)
        push.connect(address(directory, f"rank-{follower}"))
        followers.append(push)
    return LeaderInbox(PullChannel(context, address(directory, "scheduler"), ToScheduler), followers)
