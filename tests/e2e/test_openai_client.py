"""The official OpenAI client against a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.support.server import Server, settled

pytestmark = pytest.mark.server
LETTERS = {str(token): 100 for token in range(68, 94)}  # a to z: a random model then writes words
MESSAGES: Any = [{"role": "user", "content": "Tell me a tale."}]
GREEDY: Any = {"model": "tiny", "temperature": 0, "max_tokens": 24, "logit_bias": LETTERS}


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat_whole_and_streamed_are_the_same(client: OpenAI) -> None:
    whole = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    (choice,) = whole.choices
    assert (choice.message.role, choice.finish_reason, choice.index) == ("assistant", "length", 0)
    assert whole.usage is not None
    assert (whole.usage.completion_tokens, whole.usage.total_tokens) == (24, whole.usage.prompt_tokens + 24)
    stream = client.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]
    assert {chunk.usage for chunk in chunks} == {None}
    assert (last.choices, len({chunk.id for chunk in (*chunks, last)})) == ([], 1)
    assert last.usage is not None
    assert last.usage.total_tokens == whole.usage.total_tokens
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens > 0


def test_completions_whole_and_streamed_are_the_same(client: OpenAI) -> None:
    whole = client.completions.create(prompt="Once", **GREEDY)
    assert re.fullmatch("[a-z]{24}", whole.choices[0].text)
    chunks = list(client.completions.create(prompt="Once", stream=True, **GREEDY))
    assert len(chunks) > 2
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_choices_of_a_seed_differ_and_repeat(client: OpenAI) -> None:
    params: Any = {**GREEDY, "temperature": 1, "seed": 7, "n": 2}
    answers = [client.chat.completions.create(messages=MESSAGES, **params) for _ in range(2)]
    texts = [[choice.message.content for choice in answer.choices] for answer in answers]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]
    usage = answers[0].usage
    assert usage is not None
    assert (usage.completion_tokens, usage.total_tokens - usage.prompt_tokens) == (48, 48)
    streamed = {0: "", 1: ""}
    for chunk in client.chat.completions.create(messages=MESSAGES, stream=True, **params):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(streamed.values()) == texts[0]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client: OpenAI, stream: bool) -> None:
    text = client.completions.create(prompt="Once", **GREEDY).choices[0].text
    stop = text[9:12]
    answer = client.completions.create(prompt="Once", stop=["#", stop], stream=stream, **GREEDY)
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
    assert (choices[-1].finish_reason, choices[-1].model_extra) == ("stop", {"stop_reason": stop})


def test_batches_and_echo(client: OpenAI) -> None:
    prompts = ["Once", "Twice", "Thrice"]
    alone = [client.completions.create(prompt=prompt, **GREEDY).choices[0].text for prompt in prompts]
    together = client.completions.create(prompt=prompts, **GREEDY)
    assert [choice.text for choice in together.choices] == alone
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert together.usage is not None
    assert together.usage.prompt_tokens == sum(map(len, prompts))
    echoed = client.completions.create(prompt=prompts, echo=True, **GREEDY)
    assert [choice.text for choice in echoed.choices] == [p + text for p, text in zip(prompts, alone, strict=True)]
    ids = [[4 + ord(letter) - ord("!") for letter in prompt] for prompt in prompts]
    assert [choice.text for choice in client.completions.create(prompt=ids, **GREEDY).choices] == alone


def test_errors_are_the_clients_own_kinds(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no_such_field") as refused:
        client.chat.completions.create(messages=MESSAGES, extra_body={"no_such_field": 1}, **GREEDY)
    assert refused.value.param == "no_such_field"
    with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
        client.completions.create(prompt="x" * 40_000, stream=True, **GREEDY)
    assert refused.value.param == "prompt"
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.chat.completions.create(messages=MESSAGES, **{**GREEDY, "model": "nobody"})
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(input="x")


def test_leaving_a_stream_frees_it(client: OpenAI, server: Server) -> None:
    params = {**GREEDY, "max_tokens": 30_000}
    with client.chat.completions.create(messages=MESSAGES, stream=True, **params) as stream:
        next(stream)
        assert server.pulse()["running"] == 1
    assert settled(server.pulse, lambda pulse: not pulse["running"])["running"] == 0


def test_models_and_version(client: OpenAI, server: Server) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "tokenmill")
    assert client.models.retrieve("tiny") == model
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", server.get("/version").json()["version"])


def test_health_tells_that_the_scheduler_moves(server: Server) -> None:
    before = server.pulse()
    server.complete("Once", max_tokens=5, ignore_eos=True)
    after = server.pulse()
    assert after["steps"] >= before["steps"] + 5
    assert after["generated_tokens"] == before["generated_tokens"] + 5
    assert after["serial"] == before["serial"] + 1
    assert (after["running"], after["waiting"]) == (0, 0)


def test_the_bytes_of_a_stream(server: Server) -> None:
    body = {**GREEDY, "messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
    response = httpx.post(f"{server.base}/v1/chat/completions", json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    *events, done, rest = response.content.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert all(re.fullmatch(rb"data: \{[^\n\r]+\}", event) for event in events)
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1] == "length"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 24)


def test_three_tokenizers_answer_as_one(server: Server) -> None:
    assert {name for name in server.children if name.startswith("tm-")} == {
        "tm-scheduler-0",
        "tm-detokenizer",
        "tm-tokenizer-0",
        "tm-tokenizer-1",
        "tm-tokenizer-2",
    }
    prompts = [f"Number {number}" for number in range(30)]
    alone = [server.complete(prompt, **GREEDY)["choices"][0]["text"] for prompt in prompts]
    together = server.complete(prompts, **GREEDY)
    assert [choice["text"] for choice in together["choices"]] == alone


def test_embeddings(client: OpenAI) -> None:
    answer = client.embeddings.create(model="tiny", input=["one", "two", "one"])  # the client asks for base64
    assert [its.index for its in answer.data] == [0, 1, 2]
    one, two, again = (its.embedding for its in answer.data)
    assert one == pytest.approx(again, abs=1e-5)
    assert one != pytest.approx(two, abs=1e-3)
    assert sum(number * number for number in one) == pytest.approx(1, abs=1e-5)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (9, 9)
    (short,) = client.embeddings.create(model="tiny", input="one", dimensions=8, encoding_format="float").data
    assert len(short.embedding) == 8
    assert short.embedding[0] / short.embedding[1] == pytest.approx(one[0] / one[1], rel=1e-4)
    assert sum(number * number for number in short.embedding) == pytest.approx(1, abs=1e-5)
    with pytest.raises(openai.BadRequestError, match="at most") as caught:
        client.embeddings.create(model="tiny", input="one", dimensions=1_000_000)
    assert caught.value.param == "dimensions"
    for wrong in ({"input": []}, {"input": [[]]}, {"input": ""}, {"input": "x", "encoding_format": "int8"}):
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(**{"model": "tiny", **wrong})
