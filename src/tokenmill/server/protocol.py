"""JSON bodies of the OpenAI API to checked requests: a field is honoured, asks for nothing, or is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenmill.errors import InvalidRequest, UnsupportedField
from tokenmill.text.messages import check_messages
from tokenmill.types import MAX_INT32, SamplingParams, Scheduling, check_number, deadline_from
from tokenmill.wire.messages import CacheCall, CacheVerb, ChatPrompt

Prompt = str | list[int] | ChatPrompt

COMPLETION_MAX_TOKENS = 16
MAX_CHOICES_IN_ALL = 1024
MAX_DEPTH = 32
MAX_REQUEST_ID = 256
MAX_TTL = 30 * 86400

NOT_BY_NAME = "max_tokens", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty"
SAMPLING = tuple(name for name in SamplingParams.__struct_fields__ if name not in NOT_BY_NAME)
LABELS: Mapping[str, type] = {"safety_identifier": str, "metadata": dict}
NAMES = {bool: "true or false", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
ONLY_NULL = (
    "prompt_logprobs structured_outputs audio prediction reasoning_effort verbosity web_search_options "
    "allowed_token_ids truncate_prompt_tokens"
)
ONLY_FALSE = (
    "logprobs store use_beam_search return_token_ids echo stream_options.include_obfuscation "
    "stream_options.continuous_usage_stats"
)
# Fields that are not honoured, with the values that ask for nothing; null always does.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(ONLY_NULL.split(), ()),
    **dict.fromkeys(ONLY_FALSE.split(), (False,)),
    **dict.fromkeys(("tools", "functions", "bad_words"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "top_logprobs"), (0,)),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), (1,)),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "suffix": ("",),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
}


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request that has passed every check that needs no tokenizer. `model` is None when the body names none."""

    model: str | None
    prompts: list[Prompt]
    params: SamplingParams
    stream: bool
    include_usage: bool
    echo: bool
    request_id: str | None
    scheduling: Scheduling


def decode_body(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; a byte order mark is skipped, and of a key given twice the last counts.

    Raises InvalidRequest for what is not strict JSON in UTF-8 (NaN and lone surrogates are not), or nested too deeply.
    """
    try:
        value = msgspec.json.decode(body.removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {_kind(value)}")
    return value


def parse_chat(body: dict[str, Any], defaults: Mapping[str, Any], now: int = 0) -> GenerationRequest:
    """A /v1/chat/completions request; `defaults` are sampling values for fields that are left out.

    `now` is when it came, in milliseconds: deadlines count from there. Raises InvalidRequest for a field that is
    missing, wrong, or not honoured (UnsupportedField).
    """
    fields = _Fields(body)
    return _finish(fields, [_chat_prompt(fields)], defaults, now)


def parse_completion(body: dict[str, Any], defaults: Mapping[str, Any], now: int = 0) -> GenerationRequest:
    """A /v1/completions request; see `parse_chat`."""
    fields = _Fields(body)
    prompts = _prompts(fields.take("prompt"))
    return _finish(fields, prompts, defaults, now, COMPLETION_MAX_TOKENS, echo=fields.flag("echo"))


def parse_cache_call(body: dict[str, Any], verb: CacheVerb) -> tuple[CacheCall, Prompt | None]:
    """What is asked of the prefix cache, about one prompt or messages unless it is to flush. Raises as `parse_chat`."""
    fields = _Fields(body)
    salt, prompt, ttl = _salt(fields), None, 0.0
    if verb != "flush":
        prompts: list[Prompt] = [_chat_prompt(fields)] if "messages" in body else _prompts(fields.take("prompt"))
        if len(prompts) != 1:
            raise InvalidRequest("prompt must be a single one: send several requests", "prompt")
        prompt = prompts[0]
    if verb == "pin":
        ttl = fields.take("ttl")
        check_number("ttl", ttl, 0.001, MAX_TTL)
    with_pins = verb == "flush" and fields.flag("with_pins")
    fields.refuse_rest()
    return CacheCall(verb=verb, salt=salt, ttl=round(1000 * ttl), with_pins=with_pins), prompt


def _chat_prompt(fields: _Fields) -> ChatPrompt:
    continues = fields.flag("continue_final_message")
    template_kwargs = fields.typed("chat_template_kwargs", dict) or {}
    if not _can_travel(template_kwargs):
        words = f"must not be nested over {MAX_DEPTH} deep, or hold integers over 64 bits"
        raise InvalidRequest(f"chat_template_kwargs {words}", "chat_template_kwargs")
    return ChatPrompt(
        messages=check_messages(fields.take("messages")),
        add_generation_prompt=fields.flag("add_generation_prompt", not continues),
        continue_final_message=continues,
        template_kwargs=template_kwargs,
    )


class _Fields:
    """The body's fields, each taken once; null counts as left out."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._left = dict(body)

    def take(self, name: str) -> Any:
        return self._left.pop(name, None)

    def typed(self, name: str, kind: type) -> Any:
        value = self.take(name)
        if not isinstance(value, kind | None):
            raise InvalidRequest(f"{name} must be {NAMES[kind]}, not {_kind(value)}", name)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        return default if (value := self.typed(name, bool)) is None else bool(value)

    def refuse_rest(self) -> None:
        """Every field that was not taken must ask for nothing."""
        for name, value in self._left.items():
            if name not in LABELS or not isinstance(value, LABELS[name] | None):
                _refuse_unless_neutral(name, value)


def _finish(
    fields: _Fields,
    prompts: list[Prompt],
    defaults: Mapping[str, Any],
    now: int,
    max_tokens: int | None = None,
    echo: bool = False,
) -> GenerationRequest:
    params = _params(fields, defaults, max_tokens)
    if len(prompts) * params.n > MAX_CHOICES_IN_ALL:
        asked = f"{len(prompts)} prompts with n={params.n} are over {MAX_CHOICES_IN_ALL} answers"
        raise InvalidRequest(f"{asked}: send several requests", "n")
    stream = fields.flag("stream")
    include_usage = _include_usage(fields, stream)
    best_of = fields.take("best_of")
    if best_of is not None and not _equals(best_of, params.n):
        raise UnsupportedField("best_of is not supported unless it equals n: leave it out", "best_of")
    model, request_id = fields.typed("model", str), fields.typed("request_id", str)
    if request_id is not None:
        check_request_id(request_id, "request_id")
    priority = fields.take("priority")
    scheduling = Scheduling(
        priority=0 if priority is None else priority,
        deadline=deadline_from(now, fields.take("deadline_ms"), fields.take("timeout")),
        tenant=fields.typed("user", str) or "",
        salt=_salt(fields) or "",
    )
    fields.refuse_rest()
    return GenerationRequest(model, prompts, params, stream, include_usage, echo, request_id, scheduling)


def _salt(fields: _Fields) -> str | None:
    salt: str | None = fields.typed("cache_salt", str)
    if salt == "":
        raise InvalidRequest("cache_salt must not be empty: leave it out to share K/V with all", "cache_salt")
    return salt


def check_request_id(request_id: str, name: str) -> None:
    """Raises InvalidRequest unless the id can stand in an HTTP header."""
    if not (0 < len(request_id) <= MAX_REQUEST_ID and request_id.isascii() and request_id.isprintable()):
        raise InvalidRequest(f"{name} must be 1 to {MAX_REQUEST_ID} printable ASCII characters", name)


def _params(fields: _Fields, defaults: Mapping[str, Any], max_tokens: int | None) -> SamplingParams:
    values = {name: default for name, default in defaults.items() if name in SAMPLING}
    values |= {name: value for name in SAMPLING if (value := fields.take(name)) is not None}
    bias = fields.typed("logit_bias", dict) or {}
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequest(f"logit_bias must have token ids as keys, not {key[:40]!r}", "logit_bias")
    old, new = fields.take("max_tokens"), fields.take("max_completion_tokens")
    if old is not None and new is not None and not _equals(old, new):
        raise InvalidRequest("max_tokens and max_completion_tokens differ: set only one", "max_tokens")
    given = old if new is None else new
    values["max_tokens"] = max_tokens if given is None else given
    return SamplingParams(**values, logit_bias={int(key): value for key, value in bias.items()})


def _include_usage(fields: _Fields, stream: bool) -> bool:
    options = fields.typed("stream_options", dict)
    if options is None:
        return False
    if not stream:
        raise InvalidRequest("stream_options is for streams only: set stream to true or leave it out", "stream_options")
    include = options.get("include_usage")
    if not isinstance(include, bool | None):
        raise InvalidRequest("stream_options.include_usage must be true or false", "stream_options.include_usage")
    for name, value in options.items():
        if name != "include_usage":
            _refuse_unless_neutral(f"stream_options.{name}", value)
    return include is True


def _prompts(raw: Any) -> list[Prompt]:
    if raw is None:
        raise InvalidRequest("prompt is missing: give a string, a list of strings, or token ids", "prompt")
    if isinstance(raw, str):
        return [raw]
    if not isinstance(raw, list) or not raw:
        raise InvalidRequest("prompt must be a string, or a list of strings or token ids that is not empty", "prompt")
    if len(raw) <= MAX_CHOICES_IN_ALL and all(isinstance(item, str) for item in raw):
        return list(raw)
    if all(isinstance(item, list) for item in raw):
        if len(raw) > MAX_CHOICES_IN_ALL or not all(raw):
            raise InvalidRequest(f"prompt must hold 1 to {MAX_CHOICES_IN_ALL} lists, none of them empty", "prompt")
        return [_token_ids(item) for item in raw]
    return [_token_ids(raw)]


def _token_ids(items: list[Any]) -> list[int]:
    if not all(type(item) is int for item in items):
        wrong = next(_kind(item) for item in items if type(item) is not int)
        raise InvalidRequest(f"prompt must hold strings only or token ids only; {wrong} is out of place", "prompt")
    if min(items) < 0 or max(items) > MAX_INT32:
        raise InvalidRequest(f"prompt has a token id outside 0 to {MAX_INT32}", "prompt")
    return items


def _refuse_unless_neutral(name: str, value: Any) -> None:
    shown = name if len(name) <= 80 else name[:80] + "..."
    if name not in NEUTRAL and name not in LABELS:
        raise UnsupportedField(f"{shown} is not a known field: check its spelling or leave it out", shown)
    if value is not None and not any(_equals(value, neutral) for neutral in NEUTRAL.get(name, ())):
        raise UnsupportedField(f"{shown} is not supported with this value: leave it out", shown)


def _equals(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _can_travel(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether the value can be sent on to another process."""
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_can_travel(item, depth - 1) for item in items)
    return not isinstance(value, int) or -(2**63) <= value < 2**64


def _kind(value: Any) -> str:
    return "null" if value is None else NAMES[type(value)]
