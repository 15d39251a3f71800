"""What the output must be: fields of requests to one description of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.test_protocol import chat, completion
from tokenmill.errors import InvalidRequest
from tokenmill.types import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 10**30}}}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True, "param": "response_format"}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "t", "schema": SCHEMA}}},
            {"json": json.dumps(SCHEMA), "strict": False, "param": "response_format"},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}},
            {"json": json.dumps(SCHEMA), "param": "response_format"},
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, {"json": json.dumps(SCHEMA)}),
        ({"structured_outputs": {"json": "{}"}}, {"json": "{}"}),
        ({"structured_outputs": {"regex": "a+"}, "response_format": {"type": "text"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
         {"json_object": True, "disable_any_whitespace": True}),
    ],
)  # fmt: skip
def test_what_the_output_must_be(fields: dict[str, Any], wanted: dict[str, Any] | None) -> None:
    for parse in (completion, chat):
        params = parse(**fields).params
        assert params.structured_outputs == (wanted and StructuredOutputs(**wanted))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "t"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object", "indent": 2}}, "response_format.indent"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)
def test_what_cannot_be_an_output_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    for parse in (completion, chat):
        with pytest.raises(InvalidRequest) as caught:
            parse(**fields)
        assert caught.value.param == param


def test_large_grammars_are_for_few_answers() -> None:
    large = {"structured_outputs": {"regex": "a" * 200_000}}
    assert completion(prompt=["x"] * 8, n=8, **large).params.structured_outputs is not None
    for many in ({"prompt": ["x"] * 128}, {"n": 128}, {"prompt": ["x"] * 16, "n": 8}):
        with pytest.raises(InvalidRequest, match="send several requests") as caught:
            completion(**many, **large)
        assert caught.value.param == "structured_outputs"
