"""The default model, served as the README says."""

from __future__ import annotations

import json
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.support.server import ROOT, Server, serving
from tokenmill import LLM, SamplingParams

pytestmark = [pytest.mark.server, pytest.mark.model]
QUESTION = "What is gravity?"
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def answering(default_model: Path) -> Iterator[Server]:
    with serving("smollm2-135m", "--dtype", "float32") as server:
        yield server
        assert server.end(signal.SIGTERM) == 0


def test_the_readmes_request_streams_a_sensible_answer(answering: Server) -> None:
    command = re.search(
        r"^curl -N http://127.0.0.1:8000(\S+) .*?'\{.*?\}'$", (ROOT / "README.md").read_text(), re.M | re.S
    )
    assert command is not None
    body = json.loads(shlex.split(command[0])[-1])
    with answering.stream(command[1], **body) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1])
    assert "physics" in text


def test_offline_and_server_give_the_same(answering: Server, default_model: Path) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    prompts = ["The sea is", "def fibonacci(n):", "1, 2, 3,", "東京は"]
    with LLM(default_model, dtype="float32") as llm:
        chat = llm.chat(messages, GREEDY)[0]
        outputs = llm.generate(prompts, GREEDY)
    with OpenAI(base_url=f"{answering.base}/v1", api_key="none") as client:
        answer = client.chat.completions.create(model="smollm2-135m", messages=messages, temperature=0, max_tokens=24)
        completion = client.completions.create(model="smollm2-135m", prompt=prompts, temperature=0, max_tokens=24)
    assert answer.choices[0].message.content == chat.text
    assert answer.choices[0].finish_reason == chat.choices[0].finish_reason
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    assert [choice.text for choice in completion.choices] == [output.text for output in outputs]
