from __future__ import annotations

from typing import Any

import pytest

from tokenmill.text.chat_template import ChatTemplate
from tokenmill.text.dialect import Dialect, find_dialect
from tokenmill.text.plain_tools import INSTRUCTION, INTRODUCTION, in_plain_words
from tokenmill.wire.messages import ChatPrompt

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}" + PLAIN
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("source", "special", "dialect"),
    [
        (PLAIN, {}, Dialect("json")),
        (WITH_TOOLS, {"<tool_call>": 7, "</s>": 2}, Dialect("hermes", special={"<tool_call>": 7})),
        (PLAIN + "{# [TOOL_CALLS] #}", {"[TOOL_CALLS]": 5}, Dialect("mistral", special={"[TOOL_CALLS]": 5})),
        (PLAIN + "{# ipython #}", {}, Dialect("llama3_json")),
        (PLAIN + "{# </think> #}", {"</think>": 9}, Dialect("json", "think", {"</think>": 9})),
        (PLAIN + "{# [THINK] [/THINK] #}", {}, Dialect("json", "mistral")),
    ],
)
def test_what_a_template_shows(source: str, special: dict[str, int], dialect: Dialect) -> None:
    assert find_dialect(source, special) == dialect


def test_what_a_template_looks_at() -> None:
    source = PLAIN + "{% if enable_thinking %}{{ reasoning_effort }}{% endif %}"
    assert find_dialect(source, {}).variables == ["reasoning_effort", "enable_thinking"]


def test_flags_come_first() -> None:
    assert find_dialect(WITH_TOOLS + "{# </think> #}", {}, "json", "none") == Dialect("json")
    assert find_dialect("", {}, reasoning="think") == Dialect("json", "think")
    assert find_dialect("", {}) == Dialect()


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([USER], [("system", "TOLD"), ("user", "Hi")]),
        ([{"role": "system", "content": "S"}, USER], [("system", "S\n\nTOLD"), ("user", "Hi")]),
        (
            [{"role": "developer", "content": [{"type": "text", "text": "S"}]}, USER],
            [("developer", "S\n\nTOLD"), ("user", "Hi")],
        ),
        (
            [
                USER,
                {"role": "assistant", "content": "So", "tool_calls": [CALL, CALL]},
                {"role": "tool", "content": "3", "tool_call_id": "1"},
                {"role": "tool", "content": [{"type": "text", "text": "4"}]},
                USER,
            ],
            [
                ("system", "TOLD"),
                ("user", "Hi"),
                ("assistant", 'So\n{"name": "f", "arguments": {"x": "é"}}\n{"name": "f", "arguments": {"x": "é"}}'),
                ("user", "Result: 3\nResult: 4"),
                ("user", "Hi"),
            ],
        ),
    ],
)
def test_tools_in_plain_words(messages: list[dict[str, Any]], expected: list[tuple[str, str]]) -> None:
    told = f'{INTRODUCTION}\n{{"name": "f", "parameters": {{"type": "object"}}}}\n{INSTRUCTION}'
    plain = in_plain_words(messages, [TOOL])
    assert [(message["role"], message["content"].replace(told, "TOLD")) for message in plain] == expected
    assert all(set(message) == {"role", "content"} for message in plain)


def test_a_template_that_knows_no_tools_is_told_in_words() -> None:
    asked = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "3"}]
    with_tools = ChatPrompt(messages=[USER], tools=[TOOL])
    assert ChatTemplate(PLAIN).render(with_tools).startswith(f"<system>{INTRODUCTION}")
    assert ChatTemplate(WITH_TOOLS).render(with_tools).startswith('[{"type": "function"')
    assert ChatTemplate(PLAIN).render(ChatPrompt(messages=asked)).endswith("<user>Result: 3")
    assert ChatTemplate(WITH_TOOLS).render(ChatPrompt(messages=asked)).endswith("<assistant><tool>3")
