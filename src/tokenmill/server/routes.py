"""The routes of the HTTP API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from tokenmill.errors import ModelNotFound, Overloaded
from tokenmill.server.answer import Answer
from tokenmill.server.client import EngineClient
from tokenmill.server.errors import BodyTooLarge, ClientLeft, WrongContentType, json_response
from tokenmill.server.protocol import GenerationRequest, check_request_id, decode_body, parse_chat, parse_completion
from tokenmill.server.schemas import CHAT_BODY, COMPLETION_BODY
from tokenmill.server.shapes import ChatShape, CompletionShape, Shape
from tokenmill.version import __version__


@dataclass(frozen=True)
class AppSettings:
    """What the routes need to know. `sampling_defaults` are the model's own; `health_timeout` is in seconds."""

    model: str
    max_model_len: int
    max_body_bytes: int
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    health_timeout: float = 5.0
    created: int = field(default_factory=lambda: int(time.time()))


def make_router(client: EngineClient, settings: AppSettings) -> APIRouter:
    """All routes, bound to one client."""
    router = APIRouter()
    card = {
        "id": settings.model,
        "object": "model",
        "created": settings.created,
        "owned_by": "tokenmill",
        "max_model_len": settings.max_model_len,
    }

    @router.post("/v1/chat/completions", openapi_extra=CHAT_BODY, summary="Chat, OpenAI-compatible")
    async def chat_completions(request: Request) -> Response:
        body = decode_body(await read_body(request, settings.max_body_bytes))
        return _answer(request, parse_chat(body, settings.sampling_defaults), ChatShape())

    @router.post("/v1/completions", openapi_extra=COMPLETION_BODY, summary="Text completion, OpenAI-compatible")
    async def completions(request: Request) -> Response:
        body = decode_body(await read_body(request, settings.max_body_bytes))
        return _answer(request, parse_completion(body, settings.sampling_defaults), CompletionShape())

    @router.get("/v1/models", summary="The model that is served")
    async def models() -> Response:
        return json_response({"object": "list", "data": [card]})

    @router.get("/v1/models/{name:path}", summary="One model")
    async def model(name: str) -> Response:
        _check_model(name)
        return json_response(card)

    @router.get("/health", summary="200 when the scheduler moves")
    async def health() -> Response:
        try:
            pulse = await client.probe(settings.health_timeout)
        except TimeoutError:
            raise Overloaded(f"the scheduler has not answered within {settings.health_timeout:g} s") from None
        return json_response({"status": "ok"} | msgspec.structs.asdict(pulse))

    @router.get("/version", summary="tokenmill's version")
    async def version() -> Response:
        return json_response({"version": __version__})

    def _answer(request: Request, call: GenerationRequest, shape: Shape) -> Response:
        if call.model is not None:
            _check_model(call.model)
        return Answer(client, call, shape, settings.model, request_id_of(request, call))

    def _check_model(name: str) -> None:
        if name != settings.model:
            raise ModelNotFound(f"no model {name!r} here: this server has {settings.model!r}")

    return router


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body.

    Raises WrongContentType: it is said to be something else than JSON; BodyTooLarge: it is over `limit` bytes;
    ClientLeft: the connection ended before the body did.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise WrongContentType(f"the body must be JSON: send Content-Type: application/json, not {kind[:80]!r}")
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft("the client left")
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
        # An oversized body is read on for a while, unkept: most clients look at the answer only after sending all.
        if size <= limit:
            parts.append(message.get("body", b""))
        elif not more or size > 4 * limit:
            raise BodyTooLarge(f"the body is over {limit} bytes: send less, or raise --max-body-bytes")
    return b"".join(parts)


def request_id_of(request: Request, call: GenerationRequest) -> str:
    """The body's request_id, else the X-Request-Id header, else a new one."""
    if call.request_id is not None:
        return call.request_id
    given = request.headers.get("x-request-id", uuid.uuid4().hex)
    check_request_id(given, "X-Request-Id")
    return given
