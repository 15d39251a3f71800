"""Embeddings are made of transformers' final states, cached or not, in chunks or whole, beside other requests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.oracle import Oracle
from tests.support.tiny_models import make_embedding_model, make_tiny_llama
from tokenmill import LLM, SamplingParams
from tokenmill.errors import InvalidRequest

PROMPTS = [[5 + (7 * i + j * j) % 250 for j in range(length)] for i, length in enumerate((1, 2, 40, 300))]
OUTPUT = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(tiny) -> dict[str, torch.Tensor]:
    states = [Oracle(tiny).final_states(prompt) for prompt in PROMPTS]
    found = {"last": [its[-1] for its in states], "mean": [its.mean(0) for its in states]}
    return {name: torch.nn.functional.normalize(torch.stack(its)) for name, its in found.items()}


@pytest.mark.parametrize("loop", ["serial", "overlap"])
@pytest.mark.parametrize("chunk", [7, 4096])
def test_embeddings_are_those_of_the_oracle(tiny, expected, loop, chunk):
    with LLM(tiny, dtype="float32", loop=loop, prefill_budget=chunk, page_size=1, debug_checks=True) as llm:
        for _ in range(2):  # the second time all could come from the cache
            for pooling, truth in expected.items():
                vectors = torch.tensor(llm.embed(PROMPTS, pooling=pooling))
                torch.testing.assert_close(vectors, truth, atol=1e-5, rtol=0)
        assert not llm.scheduler.has_work


def test_other_requests_share_the_steps(tiny, expected):
    scored = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1)
    with LLM(tiny, dtype="float32", prefill_budget=64, prefix_cache=False) as llm:
        plain = llm.generate(PROMPTS, OUTPUT)
        alone = llm.generate(PROMPTS, scored)
        pooled = [SamplingParams(max_tokens=0, pooling=pooling) for pooling in ("mean", "last")]
        each = [params for _ in PROMPTS for params in (OUTPUT, pooled[0], scored, pooled[1])]
        outputs = llm.generate([prompt for prompt in PROMPTS for _ in range(4)], each)
        assert [its.choices[0].token_ids for its in outputs[::4]] == [its.choices[0].token_ids for its in plain]
        assert [its.prompt_logprobs[0] for its in outputs[2::4]] == [its.prompt_logprobs[0] for its in alone]
        for start, pooling in ((1, "mean"), (3, "last")):
            vectors = torch.stack(
                [torch.frombuffer(bytearray(its.embedding), dtype=torch.float32) for its in outputs[start::4]]
            )
            torch.testing.assert_close(vectors, expected[pooling], atol=1e-5, rtol=0)
            assert {its.usage.completion_tokens for its in outputs[start::4]} == {0}


def test_a_request_that_is_retracted_is_pooled_anew(tiny, expected):
    with LLM(tiny, dtype="float32", num_pages=24, page_size=16, prefill_budget=16, debug_checks=True) as llm:
        long = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
        mean = SamplingParams(max_tokens=0, pooling="mean")
        outputs = llm.generate([[9], *PROMPTS, *PROMPTS], [long, *[mean] * 8])
        vectors = [torch.frombuffer(bytearray(its.embedding), dtype=torch.float32) for its in outputs[1:]]
        torch.testing.assert_close(torch.stack(vectors), expected["mean"].repeat(2, 1), atol=1e-5, rtol=0)


def test_what_cannot_be_is_refused(tiny):
    with pytest.raises(InvalidRequest, match="last or mean"):
        SamplingParams(pooling="max")
    with LLM(tiny, dtype="float32") as llm, pytest.raises(InvalidRequest, match="prompt"):
        llm.embed([""])


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
def test_an_embedding_model_pools_as_its_files_say(tmp_path, mode):
    folder = make_tiny_llama(tmp_path, architecture="Qwen3ForCausalLM")
    states = [Oracle(folder).final_states(prompt) for prompt in PROMPTS]
    pooled = [its[-1] if mode == "lasttoken" else its.mean(0) for its in states]
    make_embedding_model(folder, mode)
    with LLM(folder, dtype="float32") as llm:
        expected = torch.nn.functional.normalize(torch.stack(pooled))
        torch.testing.assert_close(torch.tensor(llm.embed(PROMPTS)), expected, atol=1e-5, rtol=0)
        with pytest.raises(InvalidRequest, match="embeddings only"):
            llm.generate(PROMPTS[1], OUTPUT)
