"""/v1/messages: Anthropic's request to one of a chat, and its deltas to blocks and events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.server.errors import anthropic_error
from tokenmill.server.fields import CHAT
from tokenmill.server.generation import Generation
from tokenmill.server.messages_fields import COUNT_TOKENS, MESSAGES
from tokenmill.server.parts import Part
from tokenmill.server.protocol import PLAIN, GenerationRequest, parse_as_chat
from tokenmill.server.reader import read_whole
from tokenmill.server.shapes import Batch, Head, Streamed, call_id
from tokenmill.server.sse import encode_event
from tokenmill.text.dialect import Dialect
from tokenmill.types import FinishReason
from tokenmill.wire.messages import TextDelta

Json = dict[str, Any]

OWN = ("messages", "system", "tools", "tool_choice", "thinking", "output_config", "metadata", "service_tier")
RENAMED = {
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking",
    "chat_template_kwargs": "thinking",
}
PING = encode_event({"type": "ping"}, "ping")
STOP_REASONS = {FinishReason.LENGTH: "max_tokens", FinishReason.STOP: "end_turn"}


def parse_messages(
    body: Json, defaults: Mapping[str, Any], now: int = 0, dialect: Dialect = PLAIN
) -> GenerationRequest:
    """A /v1/messages request as one of a chat; see `parse_chat`."""
    MESSAGES.check_all(body)
    return parse_as_chat(_chat_body(body, dialect), RENAMED, defaults, now, dialect)


def parse_count(body: Json, defaults: Mapping[str, Any], now: int = 0, dialect: Dialect = PLAIN) -> GenerationRequest:
    """What a /v1/messages/count_tokens request would ask for."""
    COUNT_TOKENS.check_all(body)
    return parse_as_chat(_chat_body(body, dialect) | {"max_tokens": 1}, RENAMED, {}, now, dialect)


def _chat_body(body: Json, dialect: Dialect) -> Json:
    chat = {
        name: value for name, value in body.items() if name in CHAT.fields and name not in OWN and value is not None
    }
    chat["messages"] = _messages(body)
    if chat["messages"][-1]["role"] == "assistant":
        chat["continue_final_message"] = True
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    if (user := (body.get("metadata") or {}).get("user_id")) is not None:
        chat["user"] = user
    chat["tools"] = [_tool(tool) for tool in body.get("tools") or ()]
    if choice := body.get("tool_choice"):
        named = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = {"auto": "auto", "none": "none", "any": "required", "tool": named}[choice["type"]]
        chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    config = body.get("output_config") or {}
    if form := config.get("format"):
        schema = {"name": "output", "schema": form["schema"], "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if config.get("effort"):
        chat["reasoning_effort"] = config["effort"]
    return chat | _thinking(body.get("thinking") or {}, dialect)


def _thinking(asked: Json, dialect: Dialect) -> Json:
    if asked.get("type") in (None, "adaptive") or (asked["type"] == "disabled" and dialect.reasoning is None):
        return {}
    if asked["type"] == "disabled":
        return {"reasoning_effort": "none"}
    return {"thinking_token_budget": asked["budget_tokens"]}


def _tool(tool: Json) -> Json:
    kept = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**kept, "parameters": tool["input_schema"]}}


def _messages(body: Json) -> list[Json]:
    system = body.get("system")
    messages: list[Json] = [{"role": "system", "content": _text(system)}] if system else []
    for message in body["messages"]:
        blocks = message["content"]
        if isinstance(blocks, str) or message["role"] == "assistant":
            messages.append(message if isinstance(blocks, str) else _answer(blocks))
            continue
        for block in blocks:
            if block["type"] == "tool_result":
                words = ("Error: " if block.get("is_error") else "") + _text(block.get("content") or "")
                messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": words})
            elif block["type"] == "text":
                if not messages or messages[-1]["role"] != "user" or block is blocks[0]:
                    messages.append({"role": "user", "content": []})
                messages[-1]["content"].append({"type": "text", "text": block["text"]})
            else:
                _refuse(block, "user")
    return messages


def _answer(blocks: list[Json]) -> Json:
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    calls = []
    for block in blocks:
        if block["type"] == "tool_use":
            function = {"name": block["name"], "arguments": block["input"]}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif block["type"] == "tool_result":
            _refuse(block, "assistant")
    answer: Json = {"role": "assistant", "content": "".join(texts)}
    return (
        answer
        | ({"reasoning_content": "\n".join(thoughts)} if thoughts else {})
        | ({"tool_calls": calls} if calls else {})
    )


def _refuse(block: Json, role: str) -> None:
    raise InvalidRequest(f"messages: a message of the {role} cannot hold {block['type']}", "messages")


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(block["text"] for block in content)


class MessagesShape(Streamed):
    """Blocks as they come."""

    def __init__(self, call: GenerationRequest, dialect: Dialect) -> None:
        super().__init__(call, dialect)
        self._num_blocks = 0
        self._kind = ""  # of the open block
        self._has_calls = False
        self._end = TextDelta(uid=0)

    def start(self, head: Head, generation: Generation) -> None:
        """See `Shape.start`."""
        super().start(head, generation)
        self._reader = self._new_reader(self._call.tools.callable)

    def whole(self, deltas: Sequence[Sequence[TextDelta]]) -> Json:
        """The whole answer."""
        self._end = deltas[0][-1]
        blocks: list[Json] = []
        for part in read_whole("".join(delta.text for delta in deltas[0]), self._call.tools.callable, self._new_reader):
            kind = "tool_use" if part.kind in ("call", "arguments") else part.kind
            if part.kind == "call" or not blocks or blocks[-1]["type"] != _BLOCKS[kind][0]:
                blocks.append(self._block(part))
            if part.kind != "call":
                name = _BLOCKS[kind][1]
                blocks[-1][name] = (blocks[-1][name] or "") + part.text
        for block in blocks:
            if block["type"] == "tool_use":
                self._has_calls, block["input"] = True, msgspec.json.decode(block["input"])
        return self._message(blocks) | self._stop() | self._timings()

    def opening(self) -> bytes:
        """Events before any text."""
        unfinished = {"stop_reason": None, "stop_sequence": None}
        return _encode({"type": "message_start", "message": self._message([]) | unfinished}) + PING

    def news(self, batch: Batch) -> bytes:
        """Events for what is new."""
        return b"".join(_encode(event) for _, delta in batch for event in self._events(delta))

    def beat(self) -> bytes:
        """What is sent while nothing is new."""
        return PING

    def ending(self) -> bytes:
        """Events after the end."""
        ends = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()} | self._timings()
        return _encode(ends) + _encode({"type": "message_stop"})

    def failure(self, error: TokenmillError) -> bytes:
        """The last event of a stream that cannot go on."""
        return _encode(anthropic_error(error))

    def _events(self, delta: TextDelta) -> Iterator[Json]:
        parts = self._reader.push(delta.text)
        if delta.finish_reason is not None:
            self._end = delta
            parts += self._reader.finish()
        for part in parts:
            kind = "tool_use" if part.kind in ("call", "arguments") else part.kind
            if part.kind == "call" or kind != self._kind:
                yield from self._close()
                yield {"type": "content_block_start", "index": self._num_blocks, "content_block": self._block(part)}
                self._kind = kind
                self._has_calls |= part.kind == "call"
            if part.kind != "call":
                _, _, name, field = _BLOCKS[kind]
                shown = {"type": name, field: part.text}
                yield {"type": "content_block_delta", "index": self._num_blocks, "delta": shown}
        if delta.finish_reason is not None:
            yield from self._close()

    def _close(self) -> Iterator[Json]:
        if self._kind:
            yield {"type": "content_block_stop", "index": self._num_blocks}
            self._num_blocks += 1
            self._kind = ""

    def _block(self, part: Part) -> Json:
        if part.kind == "call":
            return {"type": "tool_use", "id": call_id(self._dialect), "name": part.text, "input": {}}
        if part.kind == "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "text", "text": ""}

    def _message(self, blocks: list[Json]) -> Json:
        head = self._head
        same = {"id": f"msg_{head.request_id}", "type": "message", "role": "assistant", "model": head.model}
        return {**same, "content": blocks, "usage": self._usage()}

    def _stop(self) -> Json:
        reason, matched = self._end.finish_reason, self._end.stop_reason
        if reason is FinishReason.STOP and isinstance(matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        shown = STOP_REASONS.get(reason, "pause_turn") if reason is not None else None
        return {"stop_reason": "tool_use" if self._has_calls and shown == "end_turn" else shown, "stop_sequence": None}

    def _usage(self) -> Json:
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion_tokens,
        }


# Of each kind of block: its type, where its text is, and what its deltas are called and hold.
_BLOCKS = {
    "content": ("text", "text", "text_delta", "text"),
    "reasoning": ("thinking", "thinking", "thinking_delta", "thinking"),
    "tool_use": ("tool_use", "input", "input_json_delta", "partial_json"),
}


def _encode(event: Json) -> bytes:
    return encode_event(event, event["type"])
