"""The server's own errors, and the one place where errors become HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response

from tokenmill.errors import TokenmillError
from tokenmill.wire.messages import ErrorInfo

MAX_MESSAGE = 2000
RETRY_STATUS = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_KINDS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
KINDS: Mapping[int, str] = {404: "NotFoundError", 405: "MethodNotAllowedError"}


class ClientLeft(TokenmillError):
    """The HTTP client closed its connection; nobody is there to be told."""

    status = 499


class EngineError(TokenmillError):
    """An error that another process reported."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.status, self.kind, self.param, self.retry_after = info.status, info.kind, info.param, info.retry_after


class RouteError(TokenmillError):
    """What is wrong before anyone looks into the body: an unknown route, a wrong method, a body too large."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status, self.kind = status, KINDS.get(status, "BadRequestError")


def renamed(error: TokenmillError, names: Mapping[str, str]) -> TokenmillError:
    """The error, changed to tell of a field by the name that it has in the request's API."""
    name, bracket, rest = (error.param or "").partition("[")
    if name in names:
        error.param = names[name] + bracket + rest
        if "_" in name or error.message.startswith(name):  # other names are also plain words
            error.message = error.message.replace(name, names[name], 1)
    return error


def error_object(error: TokenmillError) -> dict[str, Any]:
    """OpenAI's error object."""
    code = getattr(error, "code", error.status)
    return {"error": {"message": error.message[:MAX_MESSAGE], "type": error.kind, "param": error.param, "code": code}}


def anthropic_error(error: TokenmillError) -> dict[str, Any]:
    """Anthropic's error object."""
    kind = ANTHROPIC_KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message[:MAX_MESSAGE]}}


def error_response(error: TokenmillError, path: str, headers: Mapping[str, str] | None = None) -> Response:
    """The HTTP answer to an error of a request to `path`; Retry-After where trying again can help."""
    if error.status in RETRY_STATUS:
        headers = {"Retry-After": str(getattr(error, "retry_after", 1))}
    elif error.status == HTTPStatus.UNAUTHORIZED:
        headers = {"WWW-Authenticate": "Bearer"}
    elif error.status == HTTPStatus.GATEWAY_TIMEOUT:
        headers = {"x-should-retry": "false"}  # OpenAI's clients would begin anew what was to be over by now
    content = anthropic_error(error) if path.startswith(ANTHROPIC_PATH) else error_object(error)
    return json_response(content, error.status, headers)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer, encoded by msgspec."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")
