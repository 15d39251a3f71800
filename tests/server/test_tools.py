"""Tools: what a request may say of them, and how calls are shown."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.server.site import user
from tests.server.speaking import GOOD, OTHER, SAID, Speaking, written
from tokenmill.errors import InvalidRequest
from tokenmill.server.protocol import GenerationRequest, parse_chat
from tokenmill.server.tools import tool_use
from tokenmill.text.dialect import TOOL_STYLES, Dialect
from tokenmill.types import StructuredOutputs
from tokenmill.wire.messages import ChatPrompt

CHAT = "/v1/chat/completions"
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/digit"}, "b": DIGIT},
            "required": ["a", "b"],
            "additionalProperties": False,
            "$defs": {"digit": DIGIT},
        },
    },
}
PING = {"type": "function", "function": {"name": "ping"}}
NAMED = {"type": "function", "function": {"name": "add"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}


def request(**fields: Any) -> GenerationRequest:
    body = {"messages": [{"role": "user", "content": "x"}]}
    return parse_chat(body | fields, {}, 0, Dialect("hermes", "think", {"<tool_call>": 7}))


def prompt_of(call: GenerationRequest) -> ChatPrompt:
    (prompt,) = call.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_tools_reach_the_template_and_their_tags_the_text() -> None:
    call = request(tools=[ADD, PING])
    assert call.tools.callable.keys() == {"add", "ping"}
    assert prompt_of(call).tools == [ADD, PING]
    assert (prompt_of(call).shown_ids, prompt_of(call).thought_tags) == ([7], ["<think>", "</think>"])
    for fields in ({}, {"tools": []}, {"tools": [ADD], "tool_choice": "none"}, {"tool_choice": "auto"}):
        call = request(**fields)
        assert (call.tools.callable.keys(), prompt_of(call).tools, prompt_of(call).shown_ids) == (frozenset(), None, [])


def test_allowed_tools_are_called_and_all_are_shown() -> None:
    call = request(tools=[ADD, PING], tool_choice=ALLOWED)
    assert (call.tools.callable.keys(), prompt_of(call).tools) == ({"add"}, [ADD, PING])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x"),
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tools": [ADD] * 129}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": 2**64}}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}, "tools": [ADD]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": ""}}, "tools": [ADD]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "add"}, "tools": [ADD]}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool"}, "tools": [ADD]}, "tool_choice.type"),
        ({"parallel_tool_calls": "no", "tools": [ADD]}, "parallel_tool_calls"),
    ],
)
def test_wrong_tools_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request(**fields)
    assert caught.value.param == param


def allows(grammar: str | None, text: str) -> bool:
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, grammar)
    assert not matcher.get_error(), matcher.get_error()
    ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


WRONG = {"name": "add", "arguments": {"a": 1, "b": 12}}
STRICT = {**ADD, "function": {**ADD["function"], "strict": True}}  # type: ignore[dict-item]


@pytest.mark.parametrize("style", TOOL_STYLES)
def test_grammars_hold_calls_to_what_was_asked(style: str) -> None:
    def grammar(choice: Any, tools: Any = (ADD, PING), **options: Any) -> str | None:
        return tool_use(Dialect(style), tools, choice, **options).grammar

    good, wrong, other = (written(style, call) for call in (GOOD, WRONG, OTHER))
    several, unknown = written(style, GOOD, OTHER), written(style, {**OTHER, "name": "nope"})
    twice = written(style, GOOD, GOOD)
    cases: list[tuple[str | None, list[str], list[str]]] = [
        (grammar("required"), [good, other, several], [wrong, unknown, "", "Hello"]),
        (grammar("required", is_parallel=False), [good, other], [several, ""]),
        (grammar(NAMED), [good], [other, wrong, several, twice, "Hello"]),
        (grammar("auto", is_parallel=False), [good, wrong, other, "", "Hello"], [several, unknown]),
        (grammar("auto", [STRICT, PING]), [good, several, "Hello"], [wrong, unknown]),
        (grammar("auto", answer=StructuredOutputs(json=DIGIT)), [good, several, "7"], ["Hello", "", unknown]),
    ]
    for made, allowed, refused in cases:
        assert [text for text in allowed if not allows(made, text)] == []
        assert [text for text in refused if allows(made, text)] == []
    assert grammar("auto") is grammar("none") is None
    own = {"type": "function", "function": {"name": "f", "parameters": {"x-guidance": {"item_separator": ";"}}}}
    assert '"item_separator": ";"' in (grammar("required", [own]) or "")


def test_a_list_of_calls_comes_once() -> None:
    strict, call = tool_use(Dialect("mistral"), [STRICT], None).grammar, written("mistral", GOOD)
    assert allows(strict, f"So {call}")
    assert not allows(strict, f"{call}{call}")


def test_tags_that_are_special_tokens_are_named_by_id() -> None:
    for choice in ("required", "auto"):
        use = tool_use(Dialect("mistral", special={"[TOOL_CALLS]": 5}), [PING], choice, is_parallel=False)
        assert use.grammar is not None
        assert "<[5]>" in use.grammar
        assert "TOOL_CALLS" not in use.grammar


def say(dialect: Dialect, text: str, **fields: Any) -> dict[str, Any]:
    """The choice of a whole answer of this text."""
    answer = Speaking(dialect).answer(CHAT, messages=user(text), **fields)
    choice: dict[str, Any] = answer["choices"][0]
    return choice


def stream(dialect: Dialect, text: str, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a stream's chunks."""
    return [event["choices"][0] for event in Speaking(dialect).events(CHAT, messages=user(text), **fields)]


CALLS = written("hermes", GOOD, OTHER)


def test_a_whole_answer_with_thoughts_and_calls() -> None:
    choice = say(Dialect("hermes", "think"), SAID, tools=[ADD, PING])
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["content"], message["reasoning_content"]) == ("Let me see", "Hm")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "add", "arguments": '{"a": 1, "b": 2}'},
        {"name": "ping", "arguments": "{}"},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    alone = say(Dialect("hermes"), f"{CALLS}.", tools=[ADD, PING])
    assert alone["message"]["content"] is None


def test_a_stream_with_thoughts_and_calls() -> None:
    chunks = stream(Dialect("hermes", "think"), SAID, tools=[ADD, PING])
    deltas = [chunk["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me see"
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm"
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    for index, parts in itertools.groupby(calls, key=lambda call: call["index"]):
        first, *more = parts
        assert (first["type"], bool(first["id"])) == ("function", True)
        assert first["function"] == {"name": ["add", "ping"][index], "arguments": ""}
        assert all(set(part) == {"index", "function"} for part in more)
        arguments = json.loads("".join(part["function"]["arguments"] for part in more))
        assert arguments == [GOOD, OTHER][index]["arguments"]
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["tool_calls"]


@pytest.mark.parametrize("text", [f"{CALLS[:45]}.", '<tool_call>{"name": "add", "arguments": {"a" 1}}</tool_call>.'])
def test_calls_that_are_cut_or_broken_are_content_of_a_whole_answer(text: str) -> None:
    choice = say(Dialect("hermes"), text, tools=[ADD])
    assert choice["message"]["content"] == text[:-1]
    assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("stop", False)


def test_without_tools_nothing_is_a_call() -> None:
    for fields in ({}, {"tools": [ADD], "tool_choice": "none"}):
        choice = say(Dialect("hermes"), f"{CALLS}.", **fields)
        assert choice["message"]["content"] == CALLS
        assert choice["finish_reason"] == "stop"


def test_an_answer_cut_within_a_call_says_length() -> None:
    chunks = stream(Dialect("hermes"), CALLS, tools=[ADD], max_tokens=45)
    assert chunks[-1]["finish_reason"] == "length"
    assert any("tool_calls" in chunk["delta"] for chunk in chunks)
    whole = say(Dialect("hermes"), CALLS, tools=[ADD], max_tokens=45)
    assert (whole["finish_reason"], whole["message"]["content"]) == ("length", CALLS[:45])


def test_ids_of_calls_are_of_the_form_that_templates_take() -> None:
    text = written("mistral", GOOD)
    (call,) = say(Dialect("mistral"), f"{text}.", tools=[ADD])["message"]["tool_calls"]
    assert (len(call["id"]), call["id"].isalnum()) == (9, True)


def test_grammars_are_what_the_output_must_be() -> None:
    forced = request(tools=[ADD], tool_choice="required").params.structured_outputs
    assert forced is not None
    assert (forced.param, forced.grammar is not None) == ("tools", True)
    assert request(tools=[ADD]).params.structured_outputs is None
    wanted = {"response_format": {"type": "json_object"}}
    plain = request(**wanted).params.structured_outputs
    assert request(tools=[ADD], tool_choice="none", **wanted).params.structured_outputs == plain
    both = request(tools=[ADD], **wanted).params.structured_outputs
    assert both is not None
    assert allows((both.grammar or "").replace("<[7]>", '"<tool_call>"'), '{"x": 1}')
    with pytest.raises(InvalidRequest) as caught:
        request(tools=[ADD], structured_outputs={"regex": "a+"})
    assert caught.value.param == "structured_outputs"


def thinking(dialect: Dialect, **fields: Any) -> ChatPrompt:
    return prompt_of(parse_chat({"messages": user("x")} | fields, {}, 0, dialect))


def test_how_much_to_think() -> None:
    both = Dialect(reasoning="think", variables=["enable_thinking"])
    levels = Dialect(reasoning="think", variables=["reasoning_effort", "enable_thinking"])
    assert thinking(levels, reasoning_effort="low").template_kwargs == {"reasoning_effort": "low"}
    assert thinking(both, reasoning_effort="none").template_kwargs == {"enable_thinking": False}
    own = {"enable_thinking": True}
    assert thinking(both, reasoning_effort="none", chat_template_kwargs=own).template_kwargs == own
    assert thinking(Dialect(), reasoning_effort="none").template_kwargs == {}
    assert thinking(both, thinking_token_budget=5).thinking_token_budget == 5
    for dialect, fields in (
        (both, {"reasoning_effort": "low"}),
        (Dialect(), {"reasoning_effort": "low"}),
        (Dialect(), {"thinking_token_budget": 5}),
    ):
        with pytest.raises(InvalidRequest) as caught:
            thinking(dialect, **fields)
        assert caught.value.param == next(iter(fields))
