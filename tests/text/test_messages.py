"""Chat messages: what is passed on, and what is refused with its place."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill.errors import InvalidRequest, UnsupportedField
from tokenmill.text.messages import check_messages

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def test_good_messages_are_passed_on() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "Ann"},
        {"role": "assistant", "content": "Yes"},
    ]
    assert check_messages(messages) == messages


def test_an_answer_that_a_client_sends_back_is_fine() -> None:
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "Yes",
        "refusal": None,
        "tool_calls": [],
        "function_call": None,
        "name": None,
        "parsed": {"is_so": True},
    }
    assert check_messages([answer]) == [{"role": "assistant", "content": "Yes"}]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ({"role": "user", "content": "x"}, "messages"),
        (["hi"], "messages[0]"),
        ([None], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": None}], "messages[1].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [PICTURE]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
    ],
)
def test_wrong_messages_are_refused_with_their_place(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_messages(messages)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (
            {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]},
            "messages[0].content[0].cac",
        ),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, "messages[0].tool_call_id"),
        ({"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "x", "weight": 1}, "messages[0].weight"),
    ],
)
def test_what_is_not_honoured_is_refused_with_its_place(message: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedField) as caught:
        check_messages([message])
    assert (caught.value.param or "").startswith(param)


def test_calls_and_their_results_are_passed_on() -> None:
    function = {"name": "f", "arguments": '{"x": "\\u00e9"}'}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}], "refusal": None},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "assistant", "content": "x", "reasoning_content": "y"},
    ]
    assert check_messages(messages) == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {**function, "arguments": {"x": "é"}}}],
        },
        *messages[1:],
    ]
    assert function["arguments"] == '{"x": "\\u00e9"}'


def test_calls_are_the_same_however_a_client_sends_them_back() -> None:
    plain = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    ways = [
        {"function": {"arguments": "{}", "name": "f"}, "type": "function", "id": "1", "custom": None},
        {**plain, "index": 0},
        {**plain, "function": {"parsed_arguments": {"x": 1}, **plain["function"]}},  # type: ignore[dict-item]
    ]
    first, *others = (str(check_messages([{"role": "assistant", "tool_calls": [call]}])) for call in (plain, *ways))
    assert others == [first] * 3


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({"role": "function", "content": "x"}, "messages[0].role", "one of"),
        ({"role": "user", "content": None}, "messages[0].content", "must be a string"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[0].content", "must be a string"),
        ({"role": "assistant", "tool_calls": "x"}, "messages[0].tool_calls", "must be a list"),
        ({"role": "assistant", "tool_calls": ["x"]}, "messages[0].tool_calls[0]", "must be an object"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls[0].function", "missing"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "messages[0].tool_call_id", "must be a string"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
            "messages[0].tool_calls[0].function.name",
            "missing",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "messages[0].tool_calls[0].function.arguments",
            "valid JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            "messages[0].tool_calls[0].function.arguments",
            "JSON object",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "x": 1}}]},
            "messages[0].tool_calls[0].function.x",
            "not a known field",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f"}, "x": 1}]},
            "messages[0].tool_calls[0].x",
            "not a known field",
        ),
    ],
)
def test_wrong_tool_calls_are_refused_with_their_place(message: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        check_messages([message])
    assert caught.value.param == param
