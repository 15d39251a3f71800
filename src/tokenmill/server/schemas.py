"""Request bodies as OpenAPI shows them at /docs. Checked elsewhere: `protocol` is what counts."""

from __future__ import annotations

from typing import Any

NUMBER = {"type": "number"}
WHOLE = {"type": "integer"}
FLAG = {"type": "boolean"}
TEXT = {"type": "string"}
COMMON: dict[str, Any] = {
    "model": TEXT,
    "max_tokens": WHOLE,
    "max_completion_tokens": WHOLE,
    "min_tokens": WHOLE,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": WHOLE,
    "min_p": NUMBER,
    "seed": WHOLE,
    "n": WHOLE,
    "stop": {"anyOf": [TEXT, {"type": "array", "items": TEXT}]},
    "stop_token_ids": {"type": "array", "items": WHOLE},
    "logit_bias": {"type": "object", "additionalProperties": NUMBER},
    "ignore_eos": FLAG,
    "include_stop_str_in_output": FLAG,
    "skip_special_tokens": FLAG,
    "stream": FLAG,
    "stream_options": {"type": "object", "properties": {"include_usage": FLAG}},
    "user": TEXT,
    "request_id": TEXT,
}


def _body(required: str, properties: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "required": [required], "properties": properties | COMMON, "example": example}
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
