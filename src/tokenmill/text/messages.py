"""Chat messages: what they may hold, and the form in which chat templates are shown them."""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.errors import InvalidRequest, UnsupportedField
from tokenmill.schema import (
    OBJECT,
    TEXT,
    Table,
    array,
    either,
    honoured,
    meaningless,
    one_of,
    record,
    refused,
    tagged,
    whole,
)

CONTENT = either(TEXT, array(tagged("text", "text", text=TEXT), 1))
CALLED = record(["name"], name=TEXT, arguments=either(TEXT, OBJECT), parsed_arguments={})
CALL = record(["function"], id=TEXT, type=one_of("function"), index=whole(0), function=CALLED)
MESSAGES = (
    honoured("messages", array(OBJECT, 1), required=True),
    honoured("messages[].role", one_of("system", "developer", "user", "assistant", "tool"), required=True),
    honoured("messages[].content", CONTENT, "text, or parts of type text"),
    honoured("messages[].name", TEXT, "where the chat template shows it"),
    meaningless("messages[].refusal", one_of(""), "sent back by clients"),
    meaningless("messages[].parsed", {}, "what clients make of content"),
    refused("messages[].audio", "text only"),
    refused("messages[].annotations", "text only", []),
    refused("messages[].function_call", "use tool_calls"),
    honoured("messages[].tool_calls", array(CALL), "of the assistant; content may then be null"),
    honoured("messages[].tool_call_id", TEXT, "of a tool"),
    honoured("messages[].reasoning_content", TEXT, "of the assistant, where the chat template shows it"),
)
TABLE = Table(MESSAGES)
SHOWN = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
OWNERS = {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}


def check_messages(raw: Any) -> list[dict[str, Any]]:
    """Messages with role, content (a string or a list of text parts) and what else their roles have, in new dicts.

    Arguments of tool calls become objects: clients send them as JSON text, templates expect objects. Raises
    InvalidRequest, whose `param` is such as "messages[1].content".
    """
    TABLE.check("messages", raw)
    return [_message(f"messages[{index}]", message) for index, message in enumerate(raw)]


def _message(where: str, raw: dict[str, Any]) -> dict[str, Any]:
    message = {name: raw[name] for name in SHOWN if raw.get(name) or (name == "content" and raw.get(name) is not None)}
    for name, owner in OWNERS.items():
        if name in message and message["role"] != owner:
            raise UnsupportedField(f"{where}.{name} is for messages of the {owner}: leave it out", f"{where}.{name}")
    if "tool_calls" in message:
        place, calls = f"{where}.tool_calls", message["tool_calls"]
        message["tool_calls"] = [_call(f"{place}[{index}].function", call) for index, call in enumerate(calls)]
        message.setdefault("content", "")
    if "content" not in message:
        raise InvalidRequest(f"{where}.content must be a string or a list of text parts", f"{where}.content")
    return message


def _call(where: str, raw: dict[str, Any]) -> dict[str, Any]:
    place, function = f"{where}.arguments", raw["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise InvalidRequest(f"{place} is not valid JSON: {error}", place) from None
        if not isinstance(arguments, dict):
            raise InvalidRequest(f"{place} must be the text of a JSON object", place)
    its_id = {} if raw.get("id") is None else {"id": raw["id"]}
    return {**its_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
