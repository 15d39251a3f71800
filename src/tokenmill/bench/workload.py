"""Seeded workloads: prompts of random token ids and how much to generate from each."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths in tokens, drawn uniformly from (least, most). `prefix` tokens are the same in all prompts of a round."""

    requests: int
    concurrency: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    prefix: int = 0


SHAPES: dict[str, Shape] = {
    "single": Shape(1, 1, (128, 128), (128, 128)),
    "batch8": Shape(32, 8, (32, 256), (32, 128)),
    "batch32": Shape(32, 32, (32, 256), (32, 128)),
    "prefix": Shape(16, 16, (16, 16), (32, 32), prefix=512),
}


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a round."""

    token_ids: list[int]
    max_tokens: int


def make_jobs(shape: Shape, vocab_size: int, seed: int, round_index: int) -> list[Job]:
    """The requests of one round. Lengths depend on the seed alone, contents also on the round."""
    lengths = random.Random(f"{seed}/lengths")
    contents = random.Random(f"{seed}/{round_index}")
    sizes = [(lengths.randint(*shape.prompt), lengths.randint(*shape.output)) for _ in range(shape.requests)]
    first = min(vocab_size // 2, 1000)
    shared = [contents.randrange(first, vocab_size) for _ in range(shape.prefix)]
    return [Job(shared + [contents.randrange(first, vocab_size) for _ in range(own)], output) for own, output in sizes]
