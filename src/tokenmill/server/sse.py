"""Server-sent events: one `data: {json}` line and a blank line each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import Send

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
# Raw in JSON, but line ends to clients that split events as Unicode text.
LINE_ENDS = tuple((mark.encode(), f"\\u{ord(mark):04x}".encode()) for mark in "\x85\u2028\u2029")


def encode_event(content: Any, name: str = "") -> bytes:
    """One event, of this name if it has one."""
    return (f"event: {name}\ndata: ".encode() if name else b"data: ") + _encode(content) + b"\n\n"


class Chunks:
    """Events that differ in the one item of their list `choices`, mostly: what is the same is encoded once."""

    def __init__(self, head: Mapping[str, Any], tail: Mapping[str, Any]) -> None:
        self._start = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._tail = tail
        self._end = self._end_with({})

    def encode(self, choice: Any, more: Mapping[str, Any]) -> bytes:
        """One event; `more` are fields that come last."""
        return self._start + _encode(choice) + (self._end_with(more) if more else self._end)

    def _end_with(self, more: Mapping[str, Any]) -> bytes:
        fields = {**self._tail, **more}
        return (b"]," + _encode(fields)[1:] if fields else b"]}") + b"\n\n"


def _encode(content: Any) -> bytes:
    data = msgspec.json.encode(content)
    if not data.isascii():
        for raw, escaped in LINE_ENDS:
            data = data.replace(raw, escaped)
    return data


class Heartbeat:
    """Calls `beat` when there was no `rest` for `period` seconds, and again after each such time; never if it is 0."""

    def __init__(self, period: float, beat: Callable[[], None]) -> None:
        self._period = period
        self._beat = beat
        self._loop = asyncio.get_running_loop()
        self._rested = self._loop.time()
        self._timer = self._loop.call_later(period, self._look) if period else None

    def rest(self) -> None:
        """Something was sent."""
        self._rested = self._loop.time()

    def stop(self) -> None:
        """No more beats."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        left = self._rested + self._period - self._loop.time()
        if left <= 0:
            self._beat()
            left = self._period
        self._timer = self._loop.call_later(left, self._look)


async def start_stream(send: Send, headers: Mapping[str, str]) -> None:
    """Send status 200 and the headers of a stream that no proxy may hold back."""
    fixed = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
    raw = MutableHeaders(headers={**fixed, **headers}).raw
    await send({"type": "http.response.start", "status": 200, "headers": raw})


async def send_events(send: Send, data: bytes, *, more: bool = True) -> None:
    """Send encoded events; waits while the client is slow to read."""
    if data or not more:
        await send({"type": "http.response.body", "body": data, "more_body": more})
