"""JSON bodies: every field is honoured, asks for nothing, or is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokenmill.errors import InvalidRequest, UnsupportedField
from tokenmill.server.protocol import (
    MAX_OBJECTS,
    GenerationRequest,
    decode_body,
    parse_chat,
    parse_completion,
)
from tokenmill.types import SamplingParams, Scheduling
from tokenmill.wire.messages import ChatPrompt

USER = {"role": "user", "content": "Hi"}


def completion(**fields: Any) -> GenerationRequest:
    return parse_completion({"prompt": "x"} | fields, {})


def chat(**fields: Any) -> GenerationRequest:
    return parse_chat({"messages": [USER]} | fields, {})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"model":',
        b"[]",
        b"5",
        b"null",
        b"true",
        b"{:}",
        b'{"a":1,}',
        b'{"a":1}{"b":2}',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":1e999}',
        b'{"a":"\\ud800"}',
        b'{"a":"ab \\ud83d"}',
        b'{"a":"\xff"}',
        b'{"a":"\xed\xa0\x80"}',
        b"\xff\xfe{\x00}\x00",
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode_body(body)


def test_bodies_of_very_many_objects_are_refused_and_braces_in_texts_are_none() -> None:
    for many in (b"{}," * MAX_OBJECTS, b'[{"a":[]}],' * MAX_OBJECTS):
        with pytest.raises(InvalidRequest, match="32768 objects"):
            decode_body(b'{"a":[' + many + b"1]}")
    assert decode_body(b'{"a":[' + b"{}," * (MAX_OBJECTS - 1) + b"1]}")
    assert decode_body(b'{"a":"' + b"{" * 2 * MAX_OBJECTS + b'"}')


def test_json_oddities_that_are_fine() -> None:
    assert decode_body(b'\xef\xbb\xbf{"a":"\\ud83d\\ude00"}') == {"a": "\U0001f600"}
    assert decode_body(b'{"a":1,"a":2}') == {"a": 2}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"top_k": 2**40}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"n": -1}, "n"),
        ({"n": 0}, "n"),
        ({"n": "two"}, "n"),
        ({"n": True}, "n"),
        ({"n": 129}, "n"),
        ({"seed": "abc"}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", None]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"skip_special_tokens": 1}, "skip_special_tokens"),
        ({"include_stop_str_in_output": []}, "include_stop_str_in_output"),
        ({"logit_bias": [253]}, "logit_bias"),
        ({"logit_bias": {"abc": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"\u0663": 5}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 5}}, "logit_bias"),
        ({"logit_bias": {"253": "x"}}, "logit_bias"),
        ({"logit_bias": {"253": 1000}}, "logit_bias"),
        ({"stream": "false"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": 5}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more"),
        ({"model": 5}, "model"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"request_id": "x" * 257}, "request_id"),
        ({"frequency_penalty": "x"}, "frequency_penalty"),
        ({"presence_penalty": False}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids"),
        ({"bad_words": "x"}, "bad_words"),
        ({"bad_words": ["x", " "]}, "bad_words"),
        ({"user": 5}, "user"),
        ({"user": "x" * 513}, "user"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 513}, "cache_salt"),
        ({"cache_salt": 7}, "cache_salt"),
        ({"priority": 1.5}, "priority"),
        ({"priority": False}, "priority"),
        ({"priority": 2**31}, "priority"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"deadline_ms": 1.5}, "deadline_ms"),
        ({"deadline_ms": 2**31}, "deadline_ms"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": "5"}, "timeout"),
        ({"timeout": True}, "timeout"),
        ({"timeout": 10**9}, "timeout"),
        ({"timeout": 2, "deadline_ms": 2001}, "timeout"),
        ({"metadata": "x"}, "metadata"),
    ],
)
def test_wrong_values_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    for parse in (completion, chat):
        with pytest.raises(InvalidRequest) as caught:
            parse(**fields)
        assert caught.value.param == param
        assert param.rpartition(".")[2] in caught.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": [{"name": "f"}]},
        {"function_call": {"name": "f"}},
        {"best_of": 2},
        {"suffix": "end"},
        {"store": True},
        {"service_tier": "priority"},
        {"reasoning_effort": "low"},
        {"x_extra": None},
        {"x_extra": json.loads('{"a":' * 900 + "1" + "}" * 900)},
        {"max_token": 5},
    ],
)
def test_what_is_not_honoured_is_refused_by_name(fields: dict[str, Any]) -> None:
    for parse in (completion, chat):
        with pytest.raises(UnsupportedField) as caught:
            parse(**fields)
        assert caught.value.param == next(iter(fields))


def test_values_that_ask_for_nothing_change_nothing() -> None:
    nothing = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": False,
        "top_logprobs": None,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "auto",
        "best_of": 1,
        "suffix": None,
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "safety_identifier": "s",
        "priority": 0,
        "deadline_ms": None,
        "timeout": None,
        "cache_salt": None,
        "echo": False,
        "stream_options": None,
        "stop": None,
        "max_tokens": None,
        "temperature": None,
        "model": None,
    }
    assert completion(**nothing) == completion()
    assert chat(**nothing) == chat()


def test_everything_honoured_arrives() -> None:
    fields: dict[str, Any] = {
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 0,
        "n": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "allowed_token_ids": [3, 4],
        "bad_words": ["x", [5, 6]],
        "logprobs": 3,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    request = completion(
        **fields,
        logit_bias={"253": 100},
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        echo=True,
        request_id="my id",
        model="m",
        best_of=2,
    )
    assert request.params == SamplingParams(**fields, logit_bias={253: 100}, prompt_logprobs=3)
    assert (request.stream, request.include_usage, request.echo) == (True, True, True)
    assert (request.request_id, request.model) == ("my id", "m")


def test_logprobs_of_chats_and_of_completions() -> None:
    for fields, number in (
        ({}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": None}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ):
        assert chat(**fields).params.logprobs == number
    for value, number in ((None, None), (False, None), (0, 0), (5, 5)):
        assert completion(logprobs=value).params.logprobs == number
        echoed = completion(logprobs=value, echo=True)
        assert echoed.params.prompt_logprobs == number
        assert not echoed.shows_prompt_logprobs
    shown = completion(prompt_logprobs=2)
    assert (shown.params.logprobs, shown.params.prompt_logprobs, shown.shows_prompt_logprobs) == (None, 2, True)


@pytest.mark.parametrize(
    ("parse", "fields", "param"),
    [
        (chat, {"logprobs": 2}, "logprobs"),
        (chat, {"top_logprobs": 2}, "top_logprobs"),
        (chat, {"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (completion, {"logprobs": True}, "logprobs"),
        (completion, {"logprobs": 21}, "logprobs"),
        (completion, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (completion, {"prompt_logprobs": 1, "logprobs": 2, "echo": True}, "prompt_logprobs"),
    ],
)
def test_logprobs_that_are_refused(parse: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.param == param


def test_what_the_queue_looks_at() -> None:
    body = {"prompt": "x", "priority": -3, "user": "u", "cache_salt": "s"}
    for limit in ({"deadline_ms": 1500}, {"timeout": 1.5}, {"timeout": 1.5, "deadline_ms": 1500}):
        made = parse_completion(body | limit, {}, now=1000).scheduling
        assert made == Scheduling(priority=-3, deadline=2500, tenant="u", salt="s")
    assert completion().scheduling == Scheduling()


def test_lengths_that_are_left_out() -> None:
    assert completion().params.max_tokens == 16
    assert completion(max_tokens=None).params.max_tokens == 16
    assert chat().params.max_tokens is None
    assert chat(max_completion_tokens=5).params.max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).params.max_tokens == 5


def test_the_models_own_defaults_fill_what_is_left_out() -> None:
    defaults = {"temperature": 0.2, "top_p": 0.8, "repetition_penalty": 1.1}
    params = parse_completion({"prompt": "x", "top_p": 0.5, "temperature": None}, defaults).params
    assert (params.temperature, params.top_p, params.repetition_penalty) == (0.2, 0.5, 1.1)


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("x", ["x"]),
        ("", [""]),
        (["A", ""], ["A", ""]),
        ([1, 2], [[1, 2]]),
        ([[0], [0, 0]], [[0], [0, 0]]),
    ],
)
def test_prompt_forms(prompt: Any, parsed: list[Any]) -> None:
    assert completion(prompt=prompt).prompts == parsed


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        {"a": 1},
        [],
        [[]],
        [[1], []],
        ["a", [1]],
        ["a", 1],
        [1, "a"],
        [[1], "a"],
        [1, -1],
        [1, 2**40],
        [1, 1.5],
        [1, True],
        [None],
        [[["a"]]],
        ["x"] * 1025,
        [[1]] * 1025,
    ],
)
def test_prompts_that_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


def test_a_missing_prompt_is_named_and_a_batch_with_many_choices_is_bounded() -> None:
    with pytest.raises(InvalidRequest, match="prompt is missing"):
        parse_completion({}, {})
    with pytest.raises(InvalidRequest, match="over 1024 answers"):
        completion(prompt=["x"] * 100, n=20)


def prompt_of(request: GenerationRequest) -> ChatPrompt:
    (prompt,) = request.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_template_options() -> None:
    assert prompt_of(chat()) == ChatPrompt(messages=[USER])
    continued = prompt_of(chat(continue_final_message=True, chat_template_kwargs={"x": [1]}))
    assert (continued.add_generation_prompt, continued.continue_final_message) == (False, True)
    assert continued.template_kwargs == {"x": [1]}
    assert not prompt_of(chat(add_generation_prompt=False)).add_generation_prompt
    with pytest.raises(InvalidRequest, match="must be an object"):
        chat(chat_template_kwargs=[1])
    with pytest.raises(UnsupportedField):
        completion(add_generation_prompt=True)
    with pytest.raises(UnsupportedField):
        chat(echo=True)


@pytest.mark.parametrize("value", [json.loads("[" * 500 + "]" * 500), {"a": [2**64]}, -(2**63) - 1])
def test_template_values_that_cannot_cross_to_another_process_are_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(chat_template_kwargs={"x": value})
    assert caught.value.param == "chat_template_kwargs"
