"""Typed one-way pipes between processes: ZeroMQ PUSH/PULL over ipc, and a twin in memory.

A sender never waits for the reader and never drops: the bounds on what is in flight are the server's
(`max_waiting`) and each request's own length, so high-water marks are off.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import zmq

from tokenmill.wire.messages import CallAnswer, Pulse, Refused, TextBatch, TextDelta, Tokenized, ToServer

T = TypeVar("T")
T_in = TypeVar("T_in", contravariant=True)


class Sender(Protocol[T_in]):
    """The writing end."""

    def send(self, message: T_in, /) -> None:
        """Queue one message; returns at once."""

    def close(self) -> None:
        """Flush and close."""


class Receiver(Protocol[T]):
    """The reading end."""

    def receive(self, timeout: float | None = None) -> list[T]:
        """All messages that are there, in order; waits up to `timeout` seconds (None: for ever, 0: not at all)."""

    def close(self) -> None:
        """Close; unread messages are lost."""


class MemoryChannel(Generic[T]):
    """Both ends in one process, without encoding. Single-threaded: an empty channel gives [] whatever the timeout."""

    def __init__(self) -> None:
        self._messages: deque[T] = deque()

    def send(self, message: T, /) -> None:
        """Queue one message."""
        self._messages.append(message)

    def receive(self, timeout: float | None = None) -> list[T]:
        """All queued messages."""
        taken = list(self._messages)
        self._messages.clear()
        return taken

    def close(self) -> None:
        """Nothing to do."""


class NullSender:
    """Takes messages and forgets them: the outward pipes of ranks above 0."""

    def send(self, message: object, /) -> None:
        """Forget it."""

    def close(self) -> None:
        """Nothing to do."""


def address(directory: Path, name: str) -> str:
    """The ipc address of pipe `name` in this run's private directory."""
    return f"ipc://{directory / name}"


class PushChannel(Generic[T]):
    """A PUSH socket, which connects."""

    def __init__(self, context: zmq.Context[Any], where: str) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.connect(where)

    def send(self, message: T, /) -> None:
        """Queue one message; returns at once."""
        self._socket.send(self._encode(message), copy=True)

    def close(self) -> None:
        """Flush for at most half a second and close."""
        self._socket.close()


class ServerChannel:
    """The pipes "server-0" and so on to the API servers; each gets what is about its own uids and serials."""

    def __init__(self, context: zmq.Context[Any], directory: Path, number: int) -> None:
        self._pipes = [PushChannel[ToServer](context, address(directory, f"server-{index}")) for index in range(number)]

    def send(self, message: ToServer, /) -> None:
        """Queue one message, in parts if several servers are concerned; returns at once."""
        number = len(self._pipes)
        if number == 1:
            self._pipes[0].send(message)
        elif isinstance(message, TextBatch):
            parts: list[list[TextDelta]] = [[] for _ in self._pipes]
            for delta in message.deltas:
                parts[delta.uid % number].append(delta)
            for pipe, part in zip(self._pipes, parts, strict=True):
                if part:
                    pipe.send(TextBatch(part))
        elif isinstance(message, Tokenized | Refused):
            self._pipes[message.uids[0] % number].send(message)
        elif isinstance(message, Pulse | CallAnswer):
            self._pipes[message.serial % number].send(message)

    def close(self) -> None:
        """Flush and close."""
        for pipe in self._pipes:
            pipe.close()


class PullChannel(Generic[T]):
    """A PULL socket, which binds, and decodes to `kind` (a msgspec type, usually a union of tagged structs)."""

    def __init__(self, context: zmq.Context[Any], where: str, kind: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._socket: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(where)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self, timeout: float | None = None) -> list[T]:
        """All messages that are there, in order; waits up to `timeout` seconds."""
        if not self._socket.poll(None if timeout is None else int(timeout * 1000)):
            return []
        messages: list[T] = []
        while True:
            try:
                messages.append(self._decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def fileno(self) -> int:
        """What an event loop watches: readable when something may have come since all was received."""
        return int(self._socket.getsockopt(zmq.FD))

    def close(self) -> None:
        """Close; unread messages are lost."""
        self._socket.close()
