"""Outputs of a random model that grammars hold: they are what was asked for, and end; nothing beside them changes."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from tests.support.schemas import many
from tests.support.tiny_models import make_tiny_llama
from tokenmill import LLM, SamplingParams, StructuredOutputs
from tokenmill.errors import InvalidRequest
from tokenmill.text.grammar import LIMITS
from tokenmill.types import FinishReason

FORMATS = FormatChecker(["date", "email", "ipv4", "ipv6", "uuid"])
WARM = 4.0  # a temperature at which a random model's tokens are about equally likely


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position=2048)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(tiny, dtype="float32", debug_checks=True, debug_ranks=True, max_running=48, threads=1) as made:
        yield made


def held(seed: int = 0, max_tokens: int = 500, temperature: float = WARM, **options: Any) -> SamplingParams:
    names = set(StructuredOutputs.__struct_fields__)
    wanted = StructuredOutputs(**{name: value for name, value in options.items() if name in names})
    rest = {name: value for name, value in options.items() if name not in names}
    return SamplingParams(structured_outputs=wanted, seed=seed, max_tokens=max_tokens, temperature=temperature, **rest)


def spell(llm: LLM, letter: str) -> int:
    (token_id,) = llm.tokenizer.encode(letter)
    return token_id


def test_every_finished_document_is_one_of_its_schema(llm: LLM) -> None:
    schemas = list(many(200))
    params = [held(seed, 400, json=schema) for seed, schema in enumerate(schemas)]
    outputs = llm.generate([[5 + seed % 7] for seed in range(len(schemas))], params, progress=False)
    finished = Counter(output.choices[0].finish_reason for output in outputs)
    assert finished[FinishReason.STOP] >= 0.95 * len(schemas), finished
    for schema, output in zip(schemas, outputs, strict=True):
        if output.choices[0].finish_reason is FinishReason.STOP:
            check = Draft202012Validator(schema, format_checker=FORMATS)
            problems = [error.message for error in check.iter_errors(json.loads(output.text))]
            assert not problems, (schema, output.text, problems)
    assert len({output.text for output in outputs}) > 150


@pytest.mark.parametrize("pattern", ["[0-9]{3}-[0-9]{4}", "(foo|bar)+?baz", "é[😀-😂]{2}/", "a{0,3}|b", ""])
def test_a_text_is_what_the_pattern_says(llm: LLM, pattern: str) -> None:
    for seed in range(4):
        (choice,) = llm.generate("x", held(seed, regex=pattern))[0].choices
        assert re.fullmatch(pattern, choice.text)
        assert choice.finish_reason is FinishReason.STOP


def test_a_text_is_one_of_the_choices(llm: LLM) -> None:
    texts = ["red", "redder", 'a "quoted"\n\\ text', "größe", ""]
    outputs = llm.generate(["x"] * 40, [held(seed, choice=texts) for seed in range(40)], progress=False)
    drawn = {output.text for output in outputs}
    assert drawn <= set(texts)
    assert len(drawn) > 2


def test_a_text_follows_a_grammar(llm: LLM) -> None:
    grammar = 'start: sum\nsum: NUMBER ("+" NUMBER){1,3}\nNUMBER: /[1-9][0-9]?/ // small'
    for seed in range(4):
        text = llm.generate("x", held(seed, grammar=grammar))[0].text
        assert re.fullmatch(r"[1-9][0-9]?(\+[1-9][0-9]?){1,3}", text)


def test_space_between_the_parts_of_json(llm: LLM) -> None:
    schema = {"type": "array", "items": {"const": 1}, "minItems": 6, "maxItems": 6}
    texts = [llm.generate("x", held(3, json=schema, **options))[0].text for options in (
        {"disable_any_whitespace": True}, {"whitespace_pattern": "_"}, {}
    )]  # fmt: skip
    assert texts[0] == "[1,1,1,1,1,1]"
    assert re.fullmatch("[1,_]+|[\\[\\]1,_]+", texts[1])
    assert "_" in texts[1]
    assert json.loads(texts[2]) == [1] * 6
    assert texts[2] != texts[0]


def test_any_object(llm: LLM) -> None:
    for wanted in ({"json_object": True}, {"json": {"type": "object"}}, {"json": '{"type": "object"}'}):
        (choice,) = llm.generate("x", held(5, 600, **wanted))[0].choices
        assert choice.text.startswith("{")
        assert choice.finish_reason is FinishReason.LENGTH or isinstance(json.loads(choice.text), dict)


def test_a_document_ends_by_itself(llm: LLM) -> None:
    for options in ({}, {"ignore_eos": True}, {"min_tokens": 40}, {"min_tokens": 40, "bad_words": [[2]]}):
        (choice,) = llm.generate("x", held(regex="abc", **options))[0].choices
        assert (choice.text, choice.finish_reason) == ("abc", FinishReason.STOP)
        assert len(choice.token_ids) == 4  # and the end


def test_ends_that_are_put_off_come_when_they_must(llm: LLM) -> None:
    ended = [llm.generate("x", held(seed, regex="a{2,30}"))[0] for seed in range(8)]
    assert min(output.usage.completion_tokens for output in ended) < 31
    for options in ({"ignore_eos": True}, {"min_tokens": 31}):
        output = llm.generate("x", held(regex="a{2,30}", **options))[0]
        assert output.text == "a" * 30
    assert (
        llm.generate("x", held(regex="a{2,30}", max_tokens=9, ignore_eos=True))[0].choices[0].finish_reason == "length"
    )


def test_it_goes_with_what_else_bends_the_draw(llm: LLM) -> None:
    output = llm.generate("x", held(choice=["left", "right"], n=6, logprobs=3, logit_bias={spell(llm, "l"): 100.0}))[0]
    assert [choice.text for choice in output.choices] == ["left"] * 6
    assert all(choice.logprobs is not None and len(choice.logprobs) == 4 for choice in output.choices)
    for choice in output.choices:
        assert all(-100 < entry.token.logprob <= 0 for entry in choice.logprobs)
    stopped = llm.generate("x", held(json={"const": "alpha beta"}, stop="ta"))[0].choices[0]
    assert (stopped.text, stopped.stop_reason) == ('"alpha be', "ta")
    spread = llm.generate("x", held(regex="[ab]{12}", temperature=0, frequency_penalty=2.0, presence_penalty=2.0))[0]
    assert 4 <= spread.text.count("a") <= 8


def test_a_request_for_which_nothing_is_left_ends_alone(llm: LLM) -> None:
    params = held(regex="ab+", allowed_token_ids=[spell(llm, "a"), 2])
    with pytest.raises(InvalidRequest, match="leave no token") as caught:
        llm.generate("x", params)
    assert caught.value.param == "structured_outputs"
    beside = [held(seed, regex="[a-z]{30}") for seed in range(6)]
    alone = [llm.generate("y", its)[0].text for its in beside]
    stream = llm.stream("x", params)
    while not next(stream).text:
        pass
    assert [output.text for output in llm.generate(["y"] * 6, beside, progress=False)] == alone
    with pytest.raises(InvalidRequest, match="leave no token"):
        list(stream)
    assert not llm.scheduler.has_work


def test_a_grammar_that_becomes_too_much_ends_alone(llm: LLM) -> None:
    grammar = "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(40)) + 'a40: "x" | ""'
    output = None
    try:
        output = llm.generate("x", held(grammar=grammar, ignore_eos=True, max_tokens=200))
    except InvalidRequest as error:
        assert "cannot be followed further" in error.message or "items" in error.message  # noqa: PT017
    assert output is None
    assert llm.generate("x", held(regex="abc"))[0].text == "abc"


def test_requests_do_not_wear_out_what_they_share(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    make = llm._matchers.make

    def counted(wanted: StructuredOutputs, worn: object = None, /) -> Any:
        made.append(worn)
        return make(wanted, worn)

    def texts(pattern: str) -> list[str]:
        params = [held(seed, 90, regex=pattern, ignore_eos=True) for seed in range(6)]
        return [output.text for output in llm.generate(["x"] * 6, params, progress=False)]

    monkeypatch.setattr(llm._matchers, "make", counted)
    before = texts("([ab]*a[ab]{14}c)*")
    assert made == [None] * 6
    monkeypatch.setitem(LIMITS, "max_lexer_states", 500)
    assert texts("(?:[ab]*a[ab]{14}c)*") == before  # the same, and not compiled yet
    assert 0 < sum(worn is not None for worn in made) < 60, made


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_steps_in_flight_do_not_follow_what_has_ended(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, ignore_eos: bool
) -> None:
    made: list[object] = []
    make = llm._matchers.make
    monkeypatch.setattr(llm._matchers, "make", lambda *its: made.append(its[1:]) or make(*its))
    for _ in range(3):
        assert llm.generate("x", held(regex="abc", ignore_eos=ignore_eos))[0].text == "abc"
    llm.generate("x", SamplingParams(max_tokens=1))  # all steps before this one's have ended
    assert made == [()] * 3


def test_bad_grammars_are_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="Invalid type"):
        llm.generate(["x", "y"], [held(regex="a"), held(json={"type": "strang"})])
    assert not llm.scheduler.has_work


PARAMS = [
    held(1, json={"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 9, "maxItems": 12}),
    held(2, regex="([a-z]{1,8} ){14,30}", frequency_penalty=0.4, repetition_penalty=1.2),
    SamplingParams(seed=3, temperature=WARM, max_tokens=90, ignore_eos=True),
    held(4, temperature=0, json={"type": "object", "properties": {f"p{i}": {"type": "number"} for i in range(9)}}),
    held(5, choice=["x" * 80, "x" * 90]),
]
PROMPTS = [[9 + (7 * i + j) % 200 for j in range(5 + 9 * i)] for i in range(len(PARAMS))]
NEIGHBOURS = [SamplingParams(seed=seed, temperature=WARM, max_tokens=60) for seed in range(12)]


@pytest.fixture(scope="module")
def truth(tiny: Path) -> list[list[int]]:
    """Each alone, in one piece, one step after the other."""
    with LLM(tiny, dtype="float32", threads=1, loop="serial", prefix_cache=False, prefill_budget=4096) as llm:
        return [llm.generate(*its)[0].choices[0].token_ids for its in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize("loop", ["serial", "overlap"])
@pytest.mark.parametrize("policy", ["mixed", "prefill-first"])
@pytest.mark.parametrize("num_pages", [1024, 40])
def test_neighbours_overlap_and_retraction_change_nothing(
    tiny: Path, truth: list[list[int]], loop: str, policy: str, num_pages: int
) -> None:
    options = {"loop": loop, "batch_policy": policy, "num_pages": num_pages, "page_size": 16, "reserve_ratio": 0.0}
    with LLM(
        tiny, dtype="float32", debug_checks=True, threads=1, prefill_budget=32, max_model_len=600, **options
    ) as llm:
        outputs = llm.generate([*PROMPTS, *([[7, 8, 9]] * 12)], [*PARAMS, *NEIGHBOURS], progress=False)
        assert [output.choices[0].token_ids for output in outputs[: len(PARAMS)]] == truth
        assert (llm.scheduler.counters.retractions > 0) is (num_pages == 40)
