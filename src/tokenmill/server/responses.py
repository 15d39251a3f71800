"""/v1/responses: a request to one of a chat, and its deltas to items and events. Nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from tokenmill.errors import TokenmillError
from tokenmill.server.fields import CHAT
from tokenmill.server.logprobs import chat_logprobs
from tokenmill.server.parts import Kind, Part
from tokenmill.server.protocol import PLAIN, GenerationRequest, parse_as_chat
from tokenmill.server.responses_fields import ECHOED, RESPONSES, WITH_LOGPROBS
from tokenmill.server.shapes import Blocks, call_id
from tokenmill.server.sse import encode_event
from tokenmill.text.dialect import Dialect
from tokenmill.types import FinishReason
from tokenmill.wire.messages import TextDelta

Json = dict[str, Any]

# What has the same name and meaning in a chat.
SHARED = [
    field.path
    for field in RESPONSES
    if field.path in CHAT.fields and field.path not in ("tools", "tool_choice", "stream_options", "top_logprobs")
]
RENAMED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
IDS: Mapping[Kind, str] = {"content": "msg", "reasoning": "rs", "call": "fc"}
DEFAULTS: Mapping[str, Any] = {
    "metadata": {},
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
}


def parse_responses(
    body: Json, defaults: Mapping[str, Any], now: int = 0, dialect: Dialect = PLAIN
) -> GenerationRequest:
    """A /v1/responses request as one of a chat; see `parse_chat`."""
    RESPONSES.check_all(body)
    return replace(parse_as_chat(_chat_body(body), RENAMED, defaults, now, dialect), asked=body)


def _chat_body(body: Json) -> Json:
    chat = {name: body[name] for name in SHARED if body.get(name) is not None}
    chat["messages"] = _messages(body)
    chat["max_completion_tokens"] = body.get("max_output_tokens")
    chat["top_logprobs"] = body.get("top_logprobs")
    chat["tools"] = [_nested(tool) for tool in body.get("tools") or ()]
    chat["tool_choice"] = _nested(choice) if isinstance(choice := body.get("tool_choice"), dict) else choice
    chat["response_format"] = _nested((body.get("text") or {}).get("format") or {"type": "text"})
    if effort := (body.get("reasoning") or {}).get("effort"):
        chat["reasoning_effort"] = effort
    chat["logprobs"] = WITH_LOGPROBS in (body.get("include") or []) or bool(body.get("top_logprobs"))
    return chat


def _nested(flat: Json) -> Json:
    """Chats have within a field of the type's name what is beside a type here."""
    rest = {name: value for name, value in flat.items() if name != "type"}
    if "tools" in rest:
        rest["tools"] = [_nested(tool) for tool in rest["tools"]]
    return {"type": flat["type"]} | ({flat["type"]: rest} if rest else {})


def _messages(body: Json) -> list[Json]:
    messages: list[Json] = []
    if body.get("instructions") is not None:
        messages.append({"role": "system", "content": body["instructions"]})
    given = body["input"]
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        kind, role = item.get("type") or "message", item.get("role")
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _content(item["output"])})
        elif kind == "message" and role != "assistant":
            messages.append({"role": role, "content": _content(item["content"])})
        else:
            _add_to_answer(messages, kind, item)
    return messages


def _add_to_answer(messages: list[Json], kind: str, item: Json) -> None:
    """What the assistant did, in the order of thoughts, text and calls, is one message."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    has_more = last is not None and (last.get("tool_calls") or (kind != "function_call" and last["content"]))
    if last is None or (has_more and kind != "function_call"):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    if kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        last.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
    elif kind == "reasoning":
        thoughts = item.get("content") or item.get("summary") or []
        last["reasoning_content"] = "\n".join(part["text"] for part in thoughts)
    else:
        last["content"] = _content(item["content"])


def _content(content: Any) -> Any:
    return content if isinstance(content, str) else [{"type": "text", "text": part["text"]} for part in content]


class ResponsesShape(Blocks):
    """Items as they come; each event has the next sequence number."""

    types = ("message", "reasoning", "function_call")

    def __init__(self, call: GenerationRequest, dialect: Dialect) -> None:
        super().__init__(call, dialect)
        self._number = 0

    def opening(self) -> bytes:
        """See `Streamed.opening`."""
        kinds = "response.created", "response.in_progress"
        return self._encode({"type": kind, "response": self._body()} for kind in kinds)

    def ending(self) -> bytes:
        """See `Streamed.ending`."""
        response = self._body()
        return self._encode([{"type": f"response.{response['status']}", "response": response}])

    def failure(self, error: TokenmillError) -> bytes:
        """See `Streamed.failure`."""
        deque(self._close(is_last=True), maxlen=0)
        failed = {"status": "failed", "error": {"code": "server_error", "message": error.message}}
        return self._encode([{"type": "response.failed", "response": self._body() | failed}])

    def _encode(self, events: Iterable[Json]) -> bytes:
        encoded = []
        for event in events:
            encoded.append(encode_event({**event, "sequence_number": self._number}, event["type"]))
            self._number += 1
        return b"".join(encoded)

    def _begin(self, tools: Mapping[str, Json]) -> None:
        super()._begin(tools)
        self._logprobs: list[Json] = []  # of tokens whose text is held back
        self._num_tokens = self._reasoning_tokens = 0

    def _events(self, delta: TextDelta) -> Iterator[Json]:
        self._logprobs += (chat_logprobs(delta.logprobs or None) or {"content": []})["content"]
        self._num_tokens = delta.completion_tokens
        yield from super()._events(delta)

    def _close(self, *, is_last: bool = False) -> Iterator[Json]:
        if is_last and (not self._output or (self._logprobs and self._output[-1]["type"] == "message")):
            yield from self._add(Part("content", ""))
        yield from super()._close(is_last=is_last)

    def _open(self, part: Part) -> Iterator[Json]:
        item: Json = {"type": self._type(part), "id": f"{IDS[part.kind]}_{uuid.uuid4().hex}", "status": "in_progress"}
        shown: Json | None = None
        if part.kind == "call":
            item |= {"call_id": call_id(self._dialect), "name": part.text, "arguments": ""}
        elif part.kind == "reasoning":
            item |= {"summary": [], "content": []}
            shown = {"type": "reasoning_text", "text": ""}
        else:
            item |= {"role": "assistant", "content": []}
            shown = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._output.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self._output) - 1, "item": item}
        if shown is not None:
            item["content"] = [shown]
            yield {"type": "response.content_part.added", **self._place(item), "content_index": 0, "part": shown}

    def _extend(self, part: Part) -> Iterator[Json]:
        item, logprobs, self._logprobs = self._output[-1], self._logprobs, []  # of thoughts and calls none are shown
        event = {**self._place(item), "delta": part.text}
        if part.kind == "arguments":
            yield {"type": "response.function_call_arguments.delta", **event}
            return
        shown = item["content"][0]
        if part.kind == "reasoning":
            self._reasoning_tokens = self._num_tokens
        else:
            shown["logprobs"] += logprobs
            event["logprobs"] = logprobs
        if part.text:
            yield {"type": f"response.{shown['type']}.delta", "content_index": 0, **event}

    def _end_block(self, block: Json, text: str, *, is_last: bool) -> Iterator[Json]:
        is_whole = not is_last or (self._end is not None and self._end.finish_reason is FinishReason.STOP)
        block["status"] = "completed" if is_whole else "incomplete"
        place = self._place(block)
        if block["type"] == "function_call":
            block["arguments"] = text
            done = {"name": block["name"], "arguments": text}
            yield {"type": "response.function_call_arguments.done", **place, **done}
        else:
            shown = block["content"][0]
            shown["text"] = text
            done = {name: shown[name] for name in ("text", "logprobs") if name in shown}
            yield {"type": f"response.{shown['type']}.done", **place, "content_index": 0, **done}
            yield {"type": "response.content_part.done", **place, "content_index": 0, "part": shown}
        yield {"type": "response.output_item.done", "output_index": place["output_index"], "item": block}

    def _place(self, item: Json) -> Json:
        return {"item_id": item["id"], "output_index": len(self._output) - 1}

    def _body(self) -> Json:
        head, asked, params = self._head, self._call.asked, self._call.params
        reason = None if self._end is None else self._end.finish_reason
        status = "in_progress" if reason is None else "completed" if reason is FinishReason.STOP else "incomplete"
        why = "max_output_tokens" if reason is FinishReason.LENGTH else reason
        counted = {"temperature": params.temperature, "top_p": params.top_p, "max_output_tokens": params.max_tokens}
        effort = (asked.get("reasoning") or {}).get("effort")
        response = {
            "id": f"resp_{head.request_id}",
            "object": "response",
            "created_at": head.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "model": head.model,
            "output": self._output,
            "usage": self._usage() if reason is not None else None,
            "error": None,
            "incomplete_details": {"reason": why} if status == "incomplete" else None,
            "store": False,
            "background": False,
            "truncation": "disabled",
            "previous_response_id": None,
            "reasoning": {"effort": effort, "summary": None},
        }
        asked_for = {
            name: asked[name] for name in (*ECHOED.split(), "user", "service_tier") if asked.get(name) is not None
        }
        response |= {**dict.fromkeys(ECHOED.split()), **DEFAULTS, **counted, **asked_for}
        return response | (self._timings() if reason is not None else {})

    def _usage(self) -> Json:
        usage = self._generation.usage
        cached = usage.cached_tokens
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": usage.prompt_tokens - cached},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
