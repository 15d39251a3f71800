"""The JSON of answers: chat completions and text completions, whole and as chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenmill.server.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from tokenmill.types import FinishReason, TokenLogprobs, Usage
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
        if delta.text or delta.logprobs:
            yield self._chunk(index, {"content": delta.text}) | {"logprobs": chat_logprobs(delta.logprobs or None)}
        if delta.finish_reason is not None:
            yield self._chunk(index, {}) | _end(delta)

    def choice(self, index: int, text: str, last: TextDelta) -> Json:
        """One choice of a whole answer; `last` is the delta that ended it, with all logprobs."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": chat_logprobs(last.logprobs)} | _end(last)

    def add_prompt_logprobs(self, body: Json, prompts: list[list[TokenLogprobs]]) -> None:
        """Those of the prompt, as each choice has them."""
        body["prompt_logprobs"] = prompt_logprobs(prompts[0])

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
        logprobs = completion_logprobs(delta.logprobs or None)
        yield {"index": index, "text": delta.text, "logprobs": logprobs} | _end(delta)

    def choice(self, index: int, text: str, last: TextDelta) -> Json:
        """One choice of a whole answer."""
        return {"index": index, "text": text, "logprobs": completion_logprobs(last.logprobs)} | _end(last)

    def add_prompt_logprobs(self, body: Json, prompts: list[list[TokenLogprobs]]) -> None:
        """Those of each choice's prompt."""
        for choice, entries in zip(body["choices"], prompts, strict=True):
            choice["prompt_logprobs"] = prompt_logprobs(entries)


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
