"""What must not change the answer: cache, chunks, loop, neighbours, retraction, page size. On the reference path."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_models import make_tiny_llama
from tokenmill import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PENALISED = SamplingParams(
    temperature=0, max_tokens=24, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.6
)
PROMPTS = [[5 + (7 * i + j * j) % 250 for j in range(length)] for i, length in enumerate((1, 5, 16, 33, 70, 150))]
PARAMS = [GREEDY, GREEDY, PENALISED, GREEDY, PENALISED, GREEDY]  # one for each prompt
NEIGHBOURS = [[9 + (11 * i + 3 * j) % 240 for j in range(4 + 9 * i)] for i in range(16)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def truth(tiny) -> list[list[int]]:
    """Each prompt alone, in one piece, without a cache."""
    options = {"prefix_cache": False, "loop": "serial", "prefill_budget": 4096, "page_size": 1, "max_running": 1}
    with LLM(tiny, dtype="float32", debug_checks=True, **options) as llm:
        alone = [llm.generate(*its)[0].choices[0].token_ids for its in zip(PROMPTS, PARAMS, strict=True)]
        assert llm.generate(PROMPTS[2], GREEDY)[0].choices[0].token_ids != alone[2]
        return alone


def ids(outputs) -> list[list[int]]:
    return [output.choices[0].token_ids for output in outputs]


@pytest.mark.parametrize("loop", ["serial", "overlap"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 4096])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_greedy_ids_are_always_the_same(tiny, truth, loop, chunk, prefix_cache):
    options = {"prefix_cache": prefix_cache, "loop": loop, "prefill_budget": chunk, "page_size": 16}
    with LLM(tiny, dtype="float32", debug_checks=True, **options) as llm:
        alone = [llm.generate(*its)[0] for its in zip(PROMPTS, PARAMS, strict=True)]
        assert ids(alone) == truth
        again = [llm.generate(*its)[0] for its in zip(PROMPTS, PARAMS, strict=True)]
        assert ids(again) == truth
        assert (again[-1].usage.cached_tokens > 100) is prefix_cache
        together = llm.generate([*PROMPTS, *NEIGHBOURS], [*PARAMS, *[GREEDY] * 16], progress=False)
        assert ids(together)[: len(PROMPTS)] == truth
        assert llm.scheduler.counters.retractions == 0


@pytest.mark.parametrize("loop", ["serial", "overlap"])
@pytest.mark.parametrize("policy", ["mixed", "prefill-first"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_retraction_changes_nothing(tiny, truth, loop, policy, page_size, prefix_cache):
    options = {"loop": loop, "batch_policy": policy, "page_size": page_size, "prefix_cache": prefix_cache}
    pool = {"num_pages": 512 // page_size, "reserve_ratio": 0.0, "prefill_budget": 64}
    with LLM(tiny, dtype="float32", debug_checks=True, **options, **pool) as llm:
        outputs = llm.generate([*PROMPTS, *NEIGHBOURS], [*PARAMS, *[GREEDY] * 16], progress=False)
        assert llm.scheduler.counters.retractions > 0
        assert ids(outputs)[: len(PROMPTS)] == truth
        assert llm.scheduler.cache.num_available == 512 // page_size


def test_a_seed_decides_the_draw_whatever_shares_the_batch(tiny):
    params = [SamplingParams(temperature=0.8, seed=seed, top_p=0.9, max_tokens=16) for seed in range(4)]
    with LLM(tiny, dtype="float32", loop="serial") as llm:
        alone = [llm.generate(PROMPTS[3], its)[0].choices[0].token_ids for its in params]
        noise = SamplingParams(temperature=1.5, max_tokens=30)
        together = llm.generate([PROMPTS[3]] * 4 + NEIGHBOURS, params + [noise] * 16, progress=False)
        assert ids(together)[:4] == alone
        assert len({tuple(its) for its in alone}) > 1
