"""JSON bodies of the OpenAI API to checked requests: a field is honoured, asks for nothing, or is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from tokenmill.errors import InvalidRequest, UnsupportedField
from tokenmill.schema import Table, equals, kind_of
from tokenmill.server.errors import renamed
from tokenmill.server.fields import CHAT, COMPLETION, DETOKENIZE, MAX_CHOICES_IN_ALL, MAX_REQUEST_ID, TOKENIZE
from tokenmill.server.tools import ToolUse, tool_use
from tokenmill.text.dialect import Dialect
from tokenmill.text.messages import check_messages
from tokenmill.types import MAX_GRAMMARS_IN_ALL, MAX_INT32, SamplingParams, Scheduling, StructuredOutputs, deadline_from
from tokenmill.wire.messages import ChatPrompt, TextCall, pack_ids

Prompt = str | list[int] | ChatPrompt

COMPLETION_MAX_TOKENS = 16
MAX_DEPTH, MAX_OBJECTS = 64, 2**15
PLAIN = Dialect()
NO_TOOLS = ToolUse()

NOT_BY_NAME = "max_tokens", "logit_bias", "logprobs", "structured_outputs"
SAMPLING = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if (row := CHAT.fields.get(name)) and row.status == "honoured" and name not in NOT_BY_NAME
)


@dataclass(frozen=True, slots=True)
class VectorForm:
    """How embeddings are shown: of how many numbers (None: all), and whether as base64 of float32."""

    dimensions: int | None = None
    is_base64: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request that has passed every check that needs no tokenizer. `model` is None when the body names none.

    `names` are those that its API has for fields which errors call otherwise.
    """

    model: str | None
    prompts: list[Prompt]
    params: SamplingParams
    request_id: str | None
    scheduling: Scheduling
    timings: bool
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    tools: ToolUse = NO_TOOLS
    shows_prompt_logprobs: bool = False
    vectors: VectorForm = VectorForm()
    names: Mapping[str, str] = field(default_factory=dict)
    asked: Mapping[str, Any] = field(default_factory=dict, compare=False)  # the body, where answers tell it


def decode_body(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; a byte order mark is skipped, and of a key given twice the last counts.

    Raises InvalidRequest for what is not strict JSON in UTF-8 (NaN and lone surrogates are not), nested too deeply, or
    of so many objects that other requests would wait while they are checked.
    """
    try:
        value = msgspec.json.decode(body.removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {kind_of(value)}")
    if body.count(b"{") > MAX_OBJECTS and _has_many_objects(value):
        raise InvalidRequest(f"the body holds over {MAX_OBJECTS} objects: send fewer messages, or fewer parts of them")
    return value


def _has_many_objects(value: Any) -> bool:
    """Whether there are over MAX_OBJECTS of them, and not only their braces in texts."""
    count, left = 0, [value]
    while left and count <= MAX_OBJECTS:
        item = left.pop()
        count += isinstance(item, dict)
        left += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return count > MAX_OBJECTS


def parse_chat(
    body: dict[str, Any], defaults: Mapping[str, Any], now: int = 0, dialect: Dialect = PLAIN
) -> GenerationRequest:
    """A /v1/chat/completions request; `defaults` are sampling values for fields that are left out.

    `now` is when it came, in milliseconds: deadlines count from there. `dialect` is the model's. Raises InvalidRequest
    for a field that is missing, wrong, or not honoured (UnsupportedField).
    """
    fields = Fields(body, CHAT)
    top, has_logprobs = fields.take("top_logprobs"), fields.take("logprobs") is True
    if top and not has_logprobs:
        raise InvalidRequest("top_logprobs is for logprobs: set logprobs to true or leave it out", "top_logprobs")
    logprobs = (top or 0) if has_logprobs else None
    structured = _structured(fields)
    use = _tool_use(fields, dialect, structured)
    if use.grammar is not None:
        structured = StructuredOutputs(grammar=use.grammar, param="tools")
    prompt = _chat_prompt(fields, use.shown, dialect)
    return _finish(fields, [prompt], defaults, now, logprobs=logprobs, structured=structured, tools=use)


def parse_as_chat(
    body: dict[str, Any], names: Mapping[str, str], defaults: Mapping[str, Any], now: int, dialect: Dialect
) -> GenerationRequest:
    """A chat that another API's request asks for; see `parse_chat`. `names` are those that errors must have."""
    try:
        return replace(parse_chat(body, defaults, now, dialect), names=names)
    except InvalidRequest as error:
        raise renamed(error, names) from None


def parse_completion(
    body: dict[str, Any], defaults: Mapping[str, Any], now: int = 0, dialect: Dialect = PLAIN
) -> GenerationRequest:
    """A /v1/completions request; see `parse_chat`."""
    fields = Fields(body, COMPLETION)
    prompts = prompts_of(fields.raw("prompt"))
    logprobs = fields.take("logprobs")
    logprobs = None if logprobs is False else logprobs
    options: dict[str, Any] = {"echo": fields.take("echo") is True, "logprobs": logprobs}
    return _finish(fields, prompts, defaults, now, COMPLETION_MAX_TOKENS, structured=_structured(fields), **options)


def parse_tokenize(body: dict[str, Any]) -> tuple[str | None, TextCall, Prompt]:
    """Model, question and prompt of a /tokenize request. Raises as `parse_chat`."""
    fields = Fields(body, TOKENIZE)
    model, with_strings = fields.take("model"), fields.take("return_token_strs") is True
    add_special_tokens = fields.take("add_special_tokens")
    prompt: Prompt = template_prompt(fields) if "messages" in body else fields.take("prompt")
    if prompt is None:
        raise InvalidRequest("prompt is missing: give a text, or messages", "prompt")
    if "messages" in body and add_special_tokens:
        words = "add_special_tokens must be false or left out beside messages: the chat template writes them"
        raise UnsupportedField(words, "add_special_tokens")
    fields.refuse_rest()
    return model, TextCall(add_special_tokens=add_special_tokens is not False, with_strings=with_strings), prompt


def parse_detokenize(body: dict[str, Any]) -> tuple[str | None, TextCall]:
    """Model and question of a /detokenize request. Raises as `parse_chat`."""
    fields = Fields(body, DETOKENIZE)
    model, raw = fields.take("model"), fields.raw("tokens")
    if not isinstance(raw, list):
        raise InvalidRequest("tokens must be a list of token ids", "tokens")
    token_ids = _token_ids(raw, "tokens") if raw else []
    fields.refuse_rest()
    return model, TextCall(token_ids=pack_ids(token_ids))


def _chat_prompt(fields: Fields, tools: Sequence[dict[str, Any]], dialect: Dialect = PLAIN) -> ChatPrompt:
    continues = fields.take("continue_final_message") is True
    add_generation_prompt = fields.take("add_generation_prompt")
    budget = fields.take("thinking_token_budget")
    if budget is not None and dialect.reasoning is None:
        words = "this model does not think aloud; if it does, start the server with --reasoning-parser"
        raise InvalidRequest(f"thinking_token_budget: {words}", "thinking_token_budget")
    effort = _effort(fields.take("reasoning_effort"), dialect)
    template_kwargs = effort | (fields.take("chat_template_kwargs") or {})
    messages = check_messages(fields.raw("messages"))
    for name, value in (("chat_template_kwargs", template_kwargs), ("messages", messages), ("tools", tools)):
        if not _can_travel(value):
            words = f"must not be nested over {MAX_DEPTH} deep, or hold integers over 64 bits"
            raise InvalidRequest(f"{name} {words}", name)
    thoughts = [] if dialect.thoughts is None else [dialect.thoughts.start, dialect.thoughts.end]
    shown = [*thoughts, *([dialect.style.tags.start, dialect.style.tags.end] if tools else [])]
    return ChatPrompt(
        messages=messages,
        tools=[*tools] or None,
        add_generation_prompt=not continues if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=continues,
        template_kwargs=template_kwargs,
        thought_tags=thoughts,
        thinking_token_budget=budget,
        shown_ids=[dialect.special[tag] for tag in shown if tag in dialect.special],
    )


def _effort(effort: str | None, dialect: Dialect) -> dict[str, Any]:
    """What the chat template is told of how much to think."""
    if effort is None or (effort == "none" and dialect.reasoning is None):
        return {}
    if "reasoning_effort" in dialect.variables:
        return {"reasoning_effort": effort}
    if effort == "none" and "enable_thinking" in dialect.variables:
        return {"enable_thinking": False}
    words = "the model's chat template knows no such effort: leave it out, or set thinking_token_budget"
    raise UnsupportedField(f"reasoning_effort {effort!r}: {words}", "reasoning_effort")


def template_prompt(fields: Fields) -> ChatPrompt:
    """Messages, and what shows them, where nothing is generated."""
    return _chat_prompt(fields, fields.take("tools") or ())


def _tool_use(fields: Fields, dialect: Dialect, answer: StructuredOutputs | None) -> ToolUse:
    tools, choice = fields.take("tools") or [], fields.take("tool_choice")
    is_parallel = fields.take("parallel_tool_calls") is not False
    return tool_use(dialect, tools, choice, is_parallel=is_parallel, answer=answer)


class Fields:
    """The body's fields, each taken once; null counts as left out."""

    def __init__(self, body: dict[str, Any], table: Table) -> None:
        self._left = dict(body)
        self._table = table

    def raw(self, name: str) -> Any:
        """A field that is checked by who takes it."""
        return self._left.pop(name, None)

    def take(self, name: str) -> Any:
        """A field, checked; None if it is left out and may be."""
        value = self._left.pop(name, None)
        if value is not None or name in self._table.schema["required"]:
            self._table.check(name, value)
        return value

    def refuse_rest(self) -> None:
        """Every field that was not taken must ask for nothing."""
        for name, value in self._left.items():
            self._table.check(name, value)
            if value is not None and self._table.fields[name].status == "honoured":
                raise UnsupportedField(f"{name} means nothing beside the other fields: leave it out", name)


def _finish(
    fields: Fields,
    prompts: list[Prompt],
    defaults: Mapping[str, Any],
    now: int,
    max_tokens: int | None = None,
    *,
    echo: bool = False,
    logprobs: int | None = None,
    structured: StructuredOutputs | None = None,
    tools: ToolUse = NO_TOOLS,
) -> GenerationRequest:
    params = _params(fields, defaults, max_tokens, logprobs=logprobs, structured_outputs=structured)
    if len(prompts) * params.n > MAX_CHOICES_IN_ALL:
        asked = f"{len(prompts)} prompts with n={params.n} are over {MAX_CHOICES_IN_ALL} answers"
        raise InvalidRequest(f"{asked}: send several requests", "n")
    held = params.structured_outputs
    if held is not None and len(prompts) * params.n * held.size > MAX_GRAMMARS_IN_ALL:
        words = f"{held.size} characters for each of {len(prompts) * params.n} answers are over {MAX_GRAMMARS_IN_ALL}"
        raise InvalidRequest(f"{held.param}: {words}: send several requests", held.param)
    stream = fields.take("stream") is True
    include_usage = _include_usage(fields, stream)
    best_of = fields.take("best_of")
    if stream and params.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs is not for streams: set stream to false", "prompt_logprobs")
    shows_prompt_logprobs = params.prompt_logprobs is not None
    if echo and logprobs is not None:
        if params.prompt_logprobs not in (None, logprobs):
            raise InvalidRequest("prompt_logprobs must equal logprobs with echo: leave it out", "prompt_logprobs")
        params = msgspec.structs.replace(params, prompt_logprobs=logprobs)
    if best_of not in (None, params.n):
        raise UnsupportedField("best_of is not supported unless it equals n: leave it out", "best_of")
    return GenerationRequest(
        prompts=prompts,
        params=params,
        stream=stream,
        include_usage=include_usage,
        echo=echo,
        tools=tools,
        shows_prompt_logprobs=shows_prompt_logprobs,
        **shared_of(fields, now),
    )


def shared_of(fields: Fields, now: int) -> dict[str, Any]:
    """What all that is generated for has in common; the other fields must be taken by now."""
    model, request_id = fields.take("model"), fields.take("request_id")
    if request_id is not None:
        check_request_id(request_id, "request_id")
    scheduling = Scheduling(
        priority=fields.take("priority") or 0,
        deadline=deadline_from(now, fields.take("deadline_ms"), fields.take("timeout")),
        tenant=fields.take("user") or "",
        salt=fields.take("cache_salt") or "",
    )
    timings = fields.take("timings") is True
    fields.refuse_rest()
    return {"model": model, "request_id": request_id, "scheduling": scheduling, "timings": timings}


def check_request_id(request_id: str, name: str) -> None:
    """Raises InvalidRequest unless the id can stand in an HTTP header."""
    if not (0 < len(request_id) <= MAX_REQUEST_ID and request_id.isascii() and request_id.isprintable()):
        raise InvalidRequest(f"{name} must be 1 to {MAX_REQUEST_ID} printable ASCII characters", name)


def _params(fields: Fields, defaults: Mapping[str, Any], max_tokens: int | None, **taken: Any) -> SamplingParams:
    values = {name: default for name, default in defaults.items() if name in SAMPLING}
    values |= {name: value for name in SAMPLING if (value := fields.raw(name)) is not None}
    bias = fields.take("logit_bias") or {}
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequest(f"logit_bias must have token ids as keys, not {key[:40]!r}", "logit_bias")
    old, new = fields.raw("max_tokens"), fields.take("max_completion_tokens")
    if old is not None and new is not None and not equals(old, new):
        raise InvalidRequest("max_tokens and max_completion_tokens differ: set only one", "max_tokens")
    given = old if new is None else new
    values["max_tokens"] = max_tokens if given is None else given
    values["logit_bias"] = {int(key): value for key, value in bias.items()}
    return SamplingParams(**values, **taken)


def _structured(fields: Fields) -> StructuredOutputs | None:
    """What the output must be; a schema becomes text, as integers of any size and any depth stand in one."""
    response_format, structured = fields.take("response_format"), fields.take("structured_outputs")
    kind = (response_format or {}).get("type", "text")
    if kind != "text" and structured is not None:
        raise InvalidRequest("structured_outputs and response_format differ: set only one", "structured_outputs")
    if kind == "json_schema":
        wanted = response_format["json_schema"]
        strict = wanted.get("strict") is True
        return StructuredOutputs(json=json.dumps(wanted["schema"]), strict=strict, param="response_format")
    if kind == "json_object":
        return StructuredOutputs(json_object=True, param="response_format")
    given = {name: value for name, value in (structured or {}).items() if value is not None}
    if isinstance(given.get("json"), dict):
        given["json"] = json.dumps(given["json"])
    return StructuredOutputs(**given) if structured is not None else None


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.take("stream_options")
    if options is not None and not stream:
        raise InvalidRequest("stream_options is for streams only: set stream to true or leave it out", "stream_options")
    return (options or {}).get("include_usage") is True


def prompts_of(raw: Any, name: str = "prompt") -> list[Prompt]:
    """The value of a field that holds one prompt or several, by hand: such lists may be long."""
    if raw is None:
        raise InvalidRequest(f"{name} is missing: give a string, a list of strings, or token ids", name)
    if isinstance(raw, str):
        return [raw]
    if not isinstance(raw, list) or not raw:
        raise InvalidRequest(f"{name} must be a string, or a list of strings or token ids that is not empty", name)
    if len(raw) <= MAX_CHOICES_IN_ALL and all(isinstance(item, str) for item in raw):
        return list(raw)
    if all(isinstance(item, list) for item in raw):
        if len(raw) > MAX_CHOICES_IN_ALL or not all(raw):
            raise InvalidRequest(f"{name} must hold 1 to {MAX_CHOICES_IN_ALL} lists, none of them empty", name)
        return [_token_ids(item, name) for item in raw]
    return [_token_ids(raw, name)]


def _token_ids(items: list[Any], name: str) -> list[int]:
    if not all(type(item) is int for item in items):
        wrong = next(kind_of(item) for item in items if type(item) is not int)
        raise InvalidRequest(f"{name} must hold strings only or token ids only; {wrong} is out of place", name)
    if min(items) < 0 or max(items) > MAX_INT32:
        raise InvalidRequest(f"{name} has a token id outside 0 to {MAX_INT32}", name)
    return items


def _can_travel(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether the value can be sent on to another process."""
    if isinstance(value, dict | list | tuple):
        items = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_can_travel(item, depth - 1) for item in items)
    return not isinstance(value, int) or -(2**63) <= value < 2**64
