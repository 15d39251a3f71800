"""Checks on chat messages before they go to the chat template."""

from __future__ import annotations

from typing import Any

from tokenmill.errors import InvalidRequest, UnsupportedField

ROLES = ("system", "developer", "user", "assistant")
TOOL_ROLES = ("tool", "function")
# What clients send back of an earlier answer; without a value these say nothing.
ANSWER_FIELDS = ("refusal", "tool_calls", "function_call", "audio", "annotations", "reasoning_content")


def check_messages(raw: Any) -> list[dict[str, Any]]:
    """Messages with role, content (a string or a list of text parts) and perhaps name; nothing else.

    Raises:
        InvalidRequest: a message is wrong; `param` says which, as in "messages[1].content".
    """
    if raw is None:
        raise InvalidRequest("messages is missing: give a list of messages with role and content", "messages")
    if not isinstance(raw, list) or not raw:
        raise InvalidRequest("messages must be a list of messages that is not empty", "messages")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(raw)]


def _message(where: str, raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise InvalidRequest(f"{where} must be an object with role and content", where)
    role = raw.get("role")
    if role in TOOL_ROLES:
        raise UnsupportedField(f"{where}.role {role!r} is not supported: tools are not", f"{where}.role")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
    message = {"role": role, "content": _content(f"{where}.content", raw.get("content"))}
    for name, value in raw.items():
        if name in message or (name in ANSWER_FIELDS and not value):
            continue
        if name != "name":
            raise UnsupportedField(f"{where}.{name[:80]} is not supported: leave it out", f"{where}.{name[:80]}")
        if value is None:
            continue
        if not isinstance(value, str):
            raise InvalidRequest(f"{where}.name must be a string", f"{where}.name")
        message["name"] = value
    return message


def _content(where: str, raw: Any) -> str | list[dict[str, str]]:
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, list) or not raw:
        raise InvalidRequest(f"{where} must be a string or a list of text parts", where)
    return [_part(f"{where}[{index}]", part) for index, part in enumerate(raw)]


def _part(where: str, raw: Any) -> dict[str, str]:
    if not isinstance(raw, dict) or not isinstance(raw.get("type"), str):
        raise InvalidRequest(f'{where} must be an object such as {{"type": "text", "text": "..."}}', where)
    if raw["type"] != "text":
        raise UnsupportedField(f"{where} has type {raw['type'][:40]!r}: this model takes text only", f"{where}.type")
    if not isinstance(raw.get("text"), str):
        raise InvalidRequest(f"{where}.text must be a string", f"{where}.text")
    if extra := next((name for name in raw if name not in ("type", "text")), None):
        raise UnsupportedField(f"{where}.{extra[:80]} is not supported: leave it out", f"{where}.{extra[:80]}")
    return {"type": "text", "text": raw["text"]}
