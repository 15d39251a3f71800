"""Outputs held to schemas over HTTP, through the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.support.server import Server

pytestmark = pytest.mark.server
MESSAGES: Any = [{"role": "user", "content": "Who?"}]
WARM: Any = {"model": "tiny", "temperature": 2, "messages": MESSAGES}
ENDLESS = {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]}


class Person(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=130)
    mood: Literal["glad", "sad"] | None


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_pydantic_model_comes_back(client: OpenAI) -> None:
    answer = client.chat.completions.parse(response_format=Person, seed=1, n=3, **WARM)
    people = [choice.message.parsed for choice in answer.choices]
    assert all(isinstance(person, Person) for person in people)
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
    with client.chat.completions.stream(response_format=Person, seed=1, **WARM) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.parsed == people[0]


def test_completions_of_a_choice_a_pattern_and_a_grammar(client: OpenAI) -> None:
    for wanted, texts in (
        ({"choice": ["yes", "no"]}, {"yes", "no"}),
        ({"regex": "a{2}b?"}, {"aa", "aab"}),
        ({"grammar": 'start: "x" | "y" "z"'}, {"x", "yz"}),
    ):
        answer = client.completions.create(
            model="tiny", prompt=["a", "b", "c"], temperature=2, seed=3, extra_body={"structured_outputs": wanted}
        )
        assert {choice.text for choice in answer.choices} <= texts
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}


@pytest.mark.parametrize(("schema", "words"), [(ENDLESS, "takes over"), ({"type": "strang"}, "Invalid type: strang")])
def test_what_cannot_be_compiled_is_a_bad_request(client: OpenAI, schema: dict[str, Any], words: str) -> None:
    def ask(schema: dict[str, Any]) -> Any:
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "t", "strict": True, "schema": schema}}
        return client.chat.completions.create(response_format=wanted, max_tokens=200, **WARM)

    with ThreadPoolExecutor(3) as pool:
        refused = [pool.submit(ask, schema) for _ in range(2)]
        assert json.loads(pool.submit(ask, {"enum": [[1, "é"]]}).result().choices[0].message.content) == [1, "é"]
        for future in refused:
            with pytest.raises(openai.BadRequestError, match=words) as caught:
                future.result()
            assert caught.value.param == "response_format"
