"""The ASGI app: routes, errors to answers, and the edges around them."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.server.client import EngineClient
from tokenmill.server.edges import EdgeSettings, with_edges
from tokenmill.server.errors import RouteError, error_response
from tokenmill.server.routes import make_router
from tokenmill.server.settings import AppSettings
from tokenmill.version import __version__


def create_app(client: EngineClient, settings: AppSettings, edges: EdgeSettings = EdgeSettings()) -> ASGIApp:  # noqa: B008
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
