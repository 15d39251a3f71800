"""LangChain's OpenAI chat model and embeddings against a real server with a random model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.support.server import Server

langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed: make clients")
core = pytest.importorskip("langchain_core.messages", reason="langchain-openai is not installed: make clients")

pytestmark = pytest.mark.server
LETTERS = {str(token): 100 for token in range(68, 94)}
AT_ONCE = {str(4 + ord("}") - ord("!")): 100}  # an object ends where it may
ASKED = "Add 2 and 3."


class Add(BaseModel):
    """Adds two digits."""

    model_config = ConfigDict(extra="forbid")
    a: int = Field(ge=0, le=9)
    b: int = Field(ge=0, le=9)


@pytest.fixture
def to_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What every client of LangChain's is made with."""
    for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2"):
        monkeypatch.setenv(name, "false")
    return {"model": "tiny", "base_url": f"{server.base}/v1", "api_key": "none", "max_retries": 0}


def chat(to_server: dict[str, Any], **fields: Any) -> Any:
    return langchain.ChatOpenAI(**to_server, **{"temperature": 0, "max_tokens": 200, **fields})


def test_invoke_and_stream_are_the_same(to_server: dict[str, Any]) -> None:
    model = chat(to_server, max_tokens=12, logit_bias=LETTERS, stream_usage=True)
    whole = model.invoke(ASKED)
    assert (len(whole.content), whole.response_metadata["finish_reason"]) == (12, "length")
    first, *chunks = model.stream(ASKED)
    assert len(chunks) > 2
    streamed = sum(chunks, first)
    assert streamed.content == whole.content
    assert streamed.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"]
    assert streamed.usage_metadata["output_tokens"] == 12


def test_choices_and_batches(to_server: dict[str, Any]) -> None:
    model = chat(to_server, n=2, temperature=1, seed=7, max_tokens=12, logit_bias=LETTERS)
    several = model.generate([[core.HumanMessage(ASKED)]])
    assert len({choice.text for choice in several.generations[0]}) == 2
    model = chat(to_server, max_tokens=12, logit_bias=LETTERS)
    assert [answer.content for answer in model.batch(["Once", "Twice"])] == [
        model.invoke(prompt).content for prompt in ("Once", "Twice")
    ]


def test_logprobs(to_server: dict[str, Any]) -> None:
    answer = chat(to_server, max_tokens=3, logit_bias=LETTERS, logprobs=True, top_logprobs=2).invoke(ASKED)
    content = answer.response_metadata["logprobs"]["content"]
    assert "".join(its["token"] for its in content) == answer.content
    for its in content:
        first, second = (top["logprob"] for top in its["top_logprobs"])
        assert second <= first <= 0 >= its["logprob"]


def test_a_loop_with_a_tool(to_server: dict[str, Any]) -> None:
    model = chat(to_server)
    forced = model.bind_tools([Add], tool_choice="Add", strict=True)
    called = forced.invoke(ASKED)
    (call,) = called.tool_calls
    added = Add(**call["args"])
    assert (called.content, called.response_metadata["finish_reason"]) == ("", "tool_calls")
    first, *chunks = forced.stream(ASKED)
    (streamed,) = sum(chunks, first).tool_calls
    assert (streamed["name"], streamed["args"]) == ("Add", call["args"])
    (one,) = model.bind_tools([Add], tool_choice="any", parallel_tool_calls=False).invoke(ASKED).tool_calls
    assert one["name"] == "Add"
    result = core.ToolMessage(str(added.a + added.b), tool_call_id=call["id"])
    answering = chat(to_server, max_tokens=8, logit_bias=LETTERS).bind_tools([Add])
    answer = answering.invoke([core.HumanMessage(ASKED), called, result])
    assert (len(answer.content), answer.tool_calls) == (8, [])


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(to_server: dict[str, Any], method: str) -> None:
    fields: dict[str, Any] = {"logit_bias": AT_ONCE} if method == "json_mode" else {}
    model = chat(to_server, temperature=2, seed=1, **fields).with_structured_output(
        Add, method=method, include_raw=True
    )
    answer = model.invoke(f"{ASKED} Answer in JSON.")
    if method == "json_mode":  # which promises an object and not its fields
        assert json.loads(answer["raw"].content) == {}
    else:
        assert isinstance(answer["parsed"], Add)


def test_responses(to_server: dict[str, Any]) -> None:
    model = chat(to_server, max_tokens=12, use_responses_api=True)
    whole = model.invoke(ASKED)
    first, *chunks = model.stream(ASKED)
    assert sum(chunks, first).text == whole.text != ""
    (call,) = chat(to_server, use_responses_api=True).bind_tools([Add], tool_choice="Add").invoke(ASKED).tool_calls
    assert isinstance(Add(**call["args"]), Add)


def test_embeddings(to_server: dict[str, Any]) -> None:
    embeddings = langchain.OpenAIEmbeddings(**to_server, check_embedding_ctx_length=False)
    one, two, again = embeddings.embed_documents(["one", "two", "one"])
    assert one == pytest.approx(again, abs=1e-5)
    assert one != pytest.approx(two, abs=1e-3)
    assert embeddings.embed_query("two") == pytest.approx(two, abs=1e-5)


def test_errors_are_the_clients_own_kinds(to_server: dict[str, Any]) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="no_such_field") as refused:
        chat(to_server, extra_body={"no_such_field": 1}).invoke(ASKED)
    assert refused.value.param == "no_such_field"
    with pytest.raises(openai.NotFoundError, match="nobody"):
        list(chat({**to_server, "model": "nobody"}).stream(ASKED))
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        chat(to_server).invoke("x" * 40_000)
