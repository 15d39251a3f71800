"""Tools, parsed answers and error classes of OpenAI's client, against a real server with a random model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

from tests.support.server import Server, settled

pytestmark = pytest.mark.server
LETTERS = {str(token): 100 for token in range(68, 94)}
ASKED: Any = [{"role": "user", "content": "Add 2 and 3."}]


class Add(BaseModel):
    """Adds two digits."""

    a: int = Field(ge=0, le=9)
    b: int = Field(ge=0, le=9)


TOOL: Any = pydantic_function_tool(Add, name="add")
ONE_CALL: Any = {
    "model": "tiny",
    "messages": ASKED,
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 200,
}


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_arguments_are_parsed_and_what_was_said_can_be_said_again(client: OpenAI) -> None:
    message = client.chat.completions.parse(temperature=2, seed=1, **ONE_CALL).choices[0].message
    (call,) = message.tool_calls or []
    added = call.function.parsed_arguments
    assert isinstance(added, Add)
    result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": str(added.a + added.b)}]}
    asked: Any = {**ONE_CALL, "tool_choice": "auto", "temperature": 0, "max_tokens": 8, "logit_bias": LETTERS}
    answers = [
        client.chat.completions.create(**{**asked, "messages": [*ASKED, said, result]}).choices[0]
        for said in (
            message,
            message.model_dump(),
            message.model_dump(exclude_none=True, include={"role", "tool_calls"}),
        )
    ]
    assert len(answers[0].message.content or "") == 8
    assert [answer.message.content for answer in answers[1:]] == [answers[0].message.content] * 2


def test_arguments_arrive_in_pieces(client: OpenAI) -> None:
    with client.chat.completions.stream(temperature=0, **ONE_CALL) as stream:
        events = list(stream)
    pieces = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    (done,) = (event for event in events if event.type == "tool_calls.function.arguments.done")
    assert (len(pieces) > 2, done.name) == (True, "add")
    assert "".join(piece.arguments_delta for piece in pieces) == done.arguments
    assert isinstance(done.parsed_arguments, Add)
    whole = client.chat.completions.create(temperature=0, **ONE_CALL).choices[0].message
    assert [call.function.arguments for call in whole.tool_calls or () if call.type == "function"] == [done.arguments]


def test_several_calls_of_several_choices(client: OpenAI) -> None:
    asked: Any = {**ONE_CALL, "parallel_tool_calls": True, "temperature": 2, "seed": 3, "n": 8, "max_tokens": 400}
    asked["logit_bias"] = {"2": 4}  # the end: else some choices call on and on
    whole = client.chat.completions.parse(**asked)
    calls = [choice.message.tool_calls or [] for choice in whole.choices]
    assert {choice.finish_reason for choice in whole.choices} == {"tool_calls"}
    assert max(map(len, calls)) > 1
    ids = [call.id for its in calls for call in its]
    assert len({*ids}) == len(ids)
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion()
    for choice, its in zip(streamed.choices, calls, strict=True):
        again = [call.function.parsed_arguments for call in choice.message.tool_calls or ()]
        assert again == [call.function.parsed_arguments for call in its]


def test_a_call_or_an_answer_that_is_parsed(client: OpenAI) -> None:
    asked: Any = {**ONE_CALL, "tool_choice": "auto", "temperature": 1, "seed": 1, "n": 8, "max_tokens": 1000}
    for choice in client.chat.completions.parse(response_format=Add, **asked).choices:
        said = choice.message.parsed or (choice.message.tool_calls or [])[0].function.parsed_arguments
        assert isinstance(said, Add)


def test_answers_that_are_cut_cannot_be_parsed(client: OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": ASKED, "max_tokens": 3, "response_format": Add}
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**asked)
    with client.chat.completions.stream(**asked) as stream, pytest.raises(openai.LengthFinishReasonError):
        stream.until_done()


def test_a_client_that_does_not_wait_leaves_nothing_running(client: OpenAI, server: Server) -> None:
    endless: Any = {"model": "tiny", "messages": ASKED, "max_tokens": 30_000, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).chat.completions.create(**endless)
    assert settled(server.pulse, lambda pulse: not pulse["running"])["running"] == 0


def test_many_streams_at_once(server: Server) -> None:
    async def read(client: AsyncOpenAI, word: str) -> str:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": word}],
            stream=True,
            temperature=0,
            max_tokens=12,
            logit_bias=LETTERS,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def read_all() -> tuple[list[str], list[str]]:
        async with AsyncOpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client:
            words = [f"Word {number}" for number in range(8)]
            together = await asyncio.gather(*(read(client, word) for word in words))
            return together, [await read(client, word) for word in words]

    together, alone = asyncio.run(read_all())
    assert together == alone
    assert len({*together}) > 1


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")  # the client's own
def test_parsed_answers_can_be_said_again(client: OpenAI) -> None:
    asked: Any = {"model": "tiny", "temperature": 2, "seed": 1}
    message = client.chat.completions.parse(messages=ASKED, response_format=Add, **asked).choices[0].message
    assert isinstance(message.parsed, Add)
    again: Any = {**asked, "max_tokens": 3, "messages": [*ASKED, message, *ASKED]}
    assert client.chat.completions.create(**again).choices[0].finish_reason == "length"
    response = client.responses.parse(input=ASKED, text_format=Add, model="tiny", temperature=0.1)
    for items in (response.output, [item.model_dump(warnings=False) for item in response.output]):
        said: Any = [*ASKED, *items, *ASKED]
        assert client.responses.create(model="tiny", input=said, max_output_tokens=3).status == "incomplete"


def test_a_body_that_is_too_large(client: OpenAI, server: Server) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "x" * (17 << 20)}]}
    with pytest.raises(openai.APIStatusError, match="max-body-bytes") as large:
        client.chat.completions.create(**asked)
    assert large.value.status_code == 413
    with anthropic.Anthropic(base_url=server.base, api_key="none", max_retries=0) as other:
        with pytest.raises(anthropic.APIStatusError, match="max-body-bytes") as large_too:
            other.messages.create(**asked)
        assert large_too.value.status_code == 413
