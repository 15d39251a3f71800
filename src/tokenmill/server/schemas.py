"""What OpenAPI shows at /docs, from the tables of fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.server.apis import APIS
from tokenmill.server.fields import COUNT, DETOKENIZE, ERROR, FLUSH, PIN, PROBE, TOKENIZE
from tokenmill.server.schema import OBJECT, TEXT, Schema, Table, array, full, nullable, one_of, record, whole
from tokenmill.wire.messages import Pulse

PIN_EXAMPLE = {"messages": [{"role": "system", "content": "Be brief."}], "add_generation_prompt": False, "ttl": 600}


CARD = full(id=TEXT, object=one_of("model"), created=COUNT, owned_by=TEXT, max_model_len=COUNT)
# What is answered where nothing is generated.
ANSWERS: Mapping[str, Schema] = {
    "/v1/models": full(object=one_of("list"), data=array(CARD)),
    "/v1/models/{name}": CARD,
    "/health": full(status=one_of("ok"), **dict.fromkeys(Pulse.__struct_fields__, COUNT)),
    "/ready": full(status=one_of("ready")),
    "/version": full(version=TEXT),
    "/v1/requests/{request_id}/cancel": full(id=TEXT, object=one_of("request.cancelled"), cancelled=whole(1)),
}
# Before OpenAPI 3.2 the schema of an event stream is taken as that of each event.
EVENT = record(["data"], data=TEXT, event=TEXT)
TOKENS = full(count=COUNT, max_model_len=COUNT, tokens=array(COUNT), token_strs=nullable(array(TEXT)))


def answers_of(path: str = "") -> dict[int | str, dict[str, Any]]:
    """What a route without a body answers."""
    error: dict[int | str, dict[str, Any]] = {"default": {"description": "an error", **_content(ERROR)}}
    return {**error, 200: _content(ANSWERS[path])} if path else error


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


def _body(table: Table, example: Mapping[str, Any], answer: Schema = OBJECT, error: Schema = ERROR) -> dict[str, Any]:
    body = {"required": True, **_content(table.schema | {"example": example})}
    answers = {"200": _content(answer), "default": {"description": "an error", **_content(error)}}
    return {"requestBody": body, "responses": answers}


def api_body(path: str) -> dict[str, Any]:
    """That of one of the APIs that generate."""
    api = APIS[path]
    body = _body(api.request, api.example, next(iter(api.answers.values())).schema, api.error)
    if "stream" in api.request.fields:
        body["responses"]["200"]["content"]["text/event-stream"] = {"schema": EVENT}
    return body


PROBE_BODY = _body(PROBE, {"prompt": "The sun is"})
PIN_BODY = _body(PIN, PIN_EXAMPLE)
TOKENIZE_BODY = _body(TOKENIZE, {"prompt": "The sun is"}, TOKENS)
DETOKENIZE_BODY = _body(DETOKENIZE, {"tokens": [504]}, full(prompt=TEXT))
FLUSH_BODY = _body(FLUSH, {})
TREE_QUERY = {
    "responses": {"200": {"content": {"text/plain": {"schema": TEXT}}}},
    "parameters": [
        {"name": name, "in": "query", "schema": kind}
        for name, kind in (
            ("format", one_of("json", "text")),
            ("max_nodes", whole(1, 10_000)),
            ("max_depth", whole(1, 64)),
        )
    ],
}
