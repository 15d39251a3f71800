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
from tokenmill.server.errors import ClientLeft, RouteError, json_response
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
    router, its = APIRouter(), _Routes(client, settings)
    for path, route, summary in (
        ("/v1/models", its.models, "The model that is served"),
        ("/v1/models/{name:path}", its.model, "One model"),
        ("/health", its.health, "200 when the scheduler moves"),
        ("/ready", its.ready, "200 while new requests are taken"),
        ("/version", its.version, "tokenmill's version"),
    ):
        router.get(path, responses=answers_of(path.replace(":path", "")), summary=summary)(route)
    words = "The scheduler's state, for Prometheus"
    router.get("/metrics", response_class=PlainTextResponse, responses=answers_of(), summary=words)(its.metrics)
    path, words = "/v1/requests/{request_id:path}/cancel", "End a request by its X-Request-Id, or its answer's id"
    router.post(path, responses=answers_of(path.replace(":path", "")), summary=words)(its.cancel)
    words = "The tokens of a prompt or of messages"
    router.post("/tokenize", openapi_extra=TOKENIZE_BODY, summary=words)(its.tokenize)
    router.post("/detokenize", openapi_extra=DETOKENIZE_BODY, summary="The text of tokens")(its.detokenize)
    add_cache_routes(router, client, its.read, settings.answer_timeout)
    for path, api in APIS.items():
        router.post(path, openapi_extra=api_body(path), summary=api.summary)(partial(its.answer, path))
    return router


class _Routes:
    """What is done at each route."""

    def __init__(self, client: EngineClient, settings: AppSettings) -> None:
        self._client, self._settings, self._timeout = client, settings, settings.answer_timeout
        card = {"id": settings.model, "object": "model", "created": settings.created, "owned_by": "tokenmill"}
        self._card = card | {"max_model_len": settings.max_model_len}

    async def models(self) -> Response:
        return json_response({"object": "list", "data": [self._card]})

    async def model(self, name: str) -> Response:
        self._check_model(name)
        return json_response(self._card)

    async def health(self) -> Response:
        pulse = await self._client.probe(self._timeout)
        return json_response({"status": "ok"} | msgspec.structs.asdict(pulse))

    async def ready(self) -> Response:
        self._client.check_ready()
        return json_response({"status": "ready"})

    async def metrics(self) -> Response:
        body = render(await self._client.probe(self._timeout), self._settings.model)
        return Response(body, headers={"Content-Type": CONTENT_TYPE})

    async def version(self) -> Response:
        return json_response({"version": __version__})

    async def cancel(self, request: Request, request_id: str) -> Response:
        number = await self._client.cancel(request_name(request.state.holder, request_id), self._timeout)
        if not number:
            raise RouteError(f"no request {request_id[:MAX_NAME]!r} is running or waiting", 404)
        return json_response({"id": request_id, "object": "request.cancelled", "cancelled": number})

    async def tokenize(self, request: Request) -> Response:
        (name, call, prompt), size = await self.read(request, parse_tokenize)
        self._check_model(name)
        return json_response(await self._client.ask(call, self._timeout, prompt, size))

    async def detokenize(self, request: Request) -> Response:
        (name, call), size = await self.read(request, parse_detokenize)
        self._check_model(name)
        return json_response(await self._client.ask(call, self._timeout, size=size))

    async def answer(self, path: str, request: Request) -> Response:
        api, came, settings, state = APIS[path], milliseconds(), self._settings, request.state
        call, size = await self.read(request, api.parse, settings.sampling_defaults, came, settings.dialect)
        self._check_model(call.model)
        if api.shape is None:
            told = await self._client.ask(TextCall(), self._timeout, call.prompts[0], size)
            return json_response({"input_tokens": told["count"]})
        if call.scheduling.priority and not settings.has_priorities:
            advice = "start the server with --policy priority or --eviction priority, or leave it out"
            raise UnsupportedField(f"priority means nothing to this server's policies: {advice}", "priority")
        if state.holder:
            # A key's users are tenants of their own, but never those of another key's users.
            tenant = f"{state.holder}/{call.scheduling.tenant}"[:MAX_NAME]
            scheduling = msgspec.structs.replace(call.scheduling, tenant=tenant)
            call = dataclasses.replace(call, scheduling=scheduling)
        request_id, has_timings = call.request_id or state.request_id, settings.timings or call.timings
        head = Head(request_id, settings.model, int(time.time()), has_timings)
        options: dict[str, Any] = {"scheduling": call.scheduling, "name": request_name(state.holder, request_id)}
        opening = partial(self._client.open, call.prompts, call.params, echo=call.echo, size=size, **options)
        return Answer(opening, call, api.shape(call, settings.dialect), head, settings.sse_keep_alive)

    async def read(self, request: Request, parse: Callable[..., Any], *rest: Any) -> tuple[Any, int]:
        raw = await read_body(request, self._settings.max_body_bytes)
        work = partial(_parsed, raw or b"{}", parse, *rest)
        return await asyncio.to_thread(work) if len(raw) > LARGE else work(), len(raw)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._settings.model):
            raise ModelNotFound(f"no model {name!r} here: this server has {self._settings.model!r}")


def _parsed(raw: bytes, parse: Callable[..., Any], *rest: Any) -> Any:
    return parse(decode_body(raw), *rest)


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body.

    Raises RouteError: it is said to be something else than plain JSON, or is over `limit` bytes; ClientLeft: the
    connection ended before the body did.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise RouteError(f"the body must be JSON: send Content-Type: application/json, not {kind[:80]!r}", 415)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise RouteError("the body must not be compressed: send it plain, without Content-Encoding", 415)
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
            raise RouteError(f"the body is over {limit} bytes: send less, or raise --max-body-bytes", 413)
    return b"".join(parts)
