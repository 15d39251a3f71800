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


class PullChannel(Generic[T]):
    """A PULL socket, which binds, and decodes to `kind` (a msgspec type, usually a union of tagged structs)."""

    def __init__(self, context: zmq.Context[Any], where: str, kind: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._socket: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(where)

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

    def close(self) -> None:
        """Close; unread messages are lost."""
        self._socket.close()
