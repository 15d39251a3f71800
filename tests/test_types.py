"""Sampling parameters: each wrong value is refused by its name, each right one survives the wire."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import InvalidRequest
from tokenmill.types import (
    MAX_ALLOWED_IDS,
    MAX_BAD_IDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_IDS,
    MAX_STOP_STRINGS,
    SamplingParams,
    StructuredOutputs,
)

NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("prompt_logprobs", -1),
        ("max_tokens", 2**31),
        ("max_tokens", 1.0),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", None),
        ("temperature", -0.1),
        ("temperature", 100.5),
        ("temperature", NAN),
        ("temperature", "1"),
        ("top_k", -2),
        ("top_k", 2**31),
        ("top_p", 1.01),
        ("top_p", NAN),
        ("top_p", True),
        ("min_p", -0.01),
        ("presence_penalty", -2.1),
        ("frequency_penalty", NAN),
        ("repetition_penalty", 0),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("seed", 1.5),
        ("n", 0),
        ("n", 129),
        ("stop", None),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", b"a"),
        ("stop", ["x"] * (MAX_STOP_STRINGS + 1)),
        ("stop_token_ids", 5),
        ("stop_token_ids", None),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**31]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [1] * (MAX_STOP_IDS + 1)),
        ("logit_bias", None),
        ("logit_bias", [1]),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {5: 100.5}),
        ("logit_bias", {5: NAN}),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("bad_words", None),
        ("bad_words", [""]),
        ("bad_words", [[]]),
        ("bad_words", [[True]]),
        ("bad_words", [5]),
        ("bad_words", [[1] * (MAX_BAD_IDS + 1)]),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", "yes"),
        ("skip_special_tokens", None),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in caught.value.message


def test_ids_count_for_each_choice():
    allowed = list(range(MAX_ALLOWED_IDS))
    assert SamplingParams(allowed_token_ids=allowed, n=4).n == 4
    for options in ({"n": 5}, {"n": 4, "bad_words": [[5]]}):
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(allowed_token_ids=allowed, **options)
        assert caught.value.param == "n"


def test_min_tokens_may_reach_but_not_pass_max_tokens():
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(InvalidRequest, match="min_tokens"):
        SamplingParams(min_tokens=6, max_tokens=5)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=st.integers(-1, 2**31 - 1),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    n=st.integers(1, 128),
    stop=st.text(min_size=1) | st.lists(st.text(min_size=1), max_size=4),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=4),
    ignore_eos=st.booleans(),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=4),
)


@given(PARAMS)
def test_parameters_survive_the_wire(params):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@given(PARAMS)
def test_each_choice_has_a_seed_of_its_own_that_fits_int64(params):
    choices = [params.for_choice(index) for index in range(params.n)]
    seeds = [choice.seed for choice in choices]
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
    if params.seed is not None:
        assert len(set(seeds)) == params.n
        assert choices == [params.for_choice(index) for index in range(params.n)]
    assert all(choice.n == 1 and choice.stop == params.stop for choice in choices)


def test_one_stop_string_is_not_taken_apart():
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_greedy_is_a_low_temperature_or_one_candidate():
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=0.00009).is_greedy
    assert SamplingParams(top_k=1).is_greedy
    assert not SamplingParams(temperature=0.0001).is_greedy


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "exactly one"),
        ({"json_object": False}, "exactly one"),
        ({"regex": "a", "json": True}, "exactly one"),
        ({"json": 3}, "JSON schema"),
        ({"json": ["a"]}, "JSON schema"),
        ({"json_object": 1}, "true or false"),
        ({"regex": b"a"}, "string"),
        ({"grammar": ["a"]}, "string"),
        ({"choice": []}, "list of strings"),
        ({"choice": "ab"}, "list of strings"),
        ({"choice": ["a", 1]}, "list of strings"),
        ({"choice": ["a"] * 20_000}, "at most 16384"),
        ({"json": {}, "whitespace_pattern": 1}, "string"),
        ({"json": {}, "disable_any_whitespace": None}, "true or false"),
    ],
)
def test_what_an_output_cannot_be_asked_to_be(fields, words):
    with pytest.raises(InvalidRequest, match=words) as caught:
        StructuredOutputs(**fields, param="response_format")
    assert caught.value.param == "response_format"
    with pytest.raises(InvalidRequest, match="StructuredOutputs"):
        SamplingParams(structured_outputs=fields)


def test_what_an_output_must_be_travels_and_needs_the_tokens_so_far():
    params = SamplingParams(structured_outputs=StructuredOutputs(json={"type": "integer"}, strict=False))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert params.needs_history
    assert params.structured_outputs.size < 40
