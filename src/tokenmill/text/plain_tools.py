"""Tools for templates that know of none: told in the system's message, called and answered in plain JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

INTRODUCTION = "You can call these functions:"
INSTRUCTION = (
    'To call one, answer with nothing but a JSON object such as {"name": "NAME", "arguments": {...}}, and to call '
    "several with one object a line. The results come in the next message. Where no function helps, answer in words."
)


def in_plain_words(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of system, user and assistant that say the same, with contents of text."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        calls, content = message.get("tool_calls"), message["content"]
        if message["role"] == "tool":
            content = f"Result: {_text(content)}"
            if plain and plain[-1].get("is_result"):
                plain[-1]["content"] += f"\n{content}"
                continue
            plain.append({"role": "user", "content": content, "is_result": True})
        elif calls:
            lines = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
            plain.append({"role": "assistant", "content": "\n".join(filter(None, [_text(content), *lines]))})
        else:
            plain.append(message)
    if tools:
        lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        told = "\n".join([INTRODUCTION, *lines, INSTRUCTION])
        first = plain[0] if plain and plain[0]["role"] in ("system", "developer") else None
        if first is None:
            plain.insert(0, {"role": "system", "content": told})
        else:
            plain[0] = {**first, "content": f"{_text(first['content'])}\n\n{told}"}
    return [{name: value for name, value in message.items() if name != "is_result"} for message in plain]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
