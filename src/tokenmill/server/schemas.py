"""Request bodies as OpenAPI shows them at /docs. Checked elsewhere: `protocol` is what counts."""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.types import SamplingParams

WHOLE = {"type": "integer"}
FLAG = {"type": "boolean"}
TEXT = {"type": "string"}


def _body(required: str, properties: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
    sampling = msgspec.json.schema(SamplingParams)["$defs"]["SamplingParams"]["properties"]
    common = {
        "model": TEXT,
        "max_completion_tokens": WHOLE,
        "stream": FLAG,
        "stream_options": {"type": "object", "properties": {"include_usage": FLAG}},
        "user": TEXT,
        "request_id": TEXT,
    }
    properties = properties | sampling | common
    schema = {"type": "object", "required": [required], "properties": properties, "example": example}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


CHAT_BODY = _body(
    "messages",
    {
        "messages": {"type": "array", "items": {"type": "object", "properties": {"role": TEXT, "content": TEXT}}},
        "add_generation_prompt": FLAG,
        "continue_final_message": FLAG,
        "chat_template_kwargs": {"type": "object"},
    },
    {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64, "stream": True},
)
COMPLETION_BODY = _body(
    "prompt",
    {"prompt": {"anyOf": [TEXT, {"type": "array"}]}, "echo": FLAG},
    {"prompt": "The sun is", "max_tokens": 16},
)
