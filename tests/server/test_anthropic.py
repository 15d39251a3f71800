"""/v1/messages and /v1/messages/count_tokens: what they ask for, and the blocks, events and errors of answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.site import Site, user
from tests.server.speaking import GOOD, OTHER, SAID, Speaking, written
from tokenmill.errors import InvalidRequest
from tokenmill.schema import check
from tokenmill.server.messages import parse_messages
from tokenmill.server.messages_fields import MESSAGE_ERROR, MESSAGE_RESPONSE
from tokenmill.server.protocol import GenerationRequest
from tokenmill.text.dialect import Dialect
from tokenmill.types import StructuredOutputs
from tokenmill.wire.messages import ChatPrompt

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
ADD = {"name": "add", "input_schema": {"type": "object"}}
PING = {"name": "ping", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}


def parse(**fields: Any) -> GenerationRequest:
    return parse_messages({"messages": user("x"), "max_tokens": 9} | fields, {})


def prompt_of(call: GenerationRequest) -> ChatPrompt:
    (prompt,) = call.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_blocks_become_messages() -> None:
    given = [
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": ""},
                {"type": "text", "text": "So"},
                {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "5"}]},
                {"type": "tool_result", "tool_use_id": "2", "content": "no", "is_error": True},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "B"}]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert prompt_of(parse(messages=given, system=system)).messages == [
        {"role": "system", "content": "A\nB"},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
        {"role": "assistant", "content": "So", "reasoning_content": "Hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "5"},
        {"role": "tool", "tool_call_id": "2", "content": "Error: no"},
        {"role": "user", "content": [{"type": "text", "text": "and?"}]},
    ]


def test_messages_that_follow_each_other_stay_apart() -> None:
    text = {"type": "text", "text": "x"}
    two = [{"role": "user", "content": [text]}] * 2
    assert prompt_of(parse(messages=two)).messages == two
    thoughts = [{"type": "thinking", "thinking": thought} for thought in "ab"]
    answer = {"role": "assistant", "content": [*thoughts, text]}
    (shown,) = prompt_of(parse(messages=[answer])).messages
    assert (shown["reasoning_content"], shown["content"]) == ("a\nb", "x")


def test_a_last_message_of_the_assistant_goes_on() -> None:
    prompt = prompt_of(parse(messages=[*user("x"), {"role": "assistant", "content": "Well"}]))
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)
    assert not prompt_of(parse()).continue_final_message


def test_what_else_is_asked_for() -> None:
    call = parse(stop_sequences=["a"], temperature=0.5, top_k=3, metadata={"user_id": "u"}, stream=True)
    assert (call.params.stop_strings, call.params.temperature, call.params.top_k) == (("a",), 0.5, 3)
    assert (call.params.max_tokens, call.scheduling.tenant, call.stream) == (9, "u", True)
    for choice, forced in (("auto", False), ("none", False), ("any", True)):
        asked = parse(tools=[ADD, PING], tool_choice={"type": choice})
        assert (asked.params.structured_outputs is not None) is forced
        assert asked.tools.callable.keys() == (set() if choice == "none" else {"add", "ping"})
    assert parse(tools=[ADD], tool_choice={"type": "tool", "name": "add"}).params.structured_outputs is not None
    once = {"type": "auto", "disable_parallel_tool_use": True}
    assert parse(tools=[ADD], tool_choice=once).params.structured_outputs is not None
    shaped = {"format": {"type": "json_schema", "schema": {"type": "integer"}}}
    wanted = StructuredOutputs(json='{"type": "integer"}', strict=True, param="response_format")
    assert parse(output_config=shaped).params.structured_outputs == wanted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": [ADD]}, "tool_choice.name"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"container": "c"}, "container"),
        ({"n": 2}, "n"),
        ({"stop": ["a"]}, "stop"),
    ],
)
def test_what_is_wrong_or_not_honoured_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.param == param


def test_a_whole_answer() -> None:
    answer = Speaking().answer(PATH, messages=user(SAID), max_tokens=500, tools=[ADD, PING])
    check(answer, MESSAGE_RESPONSE.schema, "message")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    thought, said, *calls = answer["content"]
    assert thought == {"type": "thinking", "thinking": "Hm", "signature": ""}
    assert said == {"type": "text", "text": "Let me see"}
    assert [(call["name"], call["input"]) for call in calls] == [
        (call["name"], call["arguments"]) for call in (GOOD, OTHER)
    ]
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(SAID)


def test_the_events_of_a_stream() -> None:
    start, ping, *events, delta, stop = Speaking().events(PATH, messages=user(SAID), max_tokens=500, tools=[ADD, PING])
    assert (start["type"], ping["type"], stop["type"]) == ("message_start", "ping", "message_stop")
    check(start["message"], MESSAGE_RESPONSE.schema, "message")
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == len(SAID)
    found: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(found)
            found.append([event["content_block"]["type"], ""])
        elif event["type"] == "content_block_delta":
            (text,) = (value for name, value in event["delta"].items() if name != "type")
            assert event["index"] == len(found) - 1
            found[-1][1] += text
        else:
            assert (event["type"], event["index"]) == ("content_block_stop", len(found) - 1)
    inputs = [json.dumps(call["arguments"]) for call in (GOOD, OTHER)]
    assert found == [
        ["thinking", "Hm"],
        ["text", "Let me see"],
        ["tool_use", inputs[0]],
        ["tool_use", inputs[1]],
    ]


@pytest.mark.parametrize(
    ("text", "fields", "stop"),
    [
        ("x.", {}, ("end_turn", None)),
        ("xy", {}, ("max_tokens", None)),
        ("SLOW", {"timeout": 5}, ("pause_turn", None)),
    ],
)
def test_why_answers_end(text: str, fields: dict[str, Any], stop: tuple[str, Any]) -> None:
    answer = Speaking().answer(PATH, messages=user(text), max_tokens=5, **fields)
    assert (answer["stop_reason"], answer["stop_sequence"]) == stop


def test_what_is_cut_behind_a_call_says_so() -> None:
    call = written("hermes", GOOD)
    for length, reason in ((len(call) + 1, "tool_use"), (len(call), "max_tokens")):
        answer = Speaking().answer(PATH, messages=user(f"{call}."), max_tokens=length, tools=[ADD])
        assert (answer["content"][0]["type"], answer["stop_reason"]) == ("tool_use", reason)
    cut = Speaking().events(PATH, messages=user(f"{call}."), max_tokens=call.index("}}"), tools=[ADD])
    assert [event["type"] for event in cut[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert (cut[-2]["delta"]["stop_reason"], cut[-4]["delta"]["type"]) == ("max_tokens", "input_json_delta")


def test_errors_are_of_anthropics_shape() -> None:
    for fields, status, kind in (
        ({"max_tokens": 5}, 400, "invalid_request_error"),
        ({"max_tokens": 5, "messages": user("x"), "model": "none"}, 404, "not_found_error"),
        ({"max_tokens": 5, "messages": user("FULL")}, 503, "overloaded_error"),
        ({"max_tokens": 5, "messages": user("BREAK")}, 500, "api_error"),
    ):
        response = Site().post(PATH, **fields)
        check(response.json(), MESSAGE_ERROR, "error")
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    assert Site().request("GET", PATH).json()["type"] == "error"
    *_, last = Speaking().events(PATH, messages=user("BREAK"), max_tokens=9)
    assert last == {"type": "error", "error": {"type": "api_error", "message": "the model broke"}}


def test_tokens_are_counted() -> None:
    assert Site().post(COUNT, messages=user("abc")).json() == {"input_tokens": 3}
    response = Site().post(COUNT, messages=user("abc"), max_tokens=5)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


def test_thinking_is_bounded_or_left_out() -> None:
    dialect = Dialect(reasoning="think", variables=["enable_thinking"])

    def asked(thinking: dict[str, Any], dialect: Dialect) -> ChatPrompt:
        return prompt_of(parse_messages({"messages": user("x"), "max_tokens": 9, "thinking": thinking}, {}, 0, dialect))

    enabled = {"type": "enabled", "budget_tokens": 5}
    assert asked(enabled, dialect).thinking_token_budget == 5
    assert asked({"type": "disabled"}, dialect).template_kwargs == {"enable_thinking": False}
    for plain, its in (({"type": "adaptive"}, dialect), ({"type": "disabled"}, Dialect())):
        assert (asked(plain, its).thinking_token_budget, asked(plain, its).template_kwargs) == (None, {})
    with pytest.raises(InvalidRequest) as caught:
        asked(enabled, Dialect())
    assert caught.value.param == "thinking"
