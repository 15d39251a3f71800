"""/v1/responses: what it asks for, and the items and events of its answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.site import Site, error_of
from tests.server.speaking import GOOD, OTHER, SAID, Speaking
from tokenmill.errors import InvalidRequest
from tokenmill.schema import check
from tokenmill.server.errors import renamed
from tokenmill.server.generation import Generation
from tokenmill.server.protocol import GenerationRequest
from tokenmill.server.responses import ResponsesShape, parse_responses
from tokenmill.server.responses_fields import RESPONSE
from tokenmill.server.shapes import Head
from tokenmill.text.dialect import Dialect
from tokenmill.types import FinishReason, Logprob, StructuredOutputs, TokenLogprobs
from tokenmill.wire.messages import ChatPrompt, TextDelta

PATH = "/v1/responses"
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
PING = {"type": "function", "name": "ping"}


def parse(**fields: Any) -> GenerationRequest:
    return parse_responses({"input": "x"} | fields, {})


def messages(**fields: Any) -> list[dict[str, Any]]:
    (prompt,) = parse(**fields).prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


def test_input_becomes_messages() -> None:
    assert messages() == [{"role": "user", "content": "x"}]
    call = {"type": "function_call", "id": "fc_1", "name": "add", "arguments": '{"a": 1}', "status": "completed"}
    call |= {"caller": None, "async_": None, "parsed_arguments": {"a": 2}}
    thoughts = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
    said = {"type": "output_text", "text": "So", "annotations": [], "logprobs": [], "parsed": {}}
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        thoughts,
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [said],
            "phase": None,
        },
        call | {"call_id": "1"},
        call | {"call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "5"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "6"}]},
        call | {"call_id": "3"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
    ]
    calls = [
        {"id": str(number), "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
        for number in (1, 2, 3)
    ]
    assert messages(instructions="Be brief.", input=given) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "So"}],
            "reasoning_content": "Hm",
            "tool_calls": calls[:2],
        },
        {"role": "tool", "tool_call_id": "1", "content": "5"},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "6"}]},
        {"role": "assistant", "content": "", "tool_calls": calls[2:]},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
    ]


def test_what_else_is_asked_for() -> None:
    call = parse(
        max_output_tokens=7,
        temperature=0.5,
        top_k=3,
        tools=[ADD, PING],
        tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "ping"}]},
        include=["message.output_text.logprobs"],
        store=False,
        truncation="disabled",
        stream_options={"include_obfuscation": False},
    )
    assert (call.params.max_tokens, call.params.temperature, call.params.top_k) == (7, 0.5, 3)
    assert (call.params.logprobs, call.tools.callable.keys()) == (0, {"ping"})
    assert parse(top_logprobs=2).params.logprobs == 2
    assert parse().params.max_tokens is None
    shaped = {"type": "json_schema", "name": "n", "schema": {"type": "integer"}, "strict": True}
    wanted = StructuredOutputs(json='{"type": "integer"}', strict=True, param="response_format")
    assert parse(text={"format": shaped}).params.structured_outputs == wanted
    assert parse(text={"format": {"type": "text"}}).params.structured_outputs is None
    forced = parse(tools=[PING], tool_choice={"type": "function", "name": "ping"}).params.structured_outputs
    assert forced is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}]}, "input[0]"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"n": 2}, "n"),
        ({"max_tokens": 5}, "max_tokens"),
    ],
)
def test_what_is_wrong_or_not_honoured_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert (caught.value.param or "").startswith(param)


def test_a_whole_answer() -> None:
    answer = Speaking().answer(PATH, input=SAID, tools=[ADD, PING], metadata={"a": "b"}, temperature=0.5)
    check(answer, RESPONSE.schema, "response")
    assert answer["id"].startswith("resp_")
    assert answer["completed_at"] >= answer["created_at"]
    assert (answer["status"], answer["metadata"], answer["temperature"]) == ("completed", {"a": "b"}, 0.5)
    thought, said, *calls = answer["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm"}]
    assert said["content"] == [{"type": "output_text", "text": "Let me see", "annotations": [], "logprobs": []}]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        (call["name"], call["arguments"]) for call in (GOOD, OTHER)
    ]
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]


def test_the_events_of_a_stream() -> None:
    events = Speaking().events(PATH, input=SAID, tools=[ADD, PING])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] == "completed"
    text = ["output_item.added", "content_part.added", "T.delta", "T.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    expected = [kind.replace("T", "reasoning_text") for kind in text]
    expected += [kind.replace("T", "output_text") for kind in text] + call + call
    unlike = [kind for kind, before in zip(kinds[2:-1], kinds[1:], strict=False) if kind != before]
    assert unlike == expected
    assert {"".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")} == {
        next(event["text"] for event in events if event["type"] == "response.output_text.done")
    }
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    last = events[-1]["response"]
    assert last["output"] == done
    check(last, RESPONSE.schema, "response")
    check(events[0]["response"], RESPONSE.schema, "response")
    assert all(event["output_index"] < len(done) for event in events if "output_index" in event)


def test_answers_that_do_not_end_by_themselves() -> None:
    cut = Speaking().answer(PATH, input="abc", max_output_tokens=5)
    assert cut["completed_at"] is None
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (cut["output"][0]["status"], cut["output"][0]["content"][0]["text"]) == ("incomplete", "abcab")
    late = Speaking().answer(PATH, input="SLOW", timeout=5)
    assert late["incomplete_details"] == {"reason": "deadline"}
    nothing = Speaking().answer(PATH, input=".")
    assert (nothing["status"], nothing["output"][0]["content"][0]["text"]) == ("completed", "")
    events = Speaking().events(PATH, input="abc", max_output_tokens=5)
    assert events[-1]["type"] == "response.incomplete"


def test_a_failure_in_mid_stream_is_the_last_event() -> None:
    events = Speaking().events(PATH, input="BREAK")
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["output"][0]["content"][0]["text"] == "BR"
    assert last["response"]["error"] == {"code": "server_error", "message": "the model broke"}
    assert Site().post(PATH, input="BREAK").status_code == 500
    assert Site().post(PATH, input="REFUSE", stream=True).json()["error"]["code"] == 400


@pytest.mark.parametrize(
    ("path", "fields"), [("/v1/responses", {"input": "REFUSE"}), ("/v1/embeddings", {"input": "REFUSE"})]
)
def test_what_another_process_refuses_has_the_name_of_the_request(
    site: Site, path: str, fields: dict[str, Any]
) -> None:
    assert error_of(site.post(path, **fields))["param"] == "input"


def test_names_of_fields_in_errors() -> None:
    names = {"stop": "stop_sequences", "max_tokens": "max_output_tokens", "messages": "input"}
    for message, param, told in (
        ("stop must hold texts", "stop", "stop_sequences must hold texts"),
        ("lower max_tokens", "max_tokens", "lower max_output_tokens"),
        ("no messages fit", "messages[1].x", "no messages fit"),
        ("max_tokens is not known", None, "max_tokens is not known"),
    ):
        error = renamed(InvalidRequest(message, param), names)
        assert error.message == told
    assert renamed(InvalidRequest("a", "messages[1].x"), names).param == "input[1].x"


def said(text: str, *tokens: str, end: FinishReason | None = None) -> TextDelta:
    entries = [TokenLogprobs(Logprob(7, token, token.encode(), -1.0, 1), [], 0) for token in tokens]
    return TextDelta(uid=1, text=text, logprobs=entries, finish_reason=end)


@pytest.mark.parametrize("is_stream", [True, False])
def test_tokens_whose_text_is_held_back_keep_their_logprobs(is_stream: bool) -> None:
    call = parse(tools=[ADD], top_logprobs=1)
    shape = ResponsesShape(call, Dialect("json", "think"))
    shape.start(Head("1", "m", 0, has_timings=False), Generation(1, 1))
    deltas = [
        said("<think>Hm</think>", "<think>", "Hm", "</think>"),
        said('{"na', '{"', "na"),
        said("", "\N{DEGREE SIGN}"),
        said("me", "me"),
        said(" no ", " no", " "),
        said("", "<end>", end=FinishReason.STOP),
    ]
    events = b"".join(shape.news([(0, delta)]) for delta in deltas) + shape.ending() if is_stream else b""
    answer = json.loads(events.rpartition(b"data: ")[2])["response"] if is_stream else shape.whole([deltas])
    thought, message = answer["output"]
    assert "logprobs" not in thought["content"][0]
    (shown,) = message["content"]
    assert shown["text"] == '{"name no '
    assert [its["token"] for its in shown["logprobs"]] == ['{"', "na", "\N{DEGREE SIGN}", "me", " no", " ", "<end>"]


def test_a_broken_call_is_text() -> None:
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": 1,}}\n</tool_call>'
    (item,) = Speaking().answer(PATH, input=f"{broken}.", tools=[ADD])["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", broken)
    cut = Speaking().answer(PATH, input=broken, tools=[ADD], max_output_tokens=broken.index("1") + 1)
    (item,) = cut["output"]
    assert (item["type"], item["status"]) == ("message", "incomplete")
    events = Speaking().events(PATH, input=broken, tools=[ADD], max_output_tokens=broken.index("1") + 1)
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["status"], item["arguments"]) == ("function_call", "incomplete", '{"a": 1')


def test_items_that_come_at_once() -> None:
    shape = ResponsesShape(parse(), Dialect("json", "think"))
    shape.start(Head("1", "m", 0, has_timings=False), Generation(1, 1))
    events = shape.news([(0, said("<think>Hm</think>So", end=FinishReason.LENGTH))])
    answer = json.loads(shape.ending().rpartition(b"data: ")[2])["response"]
    assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]
    assert events.count(b"event: response.output_text.delta") == 1
    empty = ResponsesShape(parse(), Dialect())
    empty.start(Head("1", "m", 0, has_timings=False), Generation(1, 1))
    events = empty.news([(0, said("", end=FinishReason.STOP))])
    assert b"response.output_text.done" in events
    assert b"response.output_text.delta" not in events
