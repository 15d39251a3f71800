"""What OpenAPI shows at /docs, from the tables of fields."""

from __future__ import annotations

from typing import Any

from tokenmill.server.fields import APIS, DETOKENIZE, ERROR, FLUSH, PIN, PROBE, TOKENIZE
from tokenmill.server.schema import Table, one_of, whole

CHAT_EXAMPLE = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64, "stream": True}
PIN_EXAMPLE = {"messages": [{"role": "system", "content": "Be brief."}], "add_generation_prompt": False, "ttl": 600}


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


def _body(table: Table, example: dict[str, Any]) -> dict[str, Any]:
    body = {"required": True, **_content(table.schema | {"example": example})}
    return {"requestBody": body, "responses": {"default": {"description": "an error", **_content(ERROR)}}}


def _generation(path: str, example: dict[str, Any]) -> dict[str, Any]:
    request, responses = APIS[path]
    schema = next(iter(responses.values())).schema
    body = _body(request, example)
    body["responses"]["200"] = _content(schema)
    if "stream" in request.fields:
        body["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return body


CHAT_BODY = _generation("/v1/chat/completions", CHAT_EXAMPLE)
COMPLETION_BODY = _generation("/v1/completions", {"prompt": "The sun is", "max_tokens": 16})
EMBEDDING_BODY = _generation("/v1/embeddings", {"input": "The sun is"})
PROBE_BODY = _body(PROBE, {"prompt": "The sun is"})
PIN_BODY = _body(PIN, PIN_EXAMPLE)
TOKENIZE_BODY = _body(TOKENIZE, {"prompt": "The sun is"})
DETOKENIZE_BODY = _body(DETOKENIZE, {"tokens": [504]})
FLUSH_BODY = _body(FLUSH, {})
TREE_QUERY = {
    "parameters": [
        {"name": name, "in": "query", "schema": kind}
        for name, kind in (
            ("format", one_of("json", "text")),
            ("max_nodes", whole(1, 10_000)),
            ("max_depth", whole(1, 64)),
        )
    ]
}
