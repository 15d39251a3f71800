"""One request's way through the engine, as an ASGI response that owns its `Generation`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmill.errors import TokenmillError
from tokenmill.server.client import EngineClient
from tokenmill.server.errors import ClientLeft, error_object, json_response
from tokenmill.server.generation import Generation
from tokenmill.server.protocol import GenerationRequest
from tokenmill.server.settings import AppSettings
from tokenmill.server.shapes import Shape, usage_json
from tokenmill.server.sse import COMMENT, DONE, Heartbeat, encode_event, send_events, start_stream
from tokenmill.wire.messages import TextDelta


class Answer(Response):
    """Generates while it is sent; leaving in any way, also by the client's, aborts what has not ended.

    Errors before the first byte are raised, for the app to map; later ones become the stream's last event.
    """

    def __init__(
        self,
        client: EngineClient,
        call: GenerationRequest,
        shape: Shape,
        settings: AppSettings,
        request_id: str,
        holder: str,
        size: int,
    ) -> None:
        super().__init__()
        self._client = client
        self._call = call
        self._shape = shape
        self._id = f"{shape.prefix}-{request_id}"
        self._model = settings.model
        self._keep_alive = settings.sse_keep_alive
        self._has_timings = settings.timings or call.timings
        self._name = request_name(holder, request_id)
        self._size = size
        self._created = int(time.time())
        self._extra_headers = {"x-request-id": request_id}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request; the body must have been received."""
        call = self._call
        options: dict[str, Any] = {"echo": call.echo, "scheduling": call.scheduling, "size": self._size}
        options["name"] = self._name
        with self._client.open(call.prompts, call.params, **options) as generation:
            watcher = asyncio.create_task(_watch(receive, generation))
            try:
                await generation.accepted()
                if call.stream:
                    await self._stream(generation, send)
                else:
                    body = await self._whole(generation)
                    await json_response(body, headers=self._extra_headers)(scope, receive, send)
            finally:
                watcher.cancel()

    async def _whole(self, generation: Generation) -> dict[str, Any]:
        parts: list[list[TextDelta]] = [[] for _ in range(generation.num_choices)]
        async for batch in generation.deltas():
            for index, delta in batch:
                parts[index].append(self._with_echo(delta))
        choices = []
        for index, deltas in enumerate(parts):
            entries = [its for delta in deltas for its in delta.logprobs or ()]
            last = msgspec.structs.replace(deltas[-1], logprobs=entries if self._has_logprobs else None)
            choices.append(self._shape.choice(index, "".join(delta.text for delta in deltas), last))
        body = self._envelope(self._shape.object, choices) | {"usage": usage_json(generation.usage)}
        if self._call.shows_prompt_logprobs:
            self._shape.add_prompt_logprobs(body, [deltas[0].prompt_logprobs or [] for deltas in parts])
        return body | {"timings": generation.timings} if self._has_timings else body

    @property
    def _has_logprobs(self) -> bool:
        return self._call.params.logprobs is not None

    def _with_echo(self, delta: TextDelta) -> TextDelta:
        """An echoed prompt's logprobs stand before the output's."""
        if not (self._call.echo and self._has_logprobs and delta.prompt_logprobs):
            return delta
        return msgspec.structs.replace(delta, logprobs=delta.prompt_logprobs + (delta.logprobs or []))

    async def _stream(self, generation: Generation, send: Send) -> None:
        await start_stream(send, self._extra_headers)
        last = b""
        beat = Heartbeat(self._keep_alive, generation.nudge)
        try:
            opening = [self._event(choice) for i in range(generation.num_choices) for choice in self._shape.opening(i)]
            await send_events(send, b"".join(opening))
            async for batch in generation.deltas():
                more = {"timings": generation.timings} if self._has_timings and generation.has_ended else {}
                chunks = [choice for i, delta in batch for choice in self._shape.chunks(i, self._with_echo(delta))]
                events = [self._event(choice, more if choice is chunks[-1] else {}) for choice in chunks]
                await send_events(send, b"".join(events) or COMMENT)
                beat.rest()
            if self._call.include_usage:
                usage = {"usage": usage_json(generation.usage)}
                last = encode_event(self._envelope(self._shape.chunk_object, []) | usage)
            last += DONE
        except ClientLeft:
            return
        except TokenmillError as error:
            last = encode_event(error_object(error))
        finally:
            beat.stop()
        await send_events(send, last, more=False)

    def _event(self, choice: dict[str, Any], more: dict[str, Any] = {}) -> bytes:  # noqa: B006  (only read)
        chunk = self._envelope(self._shape.chunk_object, [choice]) | more
        return encode_event(chunk | {"usage": None} if self._call.include_usage else chunk)

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}


def request_name(holder: str, request_id: str) -> str:
    """What `EngineClient.cancel` knows a request by, from its id or its answer's: nobody can end another key's."""
    return f"{holder}/{request_id.removeprefix('chatcmpl-').removeprefix('cmpl-')}"


async def _watch(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.fail(ClientLeft("the client left"))
