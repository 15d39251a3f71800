"""OpenAI's client on /v1/responses and Anthropic's on /v1/messages, against a real server with a random model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel

from tests.support.server import Server

pytestmark = pytest.mark.server
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMA = {
    "type": "object",
    "properties": {"a": DIGIT, "b": DIGIT},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FUNCTION: Any = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}
TOOL: Any = {"name": "add", "input_schema": SCHEMA}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
ASKED = "Add 2 and 3."
GREEDY = {"temperature": 0}


class Sum(BaseModel):
    sign: Literal["+", "-"]
    is_right: bool


@pytest.fixture
def openai_client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic_client(server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.base, api_key="none", max_retries=0) as client:
        yield client


def test_responses_whole_and_streamed_are_the_same(openai_client: OpenAI) -> None:
    asked: Any = {"model": "tiny", "input": ASKED, "max_output_tokens": 12, "temperature": 0}
    whole = openai_client.responses.create(**asked, extra_body={"ignore_eos": True})
    assert (whole.status, whole.usage and whole.usage.output_tokens) == ("incomplete", 12)
    events = list(openai_client.responses.create(**asked, stream=True, extra_body={"ignore_eos": True}))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_loop_with_a_tool_in_responses(openai_client: OpenAI) -> None:
    create = openai_client.responses.create
    first = create(model="tiny", input=ASKED, tools=[FUNCTION], tool_choice="required", parallel_tool_calls=False)
    (call,) = first.output
    assert call.type == "function_call"
    assert (call.name, first.status) == ("add", "completed")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
    given: Any = [{"role": "user", "content": ASKED}, call.model_dump(exclude_none=True), result]
    second = create(model="tiny", input=given, tools=[FUNCTION], max_output_tokens=4)
    assert second.output


def test_parsed_output_of_responses(openai_client: OpenAI) -> None:
    parsed = openai_client.responses.parse(model="tiny", input=ASKED, text_format=Sum, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Sum)
    with openai_client.responses.stream(model="tiny", input=ASKED, text_format=Sum, max_output_tokens=200) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Sum)


def test_a_loop_with_a_tool_in_a_chat(openai_client: OpenAI) -> None:
    create = openai_client.chat.completions.create
    messages: Any = [{"role": "user", "content": ASKED}]
    choice: Any = {"type": "function", "function": {"name": "add"}}
    whole = create(model="tiny", messages=messages, tools=[CHAT_TOOL], tool_choice=choice, temperature=0).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls or ()
    assert call.type == "function"
    with openai_client.chat.completions.stream(
        model="tiny", messages=messages, tools=[CHAT_TOOL], tool_choice=choice, temperature=0
    ) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert streamed.function.arguments == call.function.arguments
    messages += [whole.message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    assert create(model="tiny", messages=messages, tools=[CHAT_TOOL], max_tokens=4).choices


def test_refusals_of_responses(openai_client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.responses.create(model="tiny", input=ASKED, previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.create(model="none", input=ASKED)


def test_messages_whole_and_streamed_are_the_same(anthropic_client: Anthropic) -> None:
    body: Any = {"temperature": 0, "ignore_eos": True}
    asked: Any = {"model": "tiny", "max_tokens": 12, "messages": [{"role": "user", "content": ASKED}]}
    whole = anthropic_client.messages.create(**asked, extra_body=body)
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
    with anthropic_client.messages.stream(**asked, extra_body=body) as stream:
        final = stream.get_final_message()
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
    assert final.stop_reason == "max_tokens"
    counted = anthropic_client.messages.count_tokens(model="tiny", messages=asked["messages"])
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_a_loop_with_a_tool_in_messages(anthropic_client: Anthropic) -> None:
    messages: Any = [{"role": "user", "content": ASKED}]
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    asked: Any = {"model": "tiny", "max_tokens": 200, "tools": [TOOL], "tool_choice": choice}
    whole = anthropic_client.messages.create(messages=messages, **asked, extra_body=GREEDY)
    (block,) = whole.content
    assert block.type == "tool_use"
    assert (whole.stop_reason, sorted(block.input)) == ("tool_use", ["a", "b"])
    with anthropic_client.messages.stream(messages=messages, **asked, extra_body=GREEDY) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use"
    assert streamed.input == block.input
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "5"}
    said: Any = [block.model_dump(exclude_none=True)]
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    assert (
        anthropic_client.messages.create(model="tiny", max_tokens=4, messages=messages, tools=[TOOL]).content
        is not None
    )


def test_refusals_of_messages(anthropic_client: Anthropic) -> None:
    messages: Any = [{"role": "user", "content": ASKED}]
    with pytest.raises(anthropic.NotFoundError):
        anthropic_client.messages.create(model="none", max_tokens=4, messages=messages)
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    with pytest.raises(anthropic.BadRequestError, match="thinking"):
        anthropic_client.messages.create(model="tiny", max_tokens=4, messages=messages, thinking=thinking)
