"""/v1/messages: Anthropic's request to one of a chat, and its deltas to blocks and events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.server.errors import anthropic_error
from tokenmill.server.fields import CHAT
from tokenmill.server.messages_fields import COUNT_TOKENS, MESSAGES
from tokenmill.server.parts import Kind, Part
from tokenmill.server.protocol import PLAIN, GenerationRequest, parse_as_chat
from tokenmill.server.reader import is_object
from tokenmill.server.shapes import Blocks, call_id
from tokenmill.server.sse import encode_event
from tokenmill.text.dialect import Dialect
from tokenmill.types import FinishReason

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
DELTAS: Mapping[Kind, tuple[str, str]] = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "arguments": ("input_json_delta", "partial_json"),
}
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
    answer: Json = {"role": "assistant", "content": ""}
    for block in blocks:
        if block["type"] == "text":
            answer["content"] += block["text"]
        elif block["type"] == "thinking":
            before = [answer["reasoning_content"]] if "reasoning_content" in answer else []
            answer["reasoning_content"] = "\n".join([*before, block["thinking"]])
        elif block["type"] == "tool_use":
            function = {"name": block["name"], "arguments": block["input"]}
            call = {"id": block["id"], "type": "function", "function": function}
            answer.setdefault("tool_calls", []).append(call)
        else:
            _refuse(block, "assistant")
    return answer


def _refuse(block: Json, role: str) -> None:
    raise InvalidRequest(f"messages: a message of the {role} cannot hold {block['type']}", "messages")


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(block["text"] for block in content)


class MessagesShape(Blocks):
    """Blocks as they come."""

    types = ("text", "thinking", "tool_use")

    def opening(self) -> bytes:
        """See `Streamed.opening`."""
        unfinished = {"stop_reason": None, "stop_sequence": None}
        return self._encode([{"type": "message_start", "message": self._message() | unfinished}]) + PING

    def beat(self) -> bytes:
        """See `Streamed.beat`."""
        return PING

    def ending(self) -> bytes:
        """See `Streamed.ending`."""
        ends = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()} | self._timings()
        return self._encode([ends, {"type": "message_stop"}])

    def failure(self, error: TokenmillError) -> bytes:
        """See `Streamed.failure`."""
        return self._encode([anthropic_error(error)])

    def _encode(self, events: Iterable[Json]) -> bytes:
        return b"".join(encode_event(event, event["type"]) for event in events)

    def _body(self) -> Json:
        return self._message() | self._stop() | self._timings()

    def _open(self, part: Part) -> Iterator[Json]:
        block: Json = {"type": self._type(part)}
        if part.kind == "call":
            block |= {"id": call_id(self._dialect), "name": part.text, "input": {}}
        else:
            block |= {"thinking": "", "signature": ""} if part.kind == "reasoning" else {"text": ""}
        self._output.append(block)
        yield {"type": "content_block_start", "index": len(self._output) - 1, "content_block": block}

    def _extend(self, part: Part) -> Iterator[Json]:
        kind, name = DELTAS[part.kind]
        delta = {"type": kind, name: part.text}
        yield {"type": "content_block_delta", "index": len(self._output) - 1, "delta": delta}

    def _end_block(self, block: Json, text: str, *, is_last: bool) -> Iterator[Json]:
        if block["type"] == "tool_use":
            block["input"] = msgspec.json.decode(text) if is_object(text) else {}
        else:
            block[block["type"]] = text
        yield {"type": "content_block_stop", "index": len(self._output) - 1}

    def _message(self) -> Json:
        head = self._head
        same = {"id": f"msg_{head.request_id}", "type": "message", "role": "assistant", "model": head.model}
        return {**same, "content": self._output, "usage": self._usage()}

    def _stop(self) -> Json:
        assert self._end is not None
        reason, matched = self._end.finish_reason, self._end.stop_reason
        if reason is FinishReason.STOP and isinstance(matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        shown = STOP_REASONS.get(reason, "pause_turn") if reason is not None else None
        return {"stop_reason": "tool_use" if self._calls and shown == "end_turn" else shown, "stop_sequence": None}

    def _usage(self) -> Json:
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion_tokens,
        }
