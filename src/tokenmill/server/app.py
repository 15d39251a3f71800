"""The ASGI app: routes, errors to answers, and the edges around them: request ids, CORS, API keys, HEAD and OPTIONS."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.server.client import EngineClient
from tokenmill.server.errors import RouteError, error_response
from tokenmill.server.keys import Keys
from tokenmill.server.protocol import check_request_id
from tokenmill.server.routes import AppSettings, make_router
from tokenmill.version import __version__

OPEN_ROUTES = frozenset({"/health", "/ready", "/version"})
REQUEST_ID = "X-Request-Id"


@dataclass(frozen=True)
class EdgeSettings:
    """Who may call: holders of `keys`, and pages of these `origins` from browsers."""

    keys: Keys = Keys()  # noqa: RUF009  (immutable)
    origins: Sequence[str] = ()


def create_app(client: EngineClient, settings: AppSettings, edges: EdgeSettings = EdgeSettings()) -> ASGIApp:
    """The HTTP API over one client."""
    app = FastAPI(title="tokenmill", version=__version__, redirect_slashes=False, redoc_url=None)
    router = make_router(client, settings)
    routes = [route for route in (*router.routes, *app.routes) if isinstance(route, Route)]
    app.include_router(router)

    def allowed(path: str) -> list[str]:
        methods = {method for route in routes if route.path_regex.match(path) for method in route.methods or ()}
        return sorted({*methods, "OPTIONS"} | ({"HEAD"} if "GET" in methods else set())) if methods else []

    @app.exception_handler(TokenmillError)
    async def known(request: Request, error: TokenmillError) -> Response:
        return error_response(error, request.url.path)

    @app.exception_handler(RecursionError)
    async def deep(request: Request, error: RecursionError) -> Response:
        return error_response(InvalidRequest("the body is nested too deeply"), request.url.path)

    @app.exception_handler(HTTPException)
    async def framework(request: Request, error: HTTPException) -> Response:
        words = {404: "there is no such route", 405: f"{request.method} is not allowed here"}
        detail = f"{words.get(error.status_code, error.detail)}: {request.method} {request.url.path}"
        headers = {"Allow": ", ".join(allowed(request.url.path))} if error.status_code == 405 else error.headers
        return error_response(RouteError(detail, error.status_code), request.url.path, headers)

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> Response:
        return error_response(TokenmillError("an internal error: the server's log tells more"), request.url.path)

    return with_edges(app, edges, allowed)


def with_edges(app: ASGIApp, settings: EdgeSettings, allowed: Callable[[str], Sequence[str]]) -> ASGIApp:
    """The app with its edges; `allowed` tells a path's methods.

    Sets `request_id` and `holder` (of the API key) in the state of requests.
    """
    app = Gate(app, settings.keys, allowed)
    if settings.origins:
        exposed = (REQUEST_ID, "Retry-After")
        app = CORSMiddleware(app, settings.origins, ("GET", "HEAD", "POST"), ("*",), expose_headers=exposed)
    return RequestIds(app)


class RequestIds:
    """Gives each request an id, the client's own if there is one, and tells it in the answer's headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        given = Headers(scope=scope).get(REQUEST_ID)
        request_id, app = given or uuid.uuid4().hex, self._app
        try:
            check_request_id(request_id if given is None else given, REQUEST_ID)
        except TokenmillError as error:
            request_id, app = uuid.uuid4().hex, error_response(error, scope["path"])
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault(REQUEST_ID, request_id)
            await send(message)

        await app(scope, receive, send_with_id)


class Gate:
    """Asks for a key, answers OPTIONS, and has HEAD answered as GET without the body."""

    def __init__(self, app: ASGIApp, keys: Keys, allowed: Callable[[str], Sequence[str]]) -> None:
        self._app = app
        self._keys = keys
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        path, method = scope["path"], scope["method"]
        if method == "OPTIONS":
            await self._options(path)(scope, receive, send)
            return
        if path not in OPEN_ROUTES:
            headers = Headers(scope=scope)
            scheme, _, token = headers.get("authorization", "").partition(" ")
            bearer = token.strip() if scheme.lower() == "bearer" else None
            try:
                scope["state"]["holder"] = self._keys.holder((bearer, headers.get("x-api-key")))
            except TokenmillError as error:
                await error_response(error, path)(scope, receive, send)
                return
        if method == "HEAD":
            scope, send = {**scope, "method": "GET"}, _without_body(send)
        await self._app(scope, receive, send)

    def _options(self, path: str) -> Response:
        if allowed := self._allowed(path):
            return Response(status_code=204, headers={"Allow": ", ".join(allowed)})
        return error_response(RouteError(f"there is no such route: {path}", 404), path)


def _without_body(send: Send) -> Send:
    async def send_head(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return send_head
