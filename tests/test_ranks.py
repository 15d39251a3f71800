"""Several ranks in one LLM: the same answers, and a rank that is lost is named."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.families import make_family
from tests.support.tiny_models import make_tiny_llama
from tests.test_parity import TEXTS
from tokenmill import LLM, SamplingParams
from tokenmill.config import EngineConfig
from tokenmill.errors import ConfigError, RankLost, StartFailed, TokenmillError
from tokenmill.hub import resolve_model
from tokenmill.parallel.group import Group
from tokenmill.parallel.place import meeting_place, ranks_here
from tokenmill.types import StructuredOutputs
from tokenmill.worker import followers
from tokenmill.worker.ranks import join_group

pytestmark = pytest.mark.server
PROMPTS = [[5 + index, 6, 7, 8] * (1 + 3 * index) for index in range(6)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


def make_model(folder: Path, name: str) -> Path:
    """A tiny model of a family that four ranks can share, with a tokenizer."""
    if name == "llama":
        return make_tiny_llama(folder, num_heads=8, num_kv_heads=2)
    source = make_tiny_llama(folder / "tokenizer")
    shutil.copy(source / "tokenizer.json", make_family(folder, name) / "tokenizer.json")
    return folder


def open_llm(folder: Path, size: int, **options: Any) -> LLM:
    fixed = {"dtype": "float32", "threads": 1, "num_pages": 256, "debug_checks": True, "debug_ranks": True}
    return LLM(folder, tensor_parallel_size=size, **{**fixed, **options})


def ids_of(llm: LLM, prompts: list[Any] = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.choices[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3"])
def test_any_number_of_ranks_gives_the_same_tokens(tmp_path: Path, name: str) -> None:
    folder = make_model(tmp_path, name)
    found = []
    for size in (1, 2, 4):
        with open_llm(folder, size, prefill_budget=16) as llm:
            found.append(ids_of(llm))
    assert found[1] == found[0]
    assert found[2] == found[0]


@pytest.mark.slow
@pytest.mark.model
def test_three_ranks_of_the_default_model_give_its_tokens() -> None:
    folder = resolve_model("smollm2-135m")
    found = []
    for size in (1, 3):
        with open_llm(folder, size) as llm:
            found.append(ids_of(llm, TEXTS))
    assert found[1] == found[0]
    assert len({tuple(ids) for ids in found[0]}) > 8


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with open_llm(make_tiny_llama(tmp_path_factory.mktemp("tiny")), 2, num_pages=40, max_running=5) as llm:
        yield llm


def test_random_arrivals_and_aborts_are_planned_alike(pair: LLM) -> None:
    draw = random.Random(0)
    open_streams: list[Any] = []
    for turn in range(400):
        if draw.random() < 0.3 and len(open_streams) < 12:
            prompt = [draw.randrange(4, 250)] * draw.randrange(1, 90)
            params = SamplingParams(
                temperature=draw.choice([0.0, 1.0]), seed=turn, max_tokens=draw.randrange(1, 60), ignore_eos=True
            )
            open_streams.append(pair.stream(prompt, params))
        if open_streams:
            stream = draw.choice(open_streams)
            if draw.random() < 0.1 or next(stream, None) is None:
                stream.close()
                open_streams.remove(stream)
    for stream in open_streams:
        stream.close()
    assert not pair.scheduler.has_work
    assert pair.scheduler.counters.steps > 100


def test_numbers_of_another_type_are_the_same_on_all_ranks(pair: LLM) -> None:
    whole = SamplingParams(temperature=0, top_p=1, max_tokens=4, ignore_eos=True)
    assert ids_of(pair, [[9, 9]], whole) == ids_of(
        pair, [[9, 9]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    )


def test_all_that_a_request_may_ask_for_is_the_same(pair: LLM, tmp_path: Path) -> None:
    wishes = [
        SamplingParams(temperature=0, max_tokens=9, structured_outputs=StructuredOutputs(choice=["yes", "no way"])),
        SamplingParams(temperature=1, seed=3, max_tokens=9, logit_bias={70: 5.5}, frequency_penalty=1, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, logprobs=1, ignore_eos=True),
        SamplingParams(temperature=1, seed=4, top_k=5, top_p=0.9, max_tokens=9, ignore_eos=True),
    ]
    prompts = [[at + 9] * (20 + at) for at in range(len(wishes))]
    with open_llm(make_tiny_llama(tmp_path), 1) as one:
        for found, expected in zip(pair.generate(prompts, wishes), one.generate(prompts, wishes), strict=True):
            assert found.choices[0].token_ids == expected.choices[0].token_ids
            assert found.text == expected.text
            assert str(found.prompt_logprobs)[:40] == str(expected.prompt_logprobs)[:40]
        assert pair.embed([[5, 6, 7]], pooling="mean")[0] == pytest.approx(
            one.embed([[5, 6, 7]], pooling="mean")[0], abs=1e-5
        )


def test_seeded_draws_are_those_of_one_rank(pair: LLM, tmp_path: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=10, ignore_eos=True, logprobs=2)
    with open_llm(make_tiny_llama(tmp_path), 1) as one:
        assert ids_of(pair, PROMPTS, params) == ids_of(one, PROMPTS, params)


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGKILL, "the scheduler-1 process has ended: killed by SIGKILL"), (signal.SIGSTOP, "rank 1 has given no")],
)
def test_a_lost_rank_is_named(tmp_path: Path, number: int, words: str) -> None:
    with open_llm(make_tiny_llama(tmp_path), 2, rank_timeout=3.0) as llm:
        stream = llm.stream([5, 6, 7], ENDLESS)
        next(stream)
        os.kill(llm._followers._pids[0], number)
        with pytest.raises(RankLost, match=words):
            list(stream)
        with pytest.raises(TokenmillError, match="closed"):
            llm.generate("hello", GREEDY)


def test_a_rank_that_dies_while_it_loads_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(multiprocessing.active_children())

    def join_and_kill(*arguments: Any) -> Group:
        group = join_group(*arguments)
        (child,) = set(multiprocessing.active_children()) - before
        child.kill()
        child.join()
        return group

    monkeypatch.setattr(followers, "join_group", join_and_kill)
    with pytest.raises(StartFailed, match="scheduler-1 could not start: killed by SIGKILL"):
        open_llm(make_tiny_llama(tmp_path), 2)


def test_sizes_that_cannot_be_are_refused_with_those_that_can(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, num_heads=9, num_kv_heads=3, head_dim=8)
    with pytest.raises(ConfigError, match=r"9 attention heads cannot be split over 2 ranks: .*, --tp can be 1, 3, 9$"):
        open_llm(folder, 2)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"tp": 0}, "--tp must be"),
        ({"tp": 3, "nnodes": 2, "rendezvous": "a:1"}, "spread evenly over --nnodes 2"),
        ({"tp": 2, "nnodes": 2}, "need one another"),
        ({"rendezvous": "a:1"}, "need one another"),
        ({"tp": 2, "nnodes": 2, "rendezvous": "nothing"}, "HOST:PORT, not 'nothing'"),
        ({"tp": 2, "nnodes": 2, "rendezvous": "a:1", "node_rank": 2}, "--node-rank must be"),
        ({"rank_timeout": 0}, "--rank-timeout must be"),
    ],
)
def test_places_that_cannot_be_are_refused(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _ = meeting_place(EngineConfig(**flags))


def test_hosts_share_the_ranks() -> None:
    config = EngineConfig(tp=4, nnodes=2, node_rank=1, rendezvous="[::1]:29500")
    assert list(ranks_here(config)) == [2, 3]
    assert meeting_place(config) == ("::1", 29500)
