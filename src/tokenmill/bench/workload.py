"""Seeded workloads: prompts of random token ids and how much to generate from each."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

OFFLINE256_IDS = 10000
OFFLINE256_LENGTHS = (100, 1024)


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a round."""

    token_ids: list[int]
    max_tokens: int


MakeJobs = Callable[[int, int, int], list[Job]]  # vocabulary size, seed, number of the round


@dataclass(frozen=True, slots=True)
class Shape:
    """A workload; at most `concurrency` of its requests are in the queue or running at a time."""

    jobs: MakeJobs
    concurrency: int
    temperature: float = 0.0


def make_jobs(
    vocab_size: int,
    seed: int,
    round_index: int,
    *,
    requests: int,
    prompt: tuple[int, int],
    output: tuple[int, int],
    prefix: int = 0,
) -> list[Job]:
    """Lengths in tokens, drawn uniformly from (least, most). They depend on the seed alone, contents also on the round.

    `prefix` tokens more are the same in all prompts of a round.
    """
    lengths = random.Random(f"{seed}/lengths")
    contents = random.Random(f"{seed}/{round_index}")
    sizes = [(lengths.randint(*prompt), lengths.randint(*output)) for _ in range(requests)]
    first = min(vocab_size // 2, 1000)
    shared = [contents.randrange(first, vocab_size) for _ in range(prefix)]
    return [Job(shared + [contents.randrange(first, vocab_size) for _ in range(own)], most) for own, most in sizes]


def offline256(vocab_size: int, seed: int, round_index: int) -> list[Job]:
    """The benchmark that nano-vllm publishes, and mini-sglang after it: their lengths and ids, with seed 0.

    Each round shifts the ids, so that no prompt begins like one of another round.
    """
    draw = random.Random(seed).randint
    prompts = [[draw(0, OFFLINE256_IDS) for _ in range(draw(*OFFLINE256_LENGTHS))] for _ in range(256)]
    outputs = [draw(*OFFLINE256_LENGTHS) for _ in prompts]
    size = min(OFFLINE256_IDS, vocab_size)
    return [
        Job([(token + 7 * round_index) % size for token in prompt], output)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _equal(requests: int, prompt: int, output: int) -> MakeJobs:
    return partial(make_jobs, requests=requests, prompt=(prompt, prompt), output=(output, output))


def _mixed(concurrency: int) -> Shape:
    return Shape(partial(make_jobs, requests=32, prompt=(32, 256), output=(32, 128)), concurrency)


SHAPES: dict[str, Shape] = {
    "single": Shape(_equal(1, 128, 128), 1),
    "mixed8": _mixed(8),
    "mixed32": _mixed(32),
    "prefix": Shape(partial(make_jobs, requests=16, prompt=(16, 16), output=(32, 32), prefix=512), 16),
    "batch1": Shape(_equal(1, 128, 512), 1),
    "batch8": Shape(_equal(8, 128, 512), 8, 0.6),
    "batch64": Shape(_equal(64, 128, 512), 64, 0.6),
    "prefill": Shape(_equal(1, 8192, 1), 1),
    "offline256": Shape(offline256, 256, 0.6),
}
