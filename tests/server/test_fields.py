"""The tables of fields: what is parsed, what OpenAPI shows and what the docs say are one."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import anthropic.types
import openai.types
import openai.types.chat as openai_chat
import pytest
from anthropic.types import MessageCountTokensParams, OutputConfigParam
from anthropic.types.message_create_params import MessageCreateParamsBase as MessagesParams
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponsesParams
from openai.types.responses.response_text_config_param import ResponseTextConfigParam
from openai.types.shared_params import Reasoning
from pydantic import BaseModel

from tests.server.site import COMPLETIONS, Site, user
from tokenmill.errors import InvalidRequest, UnsupportedField
from tokenmill.schema import Field, Table, check, equals, words
from tokenmill.server.apis import APIS
from tokenmill.server.fields import CHAT, CHAT_CHUNK, CHAT_RESPONSE, COMPLETION, COMPLETION_RESPONSE, ERROR, NAME
from tokenmill.server.messages import parse_count, parse_messages
from tokenmill.server.messages_fields import COUNT_TOKENS, MESSAGE_RESPONSE, MESSAGES
from tokenmill.server.protocol import parse_chat, parse_completion
from tokenmill.server.reference import reference
from tokenmill.server.responses import parse_responses
from tokenmill.server.responses_fields import RESPONSE, RESPONSES
from tokenmill.text.dialect import Dialect
from tokenmill.types import SamplingParams

DOCS = Path(__file__).parents[2] / "docs/api.md"
CHATS = "/v1/chat/completions"
THINKING = Dialect(reasoning="think", variables=["reasoning_effort"])
parse_thinking_chat = partial(parse_chat, dialect=THINKING)
PARSERS: dict[str, tuple[Table, Callable[..., Any], dict[str, Any]]] = {
    "chat": (
        CHAT,
        partial(parse_chat, dialect=THINKING),
        {"messages": user("x"), "stream": True, "stream_options": {}},
    ),
    "completion": (COMPLETION, parse_completion, {"prompt": "x", "stream": True, "stream_options": {}}),
    "responses": (RESPONSES, parse_responses, {"input": "x", "stream": True}),
    "messages": (MESSAGES, parse_messages, {"messages": user("x"), "max_tokens": 9}),
    "count_tokens": (COUNT_TOKENS, parse_count, {"messages": user("x")}),
}
VALUES = (True, 5, 5.5, -(2**70), 2**70, "some text", "x" * 2000, [5], ["x"], [{}], {"x": {}}, {"type": "nothing"})


def rows(status: str) -> list[Any]:
    return [
        pytest.param(api, field, id=f"{api}-{field.path}")
        for api, (table, _, _) in PARSERS.items()
        for field in table
        if field.status == status
    ]


def body_with(api: str, field: Field, value: Any) -> tuple[dict[str, Any], str]:
    """A body that is good but for this field, and the field's place as errors name it."""
    body = copy.deepcopy(PARSERS[api][2])
    *parents, name = field.path.split(".")
    node: Any = body
    for parent in parents:
        node = node.setdefault(parent.removesuffix("[]"), [{}] if parent.endswith("[]") else {})
        node = node[0] if parent.endswith("[]") else node
    node[name] = value
    return body, field.path.replace("[]", "[0]")


def param_of(api: str, body: dict[str, Any]) -> str | None:
    with pytest.raises(InvalidRequest) as caught:
        PARSERS[api][1](body, {})
    return caught.value.param


def test_the_docs_are_those_of_the_tables() -> None:
    assert DOCS.read_text("utf-8") == reference(), "make api-docs"


@pytest.mark.parametrize(("api", "field"), rows("refused"))
def test_refused_fields_are_refused_by_name_unless_they_ask_for_nothing(api: str, field: Field) -> None:
    neutral = [*field.schema["enum"], None]
    for value in neutral:
        PARSERS[api][1](body_with(api, field, value)[0], {})
    wrong = [value for value in VALUES if not any(equals(value, item) for item in neutral)]
    assert len(wrong) > len(VALUES) - 3
    for value in wrong:
        body, place = body_with(api, field, value)
        assert (param_of(api, body) or "").startswith(place)


@pytest.mark.parametrize(("api", "field"), rows("meaningless"))
def test_fields_without_meaning_change_nothing(api: str, field: Field) -> None:
    parse, plain = PARSERS[api][1:]
    accepted = [value for value in (True, "", "x", {"a": "b"}) if fits(value, field)]
    assert accepted
    for value in accepted:
        assert parse(body_with(api, field, value)[0], {}) == parse(plain, {})


@pytest.mark.parametrize(("api", "field"), rows("honoured"))
def test_honoured_fields_of_a_wrong_kind_or_size_are_refused_by_name(api: str, field: Field) -> None:
    wrong = [value for value in VALUES if not fits(value, field)]
    assert wrong
    for value in wrong:
        body, place = body_with(api, field, value)
        assert (param_of(api, body) or "").startswith(place), value


@pytest.mark.parametrize(("api", "field"), rows("honoured"))
def test_bounds_are_those_that_are_checked(api: str, field: Field) -> None:
    """What is just within passes, what is just outside does not; fields that depend on others get them."""
    whole = field.schema.get("type") == "integer"
    for name, outside in (("minimum", -1), ("maximum", 1)):
        if (bound := field.schema.get(name)) is None:
            continue
        companion = {
            "best_of": {"n": bound},
            "min_tokens": {"max_output_tokens" if api == "responses" else "max_tokens": bound} if bound else {},
            "top_logprobs": {"logprobs": True} if api == "chat" else {},
            "prompt_logprobs": {"stream": False, "stream_options": None},
        }.get(field.path, {})
        body, place = body_with(api, field, bound)
        PARSERS[api][1](body | companion, {})
        body, _ = body_with(api, field, bound + (outside if whole else outside * 1e-6))
        assert param_of(api, body) == place


def fits(value: Any, field: Field) -> bool:
    try:
        check(value, field.schema, field.path)
    except InvalidRequest:
        return False
    return True


def test_all_sampling_parameters_stand_in_the_tables() -> None:
    for table in (CHAT, COMPLETION):
        for name in SamplingParams.__struct_fields__:
            assert name in table.fields


def test_no_field_of_openais_client_is_missing() -> None:
    tables = (
        (CHAT, ChatParams),
        (COMPLETION, CompletionParams),
        (RESPONSES, ResponsesParams),
        (MESSAGES, MessagesParams),
    )
    for table, params in (*tables, (COUNT_TOKENS, MessageCountTokensParams)):
        assert set(params.__annotations__) <= set(table.fields)
    for name, params in (("reasoning", Reasoning), ("text", ResponseTextConfigParam)):
        assert {f"{name}.{field}" for field in params.__annotations__} <= set(RESPONSES.fields)
    assert {f"output_config.{field}" for field in OutputConfigParam.__annotations__} <= set(MESSAGES.fields)
    stream_options = set(openai_chat.ChatCompletionStreamOptionsParam.__annotations__)
    messages = set().union(*(kind.__annotations__ for kind in get_args(openai_chat.ChatCompletionMessageParam)))
    for prefix, names in (("stream_options.", stream_options), ("messages[].", messages)):
        assert {prefix + name for name in names} <= set(CHAT.fields)


def paths_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every field of a response of OpenAI's client."""
    for name, field in model.model_fields.items():
        yield prefix + name
        inner = next(iter(get_args(field.annotation)), field.annotation)
        if name in ("choices", "message", "delta"):
            yield from paths_of(inner, f"{prefix}{name}{'[]' if name == 'choices' else ''}.")


@pytest.mark.parametrize(
    ("table", "model"),
    [
        (CHAT_RESPONSE, openai_chat.ChatCompletion),
        (CHAT_CHUNK, openai_chat.ChatCompletionChunk),
        (COMPLETION_RESPONSE, openai.types.Completion),
        (RESPONSE, openai.types.responses.Response),
        (MESSAGE_RESPONSE, anthropic.types.Message),
    ],
)
def test_no_response_field_of_openais_client_is_missing(table: Table, model: type[BaseModel]) -> None:
    assert set(paths_of(model)) <= set(table.fields)


def test_responses_are_those_of_the_tables() -> None:
    check(Site().post(CHATS, messages=user("ab.")).json(), CHAT_RESPONSE.schema, "chat")
    check(Site().post(COMPLETIONS, prompt="abc", n=2, stop_token_ids=[99]).json(), COMPLETION_RESPONSE.schema, "text")
    check(Site().post(CHATS, x=1).json(), ERROR, "error")
    options = {"max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    for path, prompt, table in (
        (CHATS, {"messages": user("x")}, CHAT_CHUNK),
        (COMPLETIONS, {"prompt": "x"}, COMPLETION_RESPONSE),
    ):
        *blocks, done, rest = Site().post(path, **prompt, **options).text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        assert len(blocks) > 1
        for block in blocks:
            check(json.loads(block.removeprefix("data: ")), table.schema, "chunk")


def test_openapi_shows_the_tables() -> None:
    def in_floats(value: Any) -> Any:
        return json.loads(value if isinstance(value, str) else json.dumps(value), parse_int=float)

    paths = in_floats(Site().request("GET", "/openapi.json").text)["paths"]
    for path, api in APIS.items():
        shown = paths[path]["post"]
        schema = shown["requestBody"]["content"]["application/json"]["schema"]
        assert schema["properties"] == in_floats(api.request.schema["properties"])
        assert schema["additionalProperties"] is False
        kinds = shown["responses"]["200"]["content"]
        assert ("text/event-stream" in kinds) is ("stream" in api.request.fields)
        answer = kinds["application/json"]["schema"]
        assert answer == in_floats(next(iter(api.answers.values())).schema)


LIST = {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 2}
TAGGED = {
    "anyOf": [
        {"type": "object", "properties": {"type": {"enum": ["a"]}, "x": LIST}, "required": ["type", "x"]},
        {"type": "object", "properties": {"type": {"enum": ["b"]}}, "required": [], "additionalProperties": False},
        {"type": "string"},
    ]
}


@pytest.mark.parametrize(
    ("value", "schema", "param", "told"),
    [
        (True, {"type": "integer"}, "f", "a whole number, not true or false"),
        (1.0, {"type": "integer"}, "f", "a whole number, not a number"),
        (None, {"type": "string"}, "f", "a string, not null"),
        ("", {"type": "string", "minLength": 1}, "f", "a string of at least 1 characters"),
        (1, {"enum": [True, "x"]}, "f", 'one of true, "x"'),
        ([0, -1], LIST, "f[1]", "a whole number of at least 0"),
        ([0, 0, 0], LIST, "f", "a list of at most 2 items"),
        (5, TAGGED, "f", "an object, or a string, not a number"),
        ({"type": "c"}, TAGGED, "f.type", 'one of "a", "b"'),
        ({"type": "a"}, TAGGED, "f.x", "missing"),
        ({"type": "a", "x": ["y"]}, TAGGED, "f.x[0]", "whole number"),
        ("a\n", NAME, "f", "must match"),
        ({"type": "b", "y" * 100: 1}, TAGGED, f"f.{'y' * 80}", "not a known field"),
    ],
)
def test_what_a_schema_refuses_is_told_with_its_place(value: Any, schema: Any, param: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told) as caught:
        check(value, schema, "f")
    assert caught.value.param == param
    assert param in caught.value.message


def test_what_a_schema_allows() -> None:
    for value in ({"type": "a", "x": [1, 2], "more": 1}, {"type": "b"}, "text"):
        check(value, TAGGED, "f")
    for value in (1, 1.5):
        check(value, {"type": "number", "minimum": 1}, "f")
    assert words({"anyOf": [{"type": "string"}, {"type": "null"}]}) == "a string"
    with pytest.raises(UnsupportedField):
        Table().check("x", None)
