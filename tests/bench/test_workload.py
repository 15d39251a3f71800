from __future__ import annotations

import random

import pytest

from tokenmill.bench.options import OfflineOptions
from tokenmill.bench.workload import SHAPES
from tokenmill.flags import parse

offline256 = SHAPES["offline256"].jobs

PUBLISHED_OUTPUT_TOKENS = 133_966


def published_workload() -> tuple[list[list[int]], list[int]]:
    """As nano-vllm's bench.py draws it."""
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    return prompts, [random.randint(100, 1024) for _ in range(256)]


def test_offline256_is_the_published_workload() -> None:
    prompts, outputs = published_workload()
    jobs = offline256(151936, 0, 0)
    assert [job.token_ids for job in jobs] == [[token % 10000 for token in prompt] for prompt in prompts]
    assert [job.max_tokens for job in jobs] == outputs
    assert sum(outputs) == PUBLISHED_OUTPUT_TOKENS


def test_offline256_shares_no_beginning_between_rounds_and_fits_small_vocabularies() -> None:
    first, second = offline256(151936, 0, 0), offline256(151936, 0, 1)
    assert [job.max_tokens for job in first] == [job.max_tokens for job in second]
    assert not {tuple(job.token_ids[:4]) for job in first} & {tuple(job.token_ids[:4]) for job in second}
    assert max(token for job in offline256(300, 0, 3) for token in job.token_ids) < 300


@pytest.mark.parametrize(
    ("name", "requests", "prompt", "output"),
    [
        ("single", 1, {128}, {128}),
        ("batch1", 1, {128}, {512}),
        ("batch8", 8, {128}, {512}),
        ("batch64", 64, {128}, {512}),
        ("prefill", 1, {8192}, {1}),
        ("prefix", 16, {528}, {32}),
    ],
)
def test_sizes_of_the_even_shapes(name: str, requests: int, prompt: set[int], output: set[int]) -> None:
    jobs = SHAPES[name].jobs(50000, 0, 0)
    assert len(jobs) == requests
    assert {len(job.token_ids) for job in jobs} == prompt
    assert {job.max_tokens for job in jobs} == output


@pytest.mark.parametrize("name", SHAPES)
def test_rounds_differ_in_contents_alone_and_the_seed_decides(name: str) -> None:
    make = SHAPES[name].jobs
    first, second = make(50000, 0, 0), make(50000, 0, 1)
    assert first == make(50000, 0, 0)
    assert [len(job.token_ids) for job in first] == [len(job.token_ids) for job in second]
    assert all(a.token_ids != b.token_ids for a, b in zip(first, second, strict=True))
    assert first != make(50000, 1, 0)
    assert all(0 <= token < 40 for job in make(40, 0, 0) for token in job.token_ids)


def test_the_help_names_every_shape(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(OfflineOptions, "bench offline", ["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"of: {', '.join(SHAPES)}" in shown.replace(" │ │ ", " ")
    assert set(OfflineOptions().shape) <= set(SHAPES)
