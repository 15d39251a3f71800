"""The JSON of answers: chat completions and text completions, whole and as chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenmill.types import FinishReason, Usage
from tokenmill.wire.messages import TextDelta

Json = dict[str, Any]


class ChatShape:
    """/v1/chat/completions."""

    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> Iterator[Json]:
        """Choices of chunks that come before any text: the role, with empty content."""
        yield self._chunk(index, {"role": "assistant", "content": ""})

    def chunks(self, index: int, delta: TextDelta) -> Iterator[Json]:
        """Choices of the chunks for what is new: a content chunk if there is text, and one of its own for the end."""
        if delta.text:
            yield self._chunk(index, {"content": delta.text})
        if delta.finish_reason is not None:
            yield self._chunk(index, {}) | _end(delta)

    def choice(self, index: int, text: str, last: TextDelta) -> Json:
        """One choice of a whole answer; `last` is the delta that ended it."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None} | _end(last)

    def _chunk(self, index: int, delta: Json) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


class CompletionShape:
    """/v1/completions."""

    prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, index: int) -> Iterator[Json]:
        """Nothing: text comes first."""
        return iter(())

    def chunks(self, index: int, delta: TextDelta) -> Iterator[Json]:
        """One chunk; the end comes with the last text."""
        yield {"index": index, "text": delta.text, "logprobs": None} | _end(delta)

    def choice(self, index: int, text: str, last: TextDelta) -> Json:
        """One choice of a whole answer."""
        return {"index": index, "text": text, "logprobs": None} | _end(last)


Shape = ChatShape | CompletionShape


def usage_json(usage: Usage) -> Json:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _end(delta: TextDelta) -> Json:
    """A deadline cancels a request: that is what clients know, and the reason says why."""
    if delta.finish_reason is FinishReason.DEADLINE:
        return {"finish_reason": FinishReason.ABORT, "stop_reason": FinishReason.DEADLINE}
    return {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
