"""What every answer must be, whatever was asked."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec

REFUSALS = {400, 401, 404, 405, 413, 415, 431, 503, 504}
ANTHROPIC_REFUSALS = {"invalid_request_error", "overloaded_error", "timeout_error"}
LAST_EVENTS = {"message_stop", "response.completed", "response.incomplete"}
TEXTS = "text/plain", "text/html", "application/openmetrics-text"


def fault_of(response: httpx.Response) -> str | None:
    """What is wrong with an answer, which has been read."""
    status, headers, content = response.status_code, response.headers, response.content
    kind = headers.get("content-type", "")
    if not headers.get("x-request-id"):
        return "no x-request-id"
    if status == 405 and not headers.get("allow"):
        return "405 without allow"
    if status == 503 and not headers.get("retry-after"):
        return "503 without retry-after"
    if status == 504 and headers.get("x-should-retry") != "false":
        return "504 that clients would try again"
    if status not in REFUSALS | {200, 204}:
        return f"status {status}"
    if response.request.method == "HEAD" or status == 204:
        return "a body where none may be" if content else None
    try:
        if kind.startswith("text/event-stream"):
            return _fault_of_stream(content)
        if kind == "application/json":
            # What is no HTTP is refused before anybody knows for which path it was.
            is_anthropic = response.request.url.path.startswith("/v1/messages") and headers.get("connection") != "close"
            return _fault_of_json(status, msgspec.json.decode(content), is_anthropic=is_anthropic)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"not JSON: {error}"
    return None if status == 200 and kind.startswith(TEXTS) else f"content of type {kind}"


def _fault_of_json(status: int, body: Any, *, is_anthropic: bool) -> str | None:
    if not isinstance(body, dict):
        return "no object"
    error = body.get("error")
    if status == 200:
        return None if error is None else "an error with status 200"
    if is_anthropic:
        is_right = isinstance(error, dict) and body.get("type") == "error" and set(error) == {"type", "message"}
        return None if is_right else "an error of another shape"
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        return "an error of another shape"
    if not (isinstance(error["message"], str) and error["message"] and isinstance(error["param"], str | None)):
        return "an error without a message, or with an odd param"
    return None if error["code"] in (status, "invalid_api_key") else "an error with another code"


def _fault_of_stream(content: bytes) -> str | None:
    *events, rest = content.split(b"\n\n")
    events = [event for event in events if not event.startswith(b":")]
    if rest or not events:
        return "a stream that is cut"
    for index, event in enumerate(events):
        name, _, data = (b"\n" + event).rpartition(b"\ndata: ")
        if b"\n" in data or (name and not name.startswith(b"\nevent: ")):
            return f"an event of another shape: {event[:80]!r}"
        is_last = index == len(events) - 1
        body: Any = {} if data == b"[DONE]" else msgspec.json.decode(data)
        error = body.get("error") or body.get("response", {}).get("error")
        is_refusal = error is not None and (
            error.get("code") in (400, 503, 504, "server_error") or error["type"] in ANTHROPIC_REFUSALS
        )
        if error is not None and (not is_refusal or "internal" in error["message"] or "log" in error["message"]):
            return f"an error event: {body}"
        if is_last != (data == b"[DONE]" or error is not None or body.get("type") in LAST_EVENTS):
            return f"a stream that ends with {event[:80]!r}" if is_last else f"more after {event[:80]!r}"
    return None
