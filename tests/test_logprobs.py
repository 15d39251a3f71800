"""Logprobs of prompts and outputs are transformers', cached or not, in chunks or whole, in either loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.models.oracle import Oracle
from tests.support.tiny_models import make_tiny_llama
from tokenmill import LLM, SamplingParams
from tokenmill.errors import InvalidRequest
from tokenmill.types import TokenLogprobs

PROMPTS = [[5 + (7 * i + j * j) % 250 for j in range(length)] for i, length in enumerate((1, 2, 40, 300))]
BOTH = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def oracle(tiny) -> Oracle:
    return Oracle(tiny)


def compare(entries: Sequence[TokenLogprobs], ids: Sequence[int], logits: torch.Tensor, top: int) -> None:
    """Each entry is of its id, and says what `logits` [entries, vocab] say."""
    assert [its.token.token_id for its in entries] == list(ids)
    truth = logits.log_softmax(-1)
    for its, row in zip(entries, truth, strict=True):
        own = row[its.token.token_id]
        assert its.token.logprob == pytest.approx(own.item(), abs=1e-3)
        assert its.token.rank == int((row > own).sum()) + 1
        values, likeliest = row.topk(top)
        assert [each.token_id for each in its.top] == likeliest.tolist()
        assert [each.logprob for each in its.top] == pytest.approx(values.tolist(), abs=1e-3)
        assert [each.rank for each in its.top] == list(range(1, top + 1))


@pytest.mark.parametrize("loop", ["serial", "overlap"])
@pytest.mark.parametrize("chunk", [7, 64, 4096])
def test_logprobs_are_those_of_the_oracle(tiny, oracle, loop, chunk):
    with LLM(tiny, dtype="float32", loop=loop, prefill_budget=chunk, page_size=1, debug_checks=True) as llm:
        for _ in range(2):  # the second time all could come from the cache
            for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, BOTH), strict=True):
                (choice,) = output.choices
                logits = oracle.logits([*prompt, *choice.token_ids])
                assert output.usage.cached_tokens == 0
                first, *rest = output.prompt_logprobs
                assert (first.token.token_id, first.token.logprob, first.top) == (prompt[0], None, [])
                compare(rest, prompt[1:], logits[: len(prompt) - 1], top=2)
                compare(choice.logprobs, choice.token_ids, logits[len(prompt) - 1 : -1], top=3)
        output = llm.generate(PROMPTS[3], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0))[0]
        assert output.usage.cached_tokens == 299
        assert output.prompt_logprobs is None
        (choice,) = output.choices
        logits = oracle.logits([*PROMPTS[3], *choice.token_ids])
        compare(choice.logprobs, choice.token_ids, logits[len(PROMPTS[3]) - 1 : -1], top=0)


def test_logprobs_are_the_models_whatever_changes_the_draw(tiny, oracle):
    params = SamplingParams(
        seed=3, temperature=2.0, top_k=50, max_tokens=12, ignore_eos=True, logprobs=2, logit_bias={77: 4.0},
        repetition_penalty=1.7, frequency_penalty=0.5, bad_words=[[9], [77, 77]], min_tokens=3,
    )  # fmt: skip
    with LLM(tiny, dtype="float32") as llm:
        (choice,) = llm.generate(PROMPTS[2], params)[0].choices
    logits = oracle.logits([*PROMPTS[2], *choice.token_ids])
    compare(choice.logprobs, choice.token_ids, logits[len(PROMPTS[2]) - 1 : -1], top=2)


def test_a_retraction_loses_and_repeats_nothing(tiny, oracle):
    options = {"page_size": 1, "num_pages": 400, "prefill_budget": 16, "reserve_ratio": 0.0, "debug_checks": True}
    prompts = [[5 + (11 * i + 3 * j * j) % 250 for j in range(20 + 5 * i)] for i in range(8)]
    params = SamplingParams(
        temperature=0, max_tokens=30, ignore_eos=True, logprobs=1, prompt_logprobs=1, presence_penalty=0.5
    )
    with LLM(tiny, dtype="float32", loop="overlap", **options) as llm:
        outputs = llm.generate(prompts, params, progress=False)
        assert llm.scheduler.counters.retractions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        (choice,) = output.choices
        logits = oracle.logits([*prompt, *choice.token_ids])
        assert len(output.prompt_logprobs) == len(prompt)
        compare(output.prompt_logprobs[1:], prompt[1:], logits[: len(prompt) - 1], top=1)
        compare(choice.logprobs, choice.token_ids, logits[len(prompt) - 1 : -1], top=1)


def test_a_prompt_is_scored_without_an_output(tiny, oracle):
    params = SamplingParams(max_tokens=0, prompt_logprobs=1, logprobs=2, min_tokens=0, stop_token_ids=[5])
    with LLM(tiny, dtype="float32") as llm:
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
            (choice,) = output.choices
            assert (choice.text, choice.token_ids, choice.finish_reason) == ("", [], "length")
            assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (len(prompt), 0)
            compare(output.prompt_logprobs[1:], prompt[1:], oracle.logits(prompt)[:-1], top=1)
        with pytest.raises(InvalidRequest) as caught:
            llm.generate(PROMPTS, SamplingParams(max_tokens=0))
        assert caught.value.param == "max_tokens"


def test_choices_share_the_prompt_and_have_logprobs_of_their_own(tiny, oracle):
    params = SamplingParams(seed=1, temperature=3.0, n=3, max_tokens=5, ignore_eos=True, logprobs=1)
    with LLM(tiny, dtype="float32", page_size=1) as llm:
        (output,) = llm.generate(PROMPTS[3], params)
        assert llm.scheduler.counters.cached_tokens == 2 * 299
    assert len({tuple(choice.token_ids) for choice in output.choices}) > 1
    for choice in output.choices:
        logits = oracle.logits([*PROMPTS[3], *choice.token_ids])
        compare(choice.logprobs, choice.token_ids, logits[len(PROMPTS[3]) - 1 : -1], top=1)
