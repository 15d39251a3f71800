"""Server-sent events: one `data: {json}` line and a blank line each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import Send

DONE = b"data: [DONE]\n\n"
# Raw in JSON, but line ends to clients that split events as Unicode text.
LINE_ENDS = tuple((mark.encode(), f"\\u{ord(mark):04x}".encode()) for mark in "\x85\u2028\u2029")


def encode_event(content: Any) -> bytes:
    """One event."""
    data = msgspec.json.encode(content)
    for raw, escaped in LINE_ENDS:
        data = data.replace(raw, escaped)
    return b"data: " + data + b"\n\n"


async def start_stream(send: Send, headers: Mapping[str, str]) -> None:
    """Send status 200 and the headers of a stream that no proxy may hold back."""
    fixed = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
    raw = MutableHeaders(headers={**fixed, **headers}).raw
    await send({"type": "http.response.start", "status": 200, "headers": raw})


async def send_events(send: Send, data: bytes, *, more: bool = True) -> None:
    """Send encoded events; waits while the client is slow to read."""
    if data or not more:
        await send({"type": "http.response.body", "body": data, "more_body": more})
