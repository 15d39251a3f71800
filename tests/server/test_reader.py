"""Text in pieces of any size to thoughts, content and calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.server.parts import Part
from tokenmill.server.reader import AnswerReader, ToolReader
from tokenmill.text.dialect import TOOL_STYLES, Dialect

PARAMETERS = {"s": {"type": "string"}, "t": {"type": ["string", "null"]}, "n": {"type": "number"}, "o": True}
TOOLS: dict[str, dict[str, Any]] = {"f": {"type": "object", "properties": PARAMETERS}, "g": {"properties": []}}
ADD = '{"a": [1, -2.5e3, {"x": null}], "b": "q\\"}{\\u00e9"}'


def merged(parts: list[Part]) -> list[tuple[str, str, int]]:
    whole: list[tuple[str, str, int]] = []
    for part in parts:
        if whole and part.kind != "call" and whole[-1][0] == part.kind and whole[-1][2] == part.index:
            whole[-1] = (part.kind, whole[-1][1] + part.text, part.index)
        else:
            whole.append((part.kind, part.text, part.index))
    return whole


def read(dialect: Dialect, text: str, *, is_thinking: bool = False) -> list[tuple[str, str, int]]:
    """What is read, the same for pieces of one letter, of some, and all at once."""
    results = []
    for size in (1, 3, 7, len(text) or 1):
        reader = AnswerReader(dialect, TOOLS, is_thinking)
        parts = [part for i in range(0, len(text), size) for part in reader.push(text[i : i + size])]
        assert all(part.text for part in parts)
        results.append(merged(parts + reader.finish()))
    assert all(result == results[0] for result in results)
    return results[0]


def call(index: int, name: str, arguments: str) -> list[tuple[str, str, int]]:
    return [("call", name, index), ("arguments", arguments, index)]


def content(text: str) -> list[tuple[str, str, int]]:
    return [("content", text, 0)]


HERMES = f'<tool_call>\n{{"name": "f", "arguments": {ADD}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("style", "text", "expected"),
    [
        ("hermes", f"Hi.\n{HERMES}\n", [*content("Hi."), *call(0, "f", ADD)]),
        ("hermes", f"{HERMES}\n{HERMES}", [*call(0, "f", ADD), *call(1, "f", ADD)]),
        ("hermes", f"{HERMES}\n\nDone ", [*call(0, "f", ADD), *content("\n\nDone")]),
        ("hermes", '<tool_call>{"arguments": {"z": {}}, "name": "g"}</tool_call>', call(0, "g", '{"z": {}}')),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', call(0, "f", "{}")),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', call(0, "f", '{"a": 1}')),
        ("hermes", '<tool_call>{"id": [1], "name": "f", "arguments": {}}</tool_call>', call(0, "f", "{}")),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', call(0, "f", '{"a": 1')),
        (
            "hermes",
            "Hm <tool_call>\n<function=f>\n<parameter=s>\n5\n</parameter>\n<parameter=t>\nnull\n</parameter>\n"
            "<parameter=n>\n5\n</parameter>\n<parameter=o>\n<b>\n\n</parameter>\n</function>\n</tool_call>"
            "<tool_call><function=g><parameter=t>[1, {}]</parameter></function></tool_call>",
            [
                *content("Hm"),
                *call(0, "f", '{"s": "5", "t": null, "n": 5, "o": "<b>\\n"}'),
                *call(1, "g", '{"t": [1, {}]}'),
            ],
        ),
        ("hermes", "<tool_call><function=f></function></tool_call>", call(0, "f", "{}")),
        ("mistral", f'[TOOL_CALLS] [{{"name": "f", "arguments": {ADD}}}]', call(0, "f", ADD)),
        (
            "mistral",
            'So [TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"b": 1}, "id": "abc"}]',
            [*content("So"), *call(0, "f", "{}"), *call(1, "g", '{"b": 1}')],
        ),
        (
            "mistral",
            '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": 2}',
            [*call(0, "f", '{"a": 1}'), *call(1, "g", '{"b": 2}')],
        ),
        (
            "llama3_json",
            '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
            [*call(0, "f", '{"a": 1}'), *call(1, "g", "{}")],
        ),
        ("llama3_json", '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', call(0, "f", "{}")),
        ("json", f'\n{{"name": "f", "arguments": {ADD}}}', call(0, "f", ADD)),
        (
            "json",
            '{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}',
            [*call(0, "f", "{}"), *call(1, "g", "{}")],
        ),
        ("json", '[{"name": "f", "arguments": {}}, {"name": "g"}]', [*call(0, "f", "{}"), *call(1, "g", "{}")]),
    ],
)
def test_calls(style: str, text: str, expected: list[tuple[str, str, int]]) -> None:
    assert read(Dialect(style), text) == expected


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", ""),
        ("hermes", " \n"),
        ("hermes", "a <tool <<tool_call> x {"),
        ("hermes", "ends in <tool_c"),
        ("hermes", "<tool_call><function=nope></function></tool_call>"),
        ("hermes", "<tool_call><function=f><x></function></tool_call>"),
        ("hermes", "<tool_call><function=f><parameter=s>5</function></tool_call>"),
        ("hermes", "<tool_call><f></f></tool_call>"),
        ("hermes", 'quotes "<tool_call>" and goes on\n'),
        ("hermes", '<tool_call>{"name": "nope", "arguments": {}}</tool_call> done '),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f\n", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": tru}, "name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": "\\x"}, "name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": "\\u12"}, "name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a" 1}, "name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {1: 1}, "name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f"'),
        ("hermes", '{"name": "f", "arguments": {}}'),
        ("mistral", "[TOOL_CALLS] none of them {} is known"),
        ("mistral", "[TOOL_CALLS] [1, 2]"),
        ("mistral", "[TOOL_CALLS]" + "x" * 300),
        ("json", '{"name": "Bob", "age": 5} is he'),
        ("json", '{"x"'),
        ("json", "[1] is the first"),
        ("json", "[]"),
        ("json", "{}"),
        ("json", 'Hello {"name": "f", "arguments": {}} \n'),
        ("llama3_json", "<|python_tag|>print(1)"),
    ],
)
def test_what_is_no_call_is_content_to_the_letter(style: str, text: str) -> None:
    assert read(Dialect(style), text) == (content(text) if text else [])


@given(st.sampled_from(sorted(TOOL_STYLES)), st.lists(st.sampled_from([*'<>{}[]":,\\ \nf1', "tool_call", HERMES])))
def test_any_text_is_read_the_same_in_any_pieces(style: str, pieces: list[str]) -> None:
    parts = read(Dialect(style), "".join(pieces))
    assert [part[0] for part in parts].count("call") <= "".join(pieces).count("name")


def test_nothing_is_held_back_longer_than_it_must_be() -> None:
    reader = ToolReader(TOOL_STYLES["hermes"], TOOLS)
    assert reader.push("Hello,") == [Part("content", "Hello,")]
    assert reader.push(" you <") == [Part("content", " you")]
    assert reader.push("b") == [Part("content", " <b")]
    assert reader.push('<tool_call>{"name": "f", "argu') == []
    assert reader.push('ments": {"a') == [Part("call", "f"), Part("arguments", '{"a')]
    assert reader.push('": 1}') == [Part("arguments", '": 1}')]
    assert reader.push("}</tool_call>") == reader.finish() == []


def test_arguments_that_are_no_json_are_handed_on_as_they_are() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": ?, "]": [["}"}]}}</tool_call>'
    assert read(Dialect("hermes"), text) == call(0, "f", '{"a": ?, "]": [["}"}]}')
    deep = f'{{"x": {"[" * 5000}{"]" * 5000}}}'
    assert read(Dialect("json"), f'{{"name": "f", "arguments": {deep}}}') == call(0, "f", deep)


def test_what_follows_arguments_where_it_cannot_is_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1} x}</tool_call>'
    assert read(Dialect("hermes"), text) == [*call(0, "f", '{"a": 1}'), *content(" x}</tool_call>")]


@pytest.mark.parametrize(
    ("text", "is_thinking", "thought", "said"),
    [
        ("<think>\nLet me </thin see\n</think>\n\nHi <think> x ", False, "Let me </thin see", "Hi <think> x "),
        ("\n<think>a</think>b", False, "a", "b"),
        ("a b\n</think>\n\nHi", True, "a b", "Hi"),
        ("plain <think> x", False, "", "plain <think> x"),
        (" <thi", False, "", " <thi"),
        ("<think>abc </th", False, "abc </th", ""),
        ("\n</think>\n", True, "", ""),
        ("still thinking", True, "still thinking", ""),
        ("", True, "", ""),
    ],
)
def test_thoughts(text: str, is_thinking: bool, thought: str, said: str) -> None:
    parts = read(Dialect("hermes", "think"), text, is_thinking=is_thinking)
    assert parts == [part for part in (("reasoning", thought, 0), ("content", said, 0)) if part[1]]


def test_calls_after_thoughts() -> None:
    parts = read(Dialect("hermes", "think"), f"<think>I could <tool_call>.</think>\n\n{HERMES}")
    assert parts == [("reasoning", "I could <tool_call>.", 0), *call(0, "f", ADD)]
    assert json.loads(ADD)["b"] == 'q"}{é'


def test_what_is_too_long_for_a_name_is_content_at_once() -> None:
    reader = ToolReader(TOOL_STYLES["mistral"], TOOLS)
    said = "[TOOL_CALLS]" + "so " * 100
    assert merged(reader.push(said)) == content(said.rstrip())
