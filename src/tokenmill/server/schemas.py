"""What OpenAPI shows at /docs, from the tables of fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.server.apis import APIS
from tokenmill.server.fields import DETOKENIZE, ERROR, FLUSH, PIN, PROBE, TOKENIZE
from tokenmill.server.schema import Schema, Table, one_of, whole

PIN_EXAMPLE = {"messages": [{"role": "system", "content": "Be brief."}], "add_generation_prompt": False, "ttl": 600}


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


def _body(table: Table, example: Mapping[str, Any], error: Schema = ERROR) -> dict[str, Any]:
    body = {"required": True, **_content(table.schema | {"example": example})}
    return {"requestBody": body, "responses": {"default": {"description": "an error", **_content(error)}}}


def api_body(path: str) -> dict[str, Any]:
    """That of one of the APIs that generate."""
    api = APIS[path]
    body = _body(api.request, api.example, api.error)
    body["responses"]["200"] = _content(next(iter(api.answers.values())).schema)
    if "stream" in api.request.fields:
        body["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return body


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
