"""The APIs that generate: for each path its request, the kinds of its answers, an example, and its errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.server.fields import (
    CHAT,
    CHAT_CHUNK,
    CHAT_RESPONSE,
    COMPLETION,
    COMPLETION_RESPONSE,
    EMBEDDING,
    EMBEDDING_RESPONSE,
    ERROR,
)
from tokenmill.server.messages_fields import COUNT_RESPONSE, COUNT_TOKENS, MESSAGE_ERROR, MESSAGE_RESPONSE, MESSAGES
from tokenmill.server.responses_fields import RESPONSE, RESPONSES
from tokenmill.server.schema import Schema, Table

HELLO = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True, slots=True)
class Api:
    """Of `answers`, the first is that of a request without a stream."""

    request: Table
    answers: Mapping[str, Table]
    example: Mapping[str, Any]
    error: Schema = field(default_factory=lambda: ERROR)


APIS: Mapping[str, Api] = {
    "/v1/chat/completions": Api(
        CHAT,
        {"response": CHAT_RESPONSE, "chunk of a stream": CHAT_CHUNK},
        {"messages": HELLO, "max_tokens": 64, "stream": True},
    ),
    "/v1/completions": Api(
        COMPLETION,
        {"response, and chunk of a stream": COMPLETION_RESPONSE},
        {"prompt": "The sun is", "max_tokens": 16},
    ),
    "/v1/embeddings": Api(EMBEDDING, {"response": EMBEDDING_RESPONSE}, {"input": "The sun is"}),
    "/v1/responses": Api(RESPONSES, {"response": RESPONSE}, {"input": "Hello", "max_output_tokens": 64}),
    "/v1/messages": Api(MESSAGES, {"response": MESSAGE_RESPONSE}, {"messages": HELLO, "max_tokens": 64}, MESSAGE_ERROR),
    "/v1/messages/count_tokens": Api(COUNT_TOKENS, {"response": COUNT_RESPONSE}, {"messages": HELLO}, MESSAGE_ERROR),
}
