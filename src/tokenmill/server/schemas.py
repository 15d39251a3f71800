"""Request bodies as OpenAPI shows them at /docs. Checked elsewhere: `protocol` is what counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tokenmill.types import SamplingParams

WHOLE = {"type": "integer"}
FLAG = {"type": "boolean"}
TEXT = {"type": "string"}


NUMBER = {"type": "number"}
MESSAGES = {"type": "array", "items": {"type": "object", "properties": {"role": TEXT, "content": TEXT}}}
PROMPT = {"anyOf": [TEXT, {"type": "array"}]}
CHAT = {
    "messages": MESSAGES,
    "add_generation_prompt": FLAG,
    "continue_final_message": FLAG,
    "chat_template_kwargs": {"type": "object"},
}


def _body(properties: dict[str, Any], required: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(required), **more}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _generation(required: str, properties: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
    sampling = msgspec.json.schema(SamplingParams)["$defs"]["SamplingParams"]["properties"]
    common = {
        "model": TEXT,
        "max_completion_tokens": WHOLE,
        "stream": FLAG,
        "stream_options": {"type": "object", "properties": {"include_usage": FLAG}},
        "user": TEXT,
        "request_id": TEXT,
        "priority": WHOLE,
        "deadline_ms": WHOLE,
        "timeout": NUMBER,
        "cache_salt": TEXT,
    }
    return _body(properties | sampling | common, [required], example=example)


CHAT_BODY = _generation(
    "messages",
    CHAT,
    {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64, "stream": True},
)
COMPLETION_BODY = _generation("prompt", {"prompt": PROMPT, "echo": FLAG}, {"prompt": "The sun is", "max_tokens": 16})
PROBE_BODY = _body({"prompt": PROMPT, **CHAT, "cache_salt": TEXT}, example={"prompt": "The sun is"})
PIN_BODY = _body(
    {"prompt": PROMPT, **CHAT, "cache_salt": TEXT, "ttl": NUMBER},
    ["ttl"],
    example={"messages": [{"role": "system", "content": "Be brief."}], "add_generation_prompt": False, "ttl": 600},
)
FLUSH_BODY = _body({"cache_salt": TEXT, "with_pins": FLAG}, example={})
TREE_QUERY = {
    "parameters": [
        {"name": name, "in": "query", "schema": kind}
        for name, kind in (("format", {"enum": ["json", "text"]}), ("max_nodes", WHOLE), ("max_depth", WHOLE))
    ]
}
