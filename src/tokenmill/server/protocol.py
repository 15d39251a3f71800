"""JSON bodies of the OpenAI API to checked requests: a field is honoured, asks for nothing, or is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenmill.errors import InvalidRequest, UnsupportedField
from tokenmill.server.messages import check_messages
from tokenmill.types import MAX_INT32, SamplingParams
from tokenmill.wire.messages import ChatPrompt

Prompt = str | list[int] | ChatPrompt

COMPLETION_MAX_TOKENS = 16
MAX_CHOICES_IN_ALL = 1024
MAX_DEPTH = 32
MAX_REQUEST_ID = 256

NUMBERS = ("temperature", "top_p", "top_k", "min_p", "seed", "n", "min_tokens")
FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
LABELS: Mapping[str, type] = {"user": str, "safety_identifier": str, "metadata": dict}
RANGES: Mapping[str, tuple[int, int]] = {
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, 2),
    "top_logprobs": (0, 20),
}
# Fields that are not honoured, with the values that ask for nothing; null always does.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "suffix": ("",),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True,),
    "priority": (0,),
    "cache_salt": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "truncate_prompt_tokens": (),
    "return_token_ids": (False,),
    "echo": (False,),
}
STREAM_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}


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


def decode_body(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; a byte order mark is skipped, and of a key given twice the last counts.

    Raises:
        InvalidRequest: not strict JSON in UTF-8 (NaN and lone surrogates are not), nested too deeply, or no object.
    """
    try:
        value = msgspec.json.decode(body.removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {_name_of(value)}")
    return value


def parse_chat(body: dict[str, Any], defaults: Mapping[str, Any]) -> GenerationRequest:
    """A /v1/chat/completions request; `defaults` are sampling values for fields that are left out.

    Raises:
        InvalidRequest: a field is missing or wrong, or not honoured (UnsupportedField).
    """
    fields = _Fields(body)
    messages = check_messages(fields.take("messages"))
    continues = fields.flag("continue_final_message", False)
    generates = fields.flag("add_generation_prompt", not continues)
    if continues and generates:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message exclude each other: set only one",
            "continue_final_message",
        )
    template_kwargs = fields.mapping("chat_template_kwargs")
    _check_plain("chat_template_kwargs", template_kwargs)
    prompt = ChatPrompt(
        messages=messages,
        add_generation_prompt=generates,
        continue_final_message=continues,
        template_kwargs=template_kwargs,
    )
    return _finish(fields, [prompt], defaults, max_tokens=None, echo=False)


def parse_completion(body: dict[str, Any], defaults: Mapping[str, Any]) -> GenerationRequest:
    """A /v1/completions request; see `parse_chat`."""
    fields = _Fields(body)
    prompts = _prompts(fields.take("prompt"))
    echo = fields.flag("echo", False)
    return _finish(fields, prompts, defaults, max_tokens=COMPLETION_MAX_TOKENS, echo=echo)


class _Fields:
    """The body's fields, each taken once; null counts as left out."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._left = dict(body)

    def take(self, name: str) -> Any:
        return self._left.pop(name, None)

    def flag(self, name: str, default: bool) -> bool:
        return default if (value := self._typed(name, bool, "true or false")) is None else value

    def text(self, name: str) -> str | None:
        text: str | None = self._typed(name, str, "a string")
        return text

    def mapping(self, name: str) -> dict[str, Any]:
        return self._typed(name, dict, "an object") or {}

    def refuse_rest(self) -> None:
        """Every field that was not taken must ask for nothing."""
        for name, value in self._left.items():
            if name in LABELS and (value is None or isinstance(value, LABELS[name])):
                continue
            if not _asks_nothing(NEUTRAL, name, value):
                _check_range(name, value)
                raise _unsupported(name, name in NEUTRAL)

    def _typed(self, name: str, kind: type, words: str) -> Any:
        value = self.take(name)
        if value is not None and not isinstance(value, kind):
            raise InvalidRequest(f"{name} must be {words}, not {_name_of(value)}", name)
        return value


def _finish(
    fields: _Fields, prompts: list[Prompt], defaults: Mapping[str, Any], max_tokens: int | None, echo: bool
) -> GenerationRequest:
    params = _params(fields, defaults, max_tokens)
    if len(prompts) * params.n > MAX_CHOICES_IN_ALL:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n={params.n} are over {MAX_CHOICES_IN_ALL} answers: send several requests",
            "n",
        )
    stream = fields.flag("stream", False)
    include_usage = _include_usage(fields, stream)
    best_of = fields.take("best_of")
    if best_of is not None and not _equals(best_of, params.n):
        raise _unsupported("best_of", True)
    model = fields.text("model")
    request_id = fields.text("request_id")
    if request_id is not None:
        check_request_id(request_id, "request_id")
    fields.refuse_rest()
    return GenerationRequest(model, prompts, params, stream, include_usage, echo, request_id)


def check_request_id(request_id: str, name: str) -> None:
    """Raises InvalidRequest unless the id can stand in an HTTP header."""
    if not (0 < len(request_id) <= MAX_REQUEST_ID and request_id.isascii() and request_id.isprintable()):
        raise InvalidRequest(f"{name} must be 1 to {MAX_REQUEST_ID} printable ASCII characters", name)


def _params(fields: _Fields, defaults: Mapping[str, Any], max_tokens: int | None) -> SamplingParams:
    values = {name: default for name, default in defaults.items() if name in NUMBERS}
    values |= {name: value for name in NUMBERS if (value := fields.take(name)) is not None}
    values |= {name: fields.flag(name, name == "skip_special_tokens") for name in FLAGS}
    if (stop := fields.take("stop")) is not None:
        values["stop"] = stop
    stop_ids = fields.take("stop_token_ids")
    if not isinstance(stop_ids, list | None):
        raise InvalidRequest(f"stop_token_ids must be a list of token ids, not {_name_of(stop_ids)}", "stop_token_ids")
    values["stop_token_ids"] = stop_ids or []
    values["logit_bias"] = _logit_bias(fields.mapping("logit_bias"))
    old, new = fields.take("max_tokens"), fields.take("max_completion_tokens")
    if old is not None and new is not None and not _equals(old, new):
        raise InvalidRequest("max_tokens and max_completion_tokens differ: set only one", "max_tokens")
    given = old if new is None else new
    values["max_tokens"] = max_tokens if given is None else given
    return SamplingParams(**values)


def _logit_bias(raw: dict[str, Any]) -> dict[int, Any]:
    for key in raw:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequest(f"logit_bias must have token ids as keys, not {key[:40]!r}", "logit_bias")
    return {int(key): bias for key, bias in raw.items()}


def _include_usage(fields: _Fields, stream: bool) -> bool:
    options = fields.take("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise InvalidRequest(f"stream_options must be an object, not {_name_of(options)}", "stream_options")
    if not stream:
        raise InvalidRequest("stream_options is for streams only: set stream to true or leave it out", "stream_options")
    include = options.get("include_usage")
    if not isinstance(include, bool | None):
        raise InvalidRequest("stream_options.include_usage must be true or false", "stream_options.include_usage")
    for name, value in options.items():
        if name != "include_usage" and not _asks_nothing(STREAM_NEUTRAL, name, value):
            raise _unsupported(f"stream_options.{name}", name in STREAM_NEUTRAL)
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
        wrong = next(_name_of(item) for item in items if type(item) is not int)
        raise InvalidRequest(f"prompt must hold strings only or token ids only; {wrong} is out of place", "prompt")
    if min(items) < 0 or max(items) > MAX_INT32:
        raise InvalidRequest(f"prompt has a token id outside 0 to {MAX_INT32}", "prompt")
    return items


def _asks_nothing(table: Mapping[str, tuple[Any, ...]], name: str, value: Any) -> bool:
    return name in table and (value is None or any(_equals(value, neutral) for neutral in table[name]))


def _equals(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _check_range(name: str, value: Any) -> None:
    if name not in RANGES:
        return
    least, most = RANGES[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidRequest(f"{name} must be a number from {least} to {most}", name)


def _unsupported(name: str, is_known: bool) -> UnsupportedField:
    shown = name if len(name) <= 80 else name[:80] + "..."
    if is_known:
        return UnsupportedField(f"{shown} is not supported with this value: leave it out", shown)
    return UnsupportedField(f"{shown} is not a known field: check its spelling or leave it out", shown)


def _check_plain(name: str, value: Any) -> None:
    """Refuse what cannot be sent on to another process: deep nesting and integers over 64 bits."""
    layer, depth = [value], 0
    while layer:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"{name} is nested over {MAX_DEPTH} deep", name)
        if any(isinstance(item, int) and not -(2**63) <= item < 2**64 for item in layer):
            raise InvalidRequest(f"{name} has an integer over 64 bits", name)
        children = [item for item in layer if isinstance(item, dict | list)]
        layer = [inner for item in children for inner in (item.values() if isinstance(item, dict) else item)]


def _name_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return names[type(value)]
