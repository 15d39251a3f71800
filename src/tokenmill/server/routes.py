"""The routes of the HTTP API."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from tokenmill.clock import milliseconds
from tokenmill.errors import ModelNotFound, UnsupportedField
from tokenmill.server.answer import Answer, request_name
from tokenmill.server.apis import APIS, DETOKENIZE_BODY, TOKENIZE_BODY, answers_of, api_body
from tokenmill.server.cache_routes import add_cache_routes
from tokenmill.server.client import EngineClient
from tokenmill.server.errors import BodyTooLarge, ClientLeft, RouteError, WrongContentType, json_response
from tokenmill.server.metrics import CONTENT_TYPE, render
from tokenmill.server.protocol import decode_body, parse_detokenize, parse_tokenize
from tokenmill.server.shapes import Head
from tokenmill.text.dialect import Dialect
from tokenmill.types import MAX_NAME
from tokenmill.version import __version__
from tokenmill.wire.messages import TextCall

LARGE = 2**18  # bytes of a body that is read on a thread, beside other requests


@dataclass(frozen=True)
class AppSettings:
    """What the routes need to know.

    `has_priorities`: requests may have one. `sampling_defaults` and `dialect` are the model's own. The scheduler must
    answer within `answer_timeout` seconds. A stream without news for `sse_keep_alive` seconds gets a comment; 0 is
    never. `timings`: every answer has them.
    """

    model: str
    max_model_len: int
    max_body_bytes: int
    has_priorities: bool
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    dialect: Dialect = field(default_factory=Dialect)
    answer_timeout: float = 5.0
    sse_keep_alive: float = 0.0
    timings: bool = False
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

    @router.get("/v1/models", responses=answers_of("/v1/models"), summary="The model that is served")
    async def models() -> Response:
        return json_response({"object": "list", "data": [card]})

    @router.get("/v1/models/{name:path}", responses=answers_of("/v1/models/{name}"), summary="One model")
    async def model(name: str) -> Response:
        _check_model(name)
        return json_response(card)

    @router.get("/health", responses=answers_of("/health"), summary="200 when the scheduler moves")
    async def health() -> Response:
        pulse = await client.probe(settings.answer_timeout)
        return json_response({"status": "ok"} | msgspec.structs.asdict(pulse))

    @router.get("/ready", responses=answers_of("/ready"), summary="200 while new requests are taken")
    async def ready() -> Response:
        client.check_ready()
        return json_response({"status": "ready"})

    @router.get(
        "/metrics",
        response_class=PlainTextResponse,
        responses=answers_of(),
        summary="The scheduler's state, for Prometheus",
    )
    async def metrics() -> Response:
        body = render(await client.probe(settings.answer_timeout), settings.model)
        return Response(body, headers={"Content-Type": CONTENT_TYPE})

    words = "End a request by its X-Request-Id, or its answer's id"

    @router.post(
        "/v1/requests/{request_id:path}/cancel", responses=answers_of("/v1/requests/{request_id}/cancel"), summary=words
    )
    async def cancel(request: Request, request_id: str) -> Response:
        number = await client.cancel(request_name(request.state.holder, request_id), settings.answer_timeout)
        if not number:
            raise RouteError(f"no request {request_id[:MAX_NAME]!r} is running or waiting", 404)
        return json_response({"id": request_id, "object": "request.cancelled", "cancelled": number})

    @router.get("/version", responses=answers_of("/version"), summary="tokenmill's version")
    async def version() -> Response:
        return json_response({"version": __version__})

    async def read(request: Request, parse: Callable[..., Any], *rest: Any) -> tuple[Any, int]:
        raw = await read_body(request, settings.max_body_bytes)
        work = partial(_parsed, raw or b"{}", parse, *rest)
        return await asyncio.to_thread(work) if len(raw) > LARGE else work(), len(raw)

    @router.post("/tokenize", openapi_extra=TOKENIZE_BODY, summary="The tokens of a prompt or of messages")
    async def tokenize(request: Request) -> Response:
        (name, call, prompt), size = await read(request, parse_tokenize)
        _check_model(name)
        return json_response(await client.ask(call, settings.answer_timeout, prompt, size))

    @router.post("/detokenize", openapi_extra=DETOKENIZE_BODY, summary="The text of tokens")
    async def detokenize(request: Request) -> Response:
        (name, call), size = await read(request, parse_detokenize)
        _check_model(name)
        return json_response(await client.ask(call, settings.answer_timeout, size=size))

    add_cache_routes(router, client, read, settings.answer_timeout)

    async def answer(path: str, request: Request) -> Response:
        api, came = APIS[path], milliseconds()
        call, size = await read(request, api.parse, settings.sampling_defaults, came, settings.dialect)
        _check_model(call.model)
        if api.shape is None:
            told = await client.ask(TextCall(), settings.answer_timeout, call.prompts[0], size)
            return json_response({"input_tokens": told["count"]})
        if call.scheduling.priority and not settings.has_priorities:
            advice = "start the server with --policy priority or --eviction priority, or leave it out"
            raise UnsupportedField(f"priority means nothing to this server's policies: {advice}", "priority")
        state = request.state
        if state.holder:
            # A key's users are tenants of their own, but never those of another key's users.
            tenant = f"{state.holder}/{call.scheduling.tenant}"[:MAX_NAME]
            scheduling = msgspec.structs.replace(call.scheduling, tenant=tenant)
            call = dataclasses.replace(call, scheduling=scheduling)
        request_id, has_timings = call.request_id or state.request_id, settings.timings or call.timings
        head = Head(request_id, settings.model, int(time.time()), has_timings)
        options: dict[str, Any] = {"scheduling": call.scheduling, "name": request_name(state.holder, request_id)}
        opening = partial(client.open, call.prompts, call.params, echo=call.echo, size=size, **options)
        return Answer(opening, call, api.shape(call, settings.dialect), head, settings.sse_keep_alive)

    for path, api in APIS.items():
        router.post(path, openapi_extra=api_body(path), summary=api.summary)(partial(answer, path))

    def _check_model(name: str | None) -> None:
        if name not in (None, settings.model):
            raise ModelNotFound(f"no model {name!r} here: this server has {settings.model!r}")

    return router


def _parsed(raw: bytes, parse: Callable[..., Any], *rest: Any) -> Any:
    return parse(decode_body(raw), *rest)


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
