"""One request's way through the engine, as an ASGI response that owns its `Generation`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmill.errors import TokenmillError
from tokenmill.server.errors import ClientLeft, json_response, renamed
from tokenmill.server.generation import Generation
from tokenmill.server.protocol import GenerationRequest
from tokenmill.server.shapes import Head, Shape, Streamed
from tokenmill.server.sse import Heartbeat, send_events, start_stream
from tokenmill.wire.messages import TextDelta

MANY = 1000  # tokens whose logprobs would keep the event loop busy for long
Opening = Callable[[], AbstractContextManager[Generation]]
PREFIX = re.compile("^(chatcmpl-|cmpl-|resp_|msg_)")


class Answer(Response):
    """Generates while it is sent; leaving in any way, also by the client's, aborts what has not ended.

    Errors before the first byte are raised, for the app to map; later ones become the stream's last event.
    """

    def __init__(self, open_: Opening, call: GenerationRequest, shape: Shape, head: Head, keep_alive: float) -> None:
        super().__init__()
        self._open, self._call, self._shape, self._head = open_, call, shape, head
        self._keep_alive = keep_alive
        self._extra_headers = {"x-request-id": head.request_id}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request; the body must have been received."""
        call = self._call
        with self._open() as generation:
            watcher = asyncio.create_task(_watch(receive, generation))
            try:
                await generation.accepted()
                self._shape.start(self._head, generation)
                if call.stream and isinstance(self._shape, Streamed):
                    # A task of its own wakes up for each chunk without all the callers of this one.
                    await asyncio.create_task(self._stream(self._shape, generation, send))
                else:
                    body = await self._whole(generation)
                    await json_response(body, headers=self._extra_headers)(scope, receive, send)
            except TokenmillError as error:
                raise renamed(error, call.names)  # noqa: B904  (the same one)
            finally:
                watcher.cancel()

    async def _whole(self, generation: Generation) -> dict[str, Any]:
        deltas: list[list[TextDelta]] = [[] for _ in range(generation.num_choices)]
        async for batch in generation.deltas():
            for index, delta in batch:
                deltas[index].append(delta)
        entries = sum(len(its.logprobs or ()) + len(its.prompt_logprobs or ()) for parts in deltas for its in parts)
        return await asyncio.to_thread(self._shape.whole, deltas) if entries > MANY else self._shape.whole(deltas)

    async def _stream(self, shape: Streamed, generation: Generation, send: Send) -> None:
        await start_stream(send, self._extra_headers)
        last = b""
        beat = Heartbeat(self._keep_alive, generation.nudge)
        try:
            await send_events(send, shape.opening())
            async for batch in generation.deltas():
                await send_events(send, shape.news(batch) if batch else shape.beat())
                beat.rest()
            last = shape.ending()
        except ClientLeft:
            return
        except TokenmillError as error:
            last = shape.failure(renamed(error, self._call.names))
        finally:
            beat.stop()
        await send_events(send, last, more=False)


def request_name(holder: str, request_id: str) -> str:
    """What `EngineClient.cancel` knows a request by, from its id or its answer's: nobody can end another key's."""
    return f"{holder}/{PREFIX.sub('', request_id)}"


async def _watch(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.fail(ClientLeft("the client left"))
