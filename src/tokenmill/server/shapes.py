"""The JSON of answers: chat completions and text completions, whole and as streams of chunks."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from tokenmill.errors import TokenmillError
from tokenmill.server.errors import error_object
from tokenmill.server.generation import Generation
from tokenmill.server.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from tokenmill.server.parts import Part
from tokenmill.server.protocol import GenerationRequest
from tokenmill.server.reader import AnswerReader, is_object, read_whole
from tokenmill.server.sse import COMMENT, DONE, Chunks, encode_event
from tokenmill.text.dialect import Dialect
from tokenmill.types import FinishReason, TokenLogprobs, Usage
from tokenmill.wire.messages import TextDelta

Json = dict[str, Any]
Batch = Sequence[tuple[int, TextDelta]]


@dataclass(frozen=True, slots=True)
class Head:
    """What is the same in all of an answer. `has_timings`: they are to be told."""

    request_id: str
    model: str
    created: int
    has_timings: bool


class Shape(ABC):
    """How one request is answered. `start` is called first, once the request is accepted."""

    def __init__(self, call: GenerationRequest, dialect: Dialect) -> None:
        self._call = call
        self._dialect = dialect

    def start(self, head: Head, generation: Generation) -> None:
        """`generation` is read for what it knows of usage and times."""
        self._head = head
        self._generation = generation

    @abstractmethod
    def whole(self, deltas: Sequence[Sequence[TextDelta]]) -> Json:
        """The whole answer, from all deltas of each choice."""

    def _timings(self) -> Json:
        return {"timings": self._generation.timings} if self._head.has_timings else {}

    def _new_reader(self, tools: Mapping[str, Json]) -> AnswerReader:
        return AnswerReader(self._dialect, tools, self._generation.is_thinking)


class Streamed(Shape):
    """How one request is answered that may ask for a stream."""

    @abstractmethod
    def opening(self) -> bytes:
        """The events before any text."""

    @abstractmethod
    def news(self, batch: Batch) -> bytes:
        """Events for what is new."""

    def beat(self) -> bytes:
        """What is sent while nothing is new."""
        return COMMENT

    @abstractmethod
    def ending(self) -> bytes:
        """The events after the last choice has ended."""

    @abstractmethod
    def failure(self, error: TokenmillError) -> bytes:
        """The last event of a stream that cannot go on."""


class Blocks(Streamed):
    """An answer as blocks, one after another: thoughts, texts and calls, as newer APIs have them.

    A subclass says what `types` blocks of content, thoughts and calls have, and encodes its events. A call that is cut
    or broken is text of a whole answer: then nothing in it is a call.
    """

    types: tuple[str, str, str]

    def __init__(self, call: GenerationRequest, dialect: Dialect) -> None:
        super().__init__(call, dialect)
        self._end: TextDelta | None = None

    def start(self, head: Head, generation: Generation) -> None:
        """See `Shape.start`."""
        super().start(head, generation)
        self._begin(self._call.tools.callable)

    def whole(self, deltas: Sequence[Sequence[TextDelta]]) -> Json:
        """See `Shape.whole`."""
        for tools in (self._call.tools.callable, {}):
            self._begin(tools)
            deque((event for delta in deltas[0] for event in self._events(delta)), maxlen=0)
            if all(map(is_object, self._calls)):
                break
        return self._body()

    def news(self, batch: Batch) -> bytes:
        """See `Streamed.news`."""
        return self._encode(event for _, delta in batch for event in self._events(delta))

    @abstractmethod
    def _body(self) -> Json:
        """The answer as it is."""

    @abstractmethod
    def _encode(self, events: Iterable[Json]) -> bytes: ...

    @abstractmethod
    def _open(self, part: Part) -> Iterator[Json]:
        """Add a block to the output, and what tells of it."""

    @abstractmethod
    def _extend(self, part: Part) -> Iterator[Json]:
        """What tells of more in the last block."""

    @abstractmethod
    def _end_block(self, block: Json, text: str, *, is_last: bool) -> Iterator[Json]:
        """Put all of its text into a block, and what tells of its end."""

    def _type(self, part: Part) -> str:
        return self.types[{"content": 0, "reasoning": 1}.get(part.kind, 2)]

    def _begin(self, tools: Mapping[str, Json]) -> None:
        self._output: list[Json] = []
        self._calls: list[str] = []  # the arguments of each
        self._text: list[str] = []  # of the open block
        self._is_open = False
        self._reader = self._new_reader(tools)

    def _events(self, delta: TextDelta) -> Iterator[Json]:
        parts = self._reader.push(delta.text)
        if delta.finish_reason is not None:
            self._end = delta
            parts += self._reader.finish()
        for part in parts:
            yield from self._add(part)
        if delta.finish_reason is not None:
            yield from self._close(is_last=True)

    def _add(self, part: Part) -> Iterator[Json]:
        if part.kind == "call" or not self._is_open or self._output[-1]["type"] != self._type(part):
            yield from self._close()
            yield from self._open(part)
            self._is_open = True
        if part.kind != "call":
            self._text.append(part.text)
            yield from self._extend(part)

    def _close(self, *, is_last: bool = False) -> Iterator[Json]:
        if self._is_open:
            block, text, self._text, self._is_open = self._output[-1], "".join(self._text), [], False
            self._calls += [text] if block["type"] == self.types[2] else []
            yield from self._end_block(block, text, is_last=is_last)


class _Chunks(Streamed):
    """What OpenAI's two older APIs have in common. A subclass says how one choice is shown."""

    prefix = object = chunk_object = ""

    def start(self, head: Head, generation: Generation) -> None:
        super().start(head, generation)
        self._events = Chunks(self._same(self.chunk_object), {"usage": None} if self._call.include_usage else {})

    def whole(self, deltas: Sequence[Sequence[TextDelta]]) -> Json:
        choices = [self.choice(index, self._joined(its)) for index, its in enumerate(deltas)]
        body = self._envelope(self.object, choices) | {"usage": usage_json(self._generation.usage)}
        if self._call.shows_prompt_logprobs:
            self.add_prompt_logprobs(body, [its[0].prompt_logprobs or [] for its in deltas])
        return body | self._timings()

    def opening(self) -> bytes:
        indices = range(self._generation.num_choices)
        return b"".join(self._event(choice) for index in indices for choice in self.first_chunks(index))

    def news(self, batch: Batch) -> bytes:
        chunks = [choice for index, delta in batch for choice in self.chunks(index, self._with_echo(delta))]
        more = self._timings() if self._generation.has_ended else {}
        return b"".join(self._event(choice, more if choice is chunks[-1] else {}) for choice in chunks)

    def ending(self) -> bytes:
        if not self._call.include_usage:
            return DONE
        usage = {"usage": usage_json(self._generation.usage)}
        return encode_event(self._envelope(self.chunk_object, []) | usage) + DONE

    def failure(self, error: TokenmillError) -> bytes:
        return encode_event(error_object(error))

    def first_chunks(self, index: int) -> Iterator[Json]:
        """Choices of chunks that come before any text."""
        return iter(())

    @abstractmethod
    def chunks(self, index: int, delta: TextDelta) -> Iterator[Json]:
        """Choices of the chunks for what is new."""

    @abstractmethod
    def choice(self, index: int, whole: TextDelta) -> Json:
        """One choice of a whole answer; `whole` is the delta that ended it, with all text and logprobs."""

    @abstractmethod
    def add_prompt_logprobs(self, body: Json, prompts: list[list[TokenLogprobs]]) -> None:
        """Put them into a whole answer."""

    def _joined(self, deltas: Sequence[TextDelta]) -> TextDelta:
        entries = [its for delta in deltas for its in self._with_echo(delta).logprobs or ()]
        logprobs = None if self._call.params.logprobs is None else entries
        return replace(deltas[-1], text="".join(delta.text for delta in deltas), logprobs=logprobs)

    def _with_echo(self, delta: TextDelta) -> TextDelta:
        """An echoed prompt's logprobs stand before the output's."""
        if not (self._call.echo and self._call.params.logprobs is not None and delta.prompt_logprobs):
            return delta
        return replace(delta, logprobs=delta.prompt_logprobs + (delta.logprobs or []))

    def _event(self, choice: Json, more: Mapping[str, Any] = {}) -> bytes:
        return self._events.encode(choice, more)

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {**self._same(kind), "choices": choices}

    def _same(self, kind: str) -> Json:
        head = self._head
        return {"id": f"{self.prefix}-{head.request_id}", "object": kind, "created": head.created, "model": head.model}


class ChatShape(_Chunks):
    """/v1/chat/completions."""

    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, call: GenerationRequest, dialect: Dialect) -> None:
        super().__init__(call, dialect)
        self._readers: dict[int, AnswerReader] = {}
        self._has_calls: set[int] = set()

    def first_chunks(self, index: int) -> Iterator[Json]:
        """The role, with empty content."""
        self._readers[index] = self._new_reader(self._call.tools.callable)
        yield self._chunk(index, {"role": "assistant", "content": ""})

    def chunks(self, index: int, delta: TextDelta) -> Iterator[Json]:
        """One for each part that is certain, and one of its own for the end."""
        reader, has_ended = self._readers[index], delta.finish_reason is not None
        parts = reader.push(delta.text) + (reader.finish() if has_ended else [])
        shown = [self._chunk(index, self._delta(part)) for part in parts]
        if delta.logprobs:  # of tokens whose text is held back, too
            shown = shown or [self._chunk(index, {"content": ""})]
            shown[0]["logprobs"] = chat_logprobs(delta.logprobs)
        yield from shown
        if any(part.kind == "call" for part in parts):
            self._has_calls.add(index)
        if has_ended:
            yield self._chunk(index, {}) | _end(delta, index in self._has_calls)

    def choice(self, index: int, whole: TextDelta) -> Json:
        """A call whose arguments are cut or broken is shown as what it is: content."""
        parts = read_whole(whole.text, self._call.tools.callable, self._new_reader)
        message: Json = {"role": "assistant", "content": None, "refusal": None}
        calls: list[Json] = []
        for part in parts:
            if part.kind == "call":
                calls.append(self._call_json(part))
            elif part.kind == "arguments":
                calls[part.index]["function"]["arguments"] += part.text
            else:
                name = "content" if part.kind == "content" else "reasoning_content"
                message[name] = (message.get(name) or "") + part.text
        if calls:
            message["tool_calls"] = calls
        elif message["content"] is None:
            message["content"] = ""
        logprobs = chat_logprobs(whole.logprobs)
        return {"index": index, "message": message, "logprobs": logprobs} | _end(whole, bool(calls))

    def add_prompt_logprobs(self, body: Json, prompts: list[list[TokenLogprobs]]) -> None:
        """Those of the prompt, as each choice has them."""
        body["prompt_logprobs"] = prompt_logprobs(prompts[0])

    def _chunk(self, index: int, delta: Json) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _delta(self, part: Part) -> Json:
        if part.kind == "content":
            return {"content": part.text}
        if part.kind == "reasoning":
            return {"reasoning_content": part.text}
        call = self._call_json(part) if part.kind == "call" else {"function": {"arguments": part.text}}
        return {"tool_calls": [{"index": part.index} | call]}

    def _call_json(self, part: Part) -> Json:
        function = {"name": part.text, "arguments": ""}
        return {"id": call_id(self._dialect), "type": "function", "function": function}


class CompletionShape(_Chunks):
    """/v1/completions."""

    prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def chunks(self, index: int, delta: TextDelta) -> Iterator[Json]:
        """One chunk; the end comes with the last text."""
        yield self.choice(index, replace(delta, logprobs=delta.logprobs or None))

    def choice(self, index: int, whole: TextDelta) -> Json:
        """One choice of a whole answer."""
        return {"index": index, "text": whole.text, "logprobs": completion_logprobs(whole.logprobs)} | _end(whole)

    def add_prompt_logprobs(self, body: Json, prompts: list[list[TokenLogprobs]]) -> None:
        """Those of each choice's prompt."""
        for choice, entries in zip(body["choices"], prompts, strict=True):
            choice["prompt_logprobs"] = prompt_logprobs(entries)


def call_id(dialect: Dialect) -> str:
    """A new id for a call, of a form that the model's template takes."""
    letters = dialect.style.id_letters
    return uuid.uuid4().hex[:letters] if letters < 24 else f"call_{uuid.uuid4().hex[:letters]}"


def usage_json(usage: Usage) -> Json:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _end(delta: TextDelta, has_calls: bool = False) -> Json:
    """A deadline cancels a request: that is what clients know, and the reason says why."""
    if delta.finish_reason is FinishReason.DEADLINE:
        return {"finish_reason": FinishReason.ABORT, "stop_reason": FinishReason.DEADLINE}
    is_call = has_calls and delta.finish_reason is FinishReason.STOP
    return {"finish_reason": "tool_calls" if is_call else delta.finish_reason, "stop_reason": delta.stop_reason}
