"""The FastAPI app: routes, and errors to answers."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.errors import TokenmillError
from tokenmill.server.client import EngineClient
from tokenmill.server.errors import RouteError, error_response
from tokenmill.server.routes import AppSettings, make_router
from tokenmill.version import __version__


def create_app(client: EngineClient, settings: AppSettings) -> FastAPI:
    """The HTTP API over one client."""
    app = FastAPI(title="tokenmill", version=__version__, redirect_slashes=False, redoc_url=None)
    app.include_router(make_router(client, settings))

    @app.exception_handler(TokenmillError)
    async def known(request: Request, error: TokenmillError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def framework(request: Request, error: HTTPException) -> Response:
        words = {404: "there is no such route", 405: f"{request.method} is not allowed here"}
        detail = f"{words.get(error.status_code, error.detail)}: {request.method} {request.url.path}"
        return error_response(RouteError(detail, error.status_code), error.headers)

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> Response:
        return error_response(TokenmillError("an internal error: the server's log tells more"))

    return app
