"""Grammars that compilers do not survive are refused, and the next ones are checked as before."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tokenmill.errors import InvalidRequest, Overloaded
from tokenmill.text import grammar, grammar_check
from tokenmill.text.grammar import MAX_KEPT, Compiled, Vocabulary
from tokenmill.text.grammar_check import GrammarCheck
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.types import StructuredOutputs

CHAIN = "start: r0\n" + "".join(f'r{i}: "a{i}" r{i + 1}?\n' for i in range(9000)) + 'r9000: "x"'


@pytest.fixture(scope="module")
def check(byte_tokenizer: Tokenizer) -> Iterator[GrammarCheck]:
    made = GrammarCheck(lambda: Vocabulary.of(byte_tokenizer, byte_tokenizer.vocab_size))
    yield made
    made.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"json_object": True},
        {"json": {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}},
        {"json": '{"type": "array", "items": true}'},
        {"json": True},
        {"json": {"type": "array", "uniqueItems": True}, "strict": False},
        {"json": {"type": "number", "x-guidance": {"lenient": True}, "if": {}}},
        {"regex": "[a-z]+/[0-9]{2}\n"},
        {"choice": ["a", 'b"\\\n', "", "é😀"]},
        {"grammar": 'start: "a" word\nword: /[a-z]+/ // the end'},
    ],
)
def test_what_can_be_compiled_passes(check: GrammarCheck, fields: dict[str, Any]) -> None:
    check.check(StructuredOutputs(**fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"json": {"type": "strang"}}, "Invalid type: strang"),
        ({"json": {"type": "array", "uniqueItems": True}}, "Unimplemented keys: .*uniqueItems"),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"json": False}, "Unsatisfiable schema"),
        ({"json": {"allOf": [{"const": 1}, {"const": 2}]}}, "Unsatisfiable"),
        ({"json": {"$ref": "http://localhost/a.json"}}, "not present"),
        ({"json": {"type": "string", "pattern": "[z-a]"}}, "invalid.*range"),
        ({"json": {"x-guidance": 3}}, "JsonCompileOptions"),
        ({"json": "text"}, "not valid JSON"),
        ({"json": "[]"}, "is an object"),
        ({"json": '{"a":' * 5000 + "1" + "}" * 5000}, "too deeply"),
        ({"json": '{"items":' * 200 + "{}" + "}" * 200}, "recursion limit"),
        ({"regex": "a(?=b)"}, "^structured_outputs: line 1, column 8: .*look-around.*not supported$"),
        ({"regex": "(" * 500 + "[" + ")" * 500}, r"invalid regex .* \.\.\. "),
        ({"grammar": 'start: "a" foo'}, 'unknown name: "foo"'),
        ({"grammar": ""}, "start"),
        ({"grammar": "start: x\nx[temperature=0.5]: /a/"}, "temperature"),
        ({"choice": ["x" * 300_000]}, "too large"),
        ({"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}}, "items"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_the_compilers_words(
    check: GrammarCheck, fields: dict[str, Any], words: str
) -> None:
    for param in ("structured_outputs", "response_format"):
        with pytest.raises(InvalidRequest, match=words.replace("structured_outputs", param)) as caught:
            check.check(StructuredOutputs(**fields, param=param))
        assert caught.value.param == param
        assert len(caught.value.message) < 1000


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]}},  # endless
        {"grammar": CHAIN},  # a stack overflow
    ],
)
def test_a_grammar_that_ends_its_compiler_is_refused(
    check: GrammarCheck, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check.check(StructuredOutputs(regex="a"))
    assert check._helper is not None
    process = check._helper[1]
    monkeypatch.setattr(grammar_check, "CHECK_SECONDS", 0.5)
    with pytest.raises(InvalidRequest, match="takes over"):
        check.check(StructuredOutputs(**fields))
    assert process.poll() is not None
    monkeypatch.undo()
    check.check(StructuredOutputs(regex="b" * os.getpid().bit_length()))


def test_one_that_waits_too_long_for_others_is_told_to_try_again() -> None:
    gate = threading.Event()
    compiled = Compiled(lambda source: gate.wait(), patience=0.0)
    first, second = (compiled.start(StructuredOutputs(regex=text)) for text in "ab")
    gate.set()
    for future in (first, second):
        with pytest.raises(Overloaded, match="try again"):
            future.result()
    compiled._patience = 60.0
    assert compiled.start(StructuredOutputs(regex="b")).result() is True
    compiled.close()


def test_what_was_asked_for_last_is_kept_and_failures_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def work(source: str) -> int:
        calls.append(source)
        if "fail" in source:
            raise OSError("gone")
        return len(calls)

    compiled = Compiled(work)
    ask = [StructuredOutputs(regex=f"r{index}") for index in range(MAX_KEPT + 1)]
    assert compiled.start(ask[0]).result() == compiled.start(ask[0]).result() == 1
    for wanted in ask[1:]:
        compiled.start(wanted).result()
    assert len(calls) == MAX_KEPT + 1
    assert compiled.start(ask[-1]).result() == MAX_KEPT + 1
    assert compiled.start(ask[0]).result() == MAX_KEPT + 2
    assert compiled.start(ask[2]).result() == 3  # and so kept longer than what came after it
    compiled.start(StructuredOutputs(regex="new")).result()
    assert compiled.start(ask[2]).result() == 3
    failing = StructuredOutputs(regex="fail")
    for seconds, num_calls in ((30.0, 4), (30.0, 4), (-1.0, 5)):
        monkeypatch.setattr(grammar, "FAILURE_SECONDS", seconds)
        with pytest.raises(OSError, match="gone"):
            compiled.start(failing).result()
        assert len(calls) == MAX_KEPT + num_calls
    compiled.start(ask[0]).result()
    assert len(calls) == MAX_KEPT + 5
    monkeypatch.setattr(grammar, "MAX_KEPT_SIZE", 100)
    for wanted in (ask[0], ask[1], StructuredOutputs(regex="x" * 70), ask[1]):
        compiled.start(wanted).result()
    assert len(calls) == MAX_KEPT + 8
    compiled.close()
