"""The APIs: how each reads its requests and shapes its answers, and what OpenAPI shows of them at /docs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.schema import OBJECT, TEXT, Schema, Table, array, full, nullable, one_of, record, whole
from tokenmill.server.embeddings import EmbeddingShape, parse_embedding
from tokenmill.server.fields import (
    CHAT,
    CHAT_CHUNK,
    CHAT_RESPONSE,
    COMPLETION,
    COMPLETION_RESPONSE,
    COUNT,
    DETOKENIZE,
    EMBEDDING,
    EMBEDDING_RESPONSE,
    ERROR,
    TOKENIZE,
)
from tokenmill.server.messages import MessagesShape, parse_count, parse_messages
from tokenmill.server.messages_fields import COUNT_RESPONSE, COUNT_TOKENS, MESSAGE_ERROR, MESSAGE_RESPONSE, MESSAGES
from tokenmill.server.protocol import GenerationRequest, parse_chat, parse_completion
from tokenmill.server.responses import ResponsesShape, parse_responses
from tokenmill.server.responses_fields import RESPONSE, RESPONSES
from tokenmill.server.shapes import ChatShape, CompletionShape, Shape
from tokenmill.text.dialect import Dialect
from tokenmill.wire.messages import Pulse

HELLO = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True, slots=True)
class Api:
    """Of `answers`, the first is that of a request without a stream. Without a shape nothing is generated."""

    summary: str
    parse: Callable[..., GenerationRequest]
    shape: Callable[[GenerationRequest, Dialect], Shape] | None
    request: Table
    answers: Mapping[str, Table]
    example: Mapping[str, Any]
    error: Schema = field(default_factory=lambda: ERROR)


HI, SUN = {"messages": HELLO, "max_tokens": 64}, "The sun is"
CHAT_ANSWERS = {"response": CHAT_RESPONSE, "chunk of a stream": CHAT_CHUNK}
TEXT_ANSWERS = {"response, and chunk of a stream": COMPLETION_RESPONSE}
VECTORS, ITEMS = {"response": EMBEDDING_RESPONSE}, {"response": RESPONSE}
BLOCKS, COUNTED = {"response": MESSAGE_RESPONSE}, {"response": COUNT_RESPONSE}
APIS: Mapping[str, Api] = {
    "/v1/chat/completions": Api("Chat", parse_chat, ChatShape, CHAT, CHAT_ANSWERS, {**HI, "stream": True}),
    "/v1/completions": Api(
        "Text completion", parse_completion, CompletionShape, COMPLETION, TEXT_ANSWERS, {"prompt": SUN}
    ),
    "/v1/embeddings": Api("Embeddings", parse_embedding, EmbeddingShape, EMBEDDING, VECTORS, {"input": SUN}),
    "/v1/responses": Api(
        "Responses, nothing stored", parse_responses, ResponsesShape, RESPONSES, ITEMS, {"input": SUN}
    ),
    "/v1/messages": Api("Messages", parse_messages, MessagesShape, MESSAGES, BLOCKS, HI, MESSAGE_ERROR),
    "/v1/messages/count_tokens": Api(
        "Tokens of a message's prompt", parse_count, None, COUNT_TOKENS, COUNTED, {"messages": HELLO}, MESSAGE_ERROR
    ),
}
CARD = full(id=TEXT, object=one_of("model"), created=COUNT, owned_by=TEXT, max_model_len=COUNT)
RANKS = array(array(COUNT, 2, 2))
# What is answered where nothing is generated.
ANSWERS: Mapping[str, Schema] = {
    "/v1/models": full(object=one_of("list"), data=array(CARD)),
    "/v1/models/{name}": CARD,
    "/health": full(status=one_of("ok"), **dict.fromkeys(Pulse.__struct_fields__, COUNT) | {"ranks": RANKS}),
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


def described(
    table: Table, example: Mapping[str, Any], answer: Schema = OBJECT, error: Schema = ERROR
) -> dict[str, Any]:
    """A route with a body."""
    body = {"required": True, **_content(table.schema | {"example": example})}
    answers = {"200": _content(answer), "default": {"description": "an error", **_content(error)}}
    return {"requestBody": body, "responses": answers}


def api_body(path: str) -> dict[str, Any]:
    """That of one of the APIs."""
    api = APIS[path]
    body = described(api.request, api.example, next(iter(api.answers.values())).schema, api.error)
    if "stream" in api.request.fields:
        body["responses"]["200"]["content"]["text/event-stream"] = {"schema": EVENT}
    return body


TOKENIZE_BODY = described(TOKENIZE, {"prompt": "The sun is"}, TOKENS)
DETOKENIZE_BODY = described(DETOKENIZE, {"tokens": [504]}, full(prompt=TEXT))
