"""HTTP connections with limits: uvicorn's protocol has none for the size and the pace of what comes in."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tokenmill.server.errors import RouteError, error_object

BODY_RATE = 16 * 1024
HEADER_OVERHEAD = 4
LINGER = 1.0


@dataclass(frozen=True)
class ConnectionLimits:
    """See the fields of ServerConfig of these names."""

    max_header_bytes: int
    max_headers: int
    head_timeout: float
    body_timeout: float
    send_timeout: float


class LimitedConnection(HttpToolsProtocol):
    """One connection. At most one timer waits for the client's bytes, and one for it to take the answer's."""

    def __init__(self, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._in_body = self._is_refused = False
        self._size = self._started_at = 0.0
        self._unparsed = 0
        self._fault = (400, "this is not valid HTTP")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client, or the server, closed."""
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request's head or body."""
        if self._is_refused:
            return
        if self._timer is None:
            self._wait()
        self._unparsed += len(data)
        super().data_received(data)
        # The parser tells of a header when it is complete: one that never is must be found by its raw size.
        if self._timer is not None and not self._in_body and self._unparsed > self._limits.max_header_bytes:
            self._refuse(431, self._head_too_large())

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._wait()
        self._size = 1

    def on_url(self, url: bytes) -> None:
        """A piece of the path."""
        super().on_url(url)
        self._grow_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer."""
        super().on_header(name, value)
        self._grow_head(len(name) + len(value) + HEADER_OVERHEAD)
        if len(self.headers) > self._limits.max_headers:
            most = self._limits.max_headers
            self._fail(431, f"there are over {most} headers: send fewer, or raise --max-headers")

    def on_headers_complete(self) -> None:
        """The head has come."""
        super().on_headers_complete()
        self._wait(in_body=True)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        super().on_body(body)
        self._size += len(body)

    def on_message_complete(self) -> None:
        """The request has come; bytes that follow in the same packet are not counted for the next one's head."""
        self._stop_waiting()
        self._unparsed = 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The client takes its answer more slowly than it comes."""
        super().pause_writing()
        self._stall = self.loop.call_later(self._limits.send_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has taken some of it."""
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """What could not be parsed is refused as `_fail` said, if it did."""
        self._refuse(*self._fault)

    def _wait(self, *, in_body: bool = False) -> None:
        self._stop_waiting()
        self._in_body = in_body
        self._size = 0
        self._started_at = self.loop.time()
        timeout = self._limits.body_timeout if in_body else self._limits.head_timeout
        self._timer = self.loop.call_later(timeout, self._look)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Time is over, unless it was the server that did not read, or much has come."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        left = self._limits.head_timeout if is_answering and not self._in_body else 0.0
        if self._in_body:
            left = self._started_at + self._limits.body_timeout + self._size / BODY_RATE - self.loop.time()
            left = max(left, self._limits.body_timeout if self.flow.read_paused else 0.0)
        if left > 0:
            self._timer = self.loop.call_later(left, self._look)
        elif self._in_body:
            self._refuse(408, "the body did not come in time: send it faster, or raise --body-timeout")
        elif self._size:
            self._refuse(408, "the head of the request did not come in time")
        else:
            self.transport.close()

    def _grow_head(self, size: int) -> None:
        self._size += size
        if not self._in_body and self._size > self._limits.max_header_bytes:
            self._fail(431, self._head_too_large())

    def _head_too_large(self) -> str:
        most = self._limits.max_header_bytes
        return f"the head of the request is over {most} bytes: send less, or raise --max-header-bytes"

    def _fail(self, status: int, message: str) -> None:
        """Have the parser stop, which calls `send_400_response`."""
        self._fault = (status, message)
        raise ValueError(message)

    def _refuse(self, status: int, message: str) -> None:
        """Answer what was read last, unless its answer has begun, and close.

        Closing with bytes unread would reset the connection, and take the answer away from a client that still sends.
        """
        self._stop_waiting()
        if self.transport.is_closing():
            return
        self._is_refused = True
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and not self._in_body:
            cycle.keep_alive = False  # what came before is answered first, and its end closes the connection
            return
        if cycle is None or not (self._in_body and cycle.response_started):
            body = msgspec.json.encode(error_object(RouteError(message, status)))
            head = [
                STATUS_LINE[status].rstrip(),
                b"content-type: application/json",
                b"content-length: %d" % len(body),
                b"x-request-id: %s" % uuid.uuid4().hex.encode(),
                b"connection: close",
            ]
            self.transport.write(b"\r\n".join([*head, b"", body]))
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER, self.transport.close)
