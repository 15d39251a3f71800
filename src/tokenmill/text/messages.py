"""Checks on chat messages before they go to the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tokenmill.errors import InvalidRequest, UnsupportedField

# The fields of a role's messages, beside role and content, with the JSON type of each.
ROLES: Mapping[str, Mapping[str, type[Any]]] = {
    "system": {"name": str},
    "developer": {"name": str},
    "user": {"name": str},
    "assistant": {"name": str, "tool_calls": list, "reasoning_content": str},
    "tool": {"name": str, "tool_call_id": str},
}
# What clients send back of an earlier answer; without a value these say nothing.
ANSWER_FIELDS = ("refusal", "tool_calls", "function_call", "audio", "annotations", "reasoning_content", "tool_call_id")
PARSED = "parsed"  # what clients make of content, and send back beside it
KINDS: Mapping[type[Any], str] = {str: "a string", list: "a list"}


def check_messages(raw: Any) -> list[dict[str, Any]]:
    """Messages with role, content (a string or a list of text parts) and what else their roles have, in new dicts.

    Arguments of tool calls become objects: clients send them as JSON text, templates expect objects. Raises
    InvalidRequest, whose `param` is such as "messages[1].content".
    """
    if raw is None:
        raise InvalidRequest("messages is missing: give a list of messages with role and content", "messages")
    if not isinstance(raw, list) or not raw:
        raise InvalidRequest("messages must be a list of messages that is not empty", "messages")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(raw)]


def _message(where: str, raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise InvalidRequest(f"{where} must be an object with role and content", where)
    role, content = raw.get("role"), raw.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
    if content is None and role == "assistant" and raw.get("tool_calls"):
        content = ""
    message: dict[str, Any] = {"role": role, "content": _content(f"{where}.content", content)}
    for name, value in raw.items():
        place = f"{where}.{name[:80]}"
        if name in message or value is None or (name in ANSWER_FIELDS and not value) or name == PARSED:
            continue
        if name not in ROLES[role]:
            raise UnsupportedField(f"{place} is not supported: leave it out", place)
        if not isinstance(value, ROLES[role][name]):
            raise InvalidRequest(f"{place} must be {KINDS[ROLES[role][name]]}", place)
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
    _check_names(where, raw, "type", "text")
    return {"type": "text", "text": raw["text"]}


def _check_names(where: str, raw: Mapping[str, Any], *names: str) -> None:
    if extra := next((name for name, value in raw.items() if name not in names and value is not None), None):
        raise UnsupportedField(f"{where}.{extra[:80]} is not supported: leave it out", f"{where}.{extra[:80]}")


def _tool_calls(where: str, raw: list[Any]) -> list[dict[str, Any]]:
    calls = []
    for index, call in enumerate(raw):
        place = f"{where}[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise InvalidRequest(f'{place} must be an object of type "function" with a function', place)
        if not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{place}.function.name must be a string", f"{place}.function.name")
        _check_names(place, call, "id", "type", "function", "index")
        _check_names(f"{place}.function", function, "name", "arguments", "parsed_arguments")
        its_id = {} if call.get("id") is None else {"id": call["id"]}
        kept = {"name": function["name"], "arguments": _arguments(place, function)}
        calls.append({**its_id, "type": "function", "function": kept})
    return calls


def _arguments(where: str, function: dict[str, Any]) -> dict[str, Any]:
    place = f"{where}.function.arguments"
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise InvalidRequest(f"{place} is not valid JSON: {error}", place) from None
    if not isinstance(arguments or {}, dict):
        raise InvalidRequest(f"{place} must be the text of a JSON object", place)
    return arguments or {}
