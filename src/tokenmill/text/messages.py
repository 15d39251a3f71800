"""Checks on chat messages before they go to the chat template."""

from __future__ import annotations

import json
from typing import Any

from tokenmill.errors import InvalidRequest, UnsupportedField

ROLES = ("system", "developer", "user", "assistant")
TOOL_ROLES = ("tool", "function")
# What clients send back of an earlier answer; without a value these say nothing.
ANSWER_FIELDS = ("refusal", "tool_calls", "function_call", "audio", "annotations", "reasoning_content", "tool_call_id")


def check_messages(raw: Any, *, with_tools: bool = False) -> list[dict[str, Any]]:
    """Messages with role, content (a string or a list of text parts) and perhaps name, in new dicts.

    `with_tools` passes other roles and fields on too, and turns arguments of tool calls into objects: clients send them
    as JSON text, templates expect objects. Raises InvalidRequest, whose `param` is such as "messages[1].content".
    """
    if raw is None:
        raise InvalidRequest("messages is missing: give a list of messages with role and content", "messages")
    if not isinstance(raw, list) or not raw:
        raise InvalidRequest("messages must be a list of messages that is not empty", "messages")
    return [_message(f"messages[{index}]", message, with_tools) for index, message in enumerate(raw)]


def _message(where: str, raw: Any, with_tools: bool) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise InvalidRequest(f"{where} must be an object with role and content", where)
    role, content = raw.get("role"), raw.get("content")
    if role in TOOL_ROLES and not with_tools:
        raise UnsupportedField(f"{where}.role {role!r} is not supported: tools are not", f"{where}.role")
    if not isinstance(role, str) or (role not in ROLES and not with_tools):
        raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
    if content is None and role == "assistant" and with_tools:
        content = ""
    message = {"role": role, "content": _content(f"{where}.content", content)}
    for name, value in raw.items():
        place = f"{where}.{name[:80]}"
        if name in message or (name in ANSWER_FIELDS and not value):
            continue
        if name != "name" and not with_tools:
            raise UnsupportedField(f"{place} is not supported: leave it out", place)
        if name == "name" and not isinstance(value, str | None):
            raise InvalidRequest(f"{place} must be a string", place)
        if value is not None:
            message[name] = _tool_calls(place, value) if name == "tool_calls" else value
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


def _tool_calls(where: str, raw: Any) -> list[dict[str, Any]]:
    if not isinstance(raw, list) or not all(isinstance(call, dict) for call in raw):
        raise InvalidRequest(f"{where} must be a list of objects", where)
    calls = []
    for index, call in enumerate(raw):
        function = call.get("function")
        if not isinstance(function, dict):
            raise InvalidRequest(f"{where}[{index}] must be an object with a function", where)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise InvalidRequest(f"{where}[{index}].function.arguments is not valid JSON", where) from error
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls
