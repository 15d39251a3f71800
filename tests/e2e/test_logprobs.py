"""Logprobs through the official client: whole, streamed, of echoed prompts, and vLLM's of prompts."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.e2e.test_openai_client import GREEDY, MESSAGES, client
from tokenmill.schema import check
from tokenmill.server.fields import CHAT_RESPONSE, COMPLETION_RESPONSE

pytestmark = pytest.mark.server
__all__ = ["client"]  # a fixture
PROMPT = "Once upon a time"


def test_chat_whole_and_streamed_have_the_same_logprobs(client: OpenAI) -> None:
    params = {**GREEDY, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(messages=MESSAGES, **params)
    check(whole.to_dict(), CHAT_RESPONSE.schema, "chat")
    (choice,) = whole.choices
    assert choice.logprobs is not None
    entries = choice.logprobs.content
    assert entries is not None
    assert "".join(entry.token for entry in entries) == choice.message.content
    assert [entry.bytes for entry in entries] == [list(entry.token.encode()) for entry in entries]
    for entry in entries:
        likeliest = [top.logprob for top in entry.top_logprobs]
        assert len(likeliest) == 3
        assert likeliest == sorted(likeliest, reverse=True)
        assert entry.logprob <= likeliest[0] <= 0
    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, **params))
    streamed = []
    for its in (chunk.choices[0] for chunk in chunks):
        content = its.logprobs.content if its.logprobs else None
        assert "".join(entry.token for entry in content or ()) == (its.delta.content or "")
        streamed += content or ()
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in entries], abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_is_scored_before_the_output(client: OpenAI, stream: bool) -> None:
    answer: Any = client.completions.create(prompt=PROMPT, echo=True, logprobs=2, stream=stream, n=2, **GREEDY)
    parts = list(answer) if stream else [answer]
    for index in (0, 1):
        texts, columns = [], {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for choice in (choice for part in parts for choice in part.choices if choice.index == index):
            texts.append(choice.text)
            for name, column in columns.items():
                column += getattr(choice.logprobs, name) if choice.logprobs else []
        text = "".join(texts)
        assert text.startswith(PROMPT)
        assert "".join(columns["tokens"]) == text
        assert columns["text_offset"] == list(range(len(PROMPT) + 24))
        assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
        places = zip(columns["tokens"], columns["token_logprobs"], columns["top_logprobs"], strict=True)
        for token, logprob, top in list(places)[1:]:
            assert top[token] == logprob
            assert len(top) in (2, 3)
    if not stream:
        check(answer.to_dict(), COMPLETION_RESPONSE.schema, "text")


def test_scores_without_output_and_of_cached_prompts_are_the_same(client: OpenAI) -> None:
    params = {**GREEDY, "max_tokens": 0}
    scored = client.completions.create(prompt=[PROMPT, "x"], echo=True, logprobs=0, **params)
    assert [choice.text for choice in scored.choices] == [PROMPT, "x"]
    assert {choice.finish_reason for choice in scored.choices} == {"length"}
    assert scored.usage is not None
    assert (scored.usage.prompt_tokens, scored.usage.completion_tokens) == (len(PROMPT) + 1, 0)
    again = client.completions.create(prompt=PROMPT, extra_body={"prompt_logprobs": 1}, **params)
    check(again.to_dict(), COMPLETION_RESPONSE.schema, "text")
    (choice,) = again.choices
    (first, *rest) = choice.model_dump()["prompt_logprobs"]
    assert (choice.text, choice.logprobs, first) == ("", None, None)
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None
    chosen = [next(iter(entry.values())) for entry in rest]
    assert [its["decoded_token"] for its in chosen] == list(PROMPT[1:])
    assert [its["logprob"] for its in chosen] == pytest.approx(logprobs.token_logprobs[1:], abs=1e-4)
    whole = client.chat.completions.create(messages=MESSAGES, extra_body={"prompt_logprobs": 0}, **GREEDY)
    check(whole.to_dict(), CHAT_RESPONSE.schema, "chat")
    assert whole.usage is not None
    assert len(whole.to_dict()["prompt_logprobs"]) == whole.usage.prompt_tokens  # type: ignore[arg-type]


def test_stop_strings_cut_the_logprobs(client: OpenAI) -> None:
    text = client.completions.create(prompt="Once", **GREEDY).choices[0].text
    stop = text[9:12]
    answer = client.completions.create(prompt="Once", stop=stop, logprobs=0, **GREEDY)
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or ()) == choice.text == text[: text.index(stop)]


def test_penalties_and_bad_words_act(client: OpenAI) -> None:
    plain = client.completions.create(prompt="aaaa", **GREEDY).choices[0].text
    penalised = {**GREEDY, "frequency_penalty": 2, "presence_penalty": 2}
    assert len(set(client.completions.create(prompt="aaaa", **penalised).choices[0].text)) > len(set(plain))
    word = plain[3:5]
    extra = {"bad_words": [word], "allowed_token_ids": [int(token) for token in GREEDY["logit_bias"]]}
    text = client.completions.create(prompt="aaaa", extra_body=extra, **GREEDY).choices[0].text
    assert word not in text
    assert text[:3] == plain[:3]
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(prompt="x", **{**GREEDY, "max_tokens": 0})
    assert refused.value.param == "max_tokens"
