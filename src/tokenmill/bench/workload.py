"""Seeded workloads: prompts of random token ids and how much to generate from each."""

from __future__ import annotations

import random
from dataclasses import dataclass

OFFLINE256_IDS = 10000
Lengths = tuple[int, int]  # tokens, least and most


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a round."""

    token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Shape:
    """A workload; at most `concurrency` of its requests are in the queue or running at a time.

    Lengths are drawn uniformly. `prefix` tokens more are the same in all prompts of a round.
    """

    requests: int
    prompt: Lengths
    output: Lengths
    concurrency: int
    temperature: float = 0.0
    prefix: int = 0

    def jobs(self, vocab_size: int, seed: int, round_index: int) -> list[Job]:
        """The requests of a round. Their lengths depend on the seed alone, their contents also on the round."""
        lengths, contents = random.Random(f"{seed}/lengths"), random.Random(f"{seed}/{round_index}")
        sizes = [(lengths.randint(*self.prompt), lengths.randint(*self.output)) for _ in range(self.requests)]
        first = min(vocab_size // 2, 1000)
        shared = [contents.randrange(first, vocab_size) for _ in range(self.prefix)]
        return [Job(shared + [contents.randrange(first, vocab_size) for _ in range(own)], most) for own, most in sizes]


class PublishedShape(Shape):
    """The benchmark that nano-vllm publishes, and mini-sglang after it: their lengths and ids, with seed 0.

    Each round shifts the ids, so that no prompt begins like one of another round.
    """

    def jobs(self, vocab_size: int, seed: int, round_index: int) -> list[Job]:
        """See `Shape.jobs`."""
        draw = random.Random(seed).randint
        prompts = [[draw(0, OFFLINE256_IDS) for _ in range(draw(*self.prompt))] for _ in range(self.requests)]
        size, shift = min(OFFLINE256_IDS, vocab_size), 7 * round_index
        return [Job([(token + shift) % size for token in prompt], draw(*self.output)) for prompt in prompts]


SHAPES: dict[str, Shape] = {
    "single": Shape(1, (128, 128), (128, 128), 1),
    "mixed8": Shape(32, (32, 256), (32, 128), 8),
    "mixed32": Shape(32, (32, 256), (32, 128), 32),
    "prefix": Shape(16, (16, 16), (32, 32), 16, prefix=512),
    "batch1": Shape(1, (128, 128), (512, 512), 1),
    "batch8": Shape(8, (128, 128), (512, 512), 8, temperature=0.6),
    "batch64": Shape(64, (128, 128), (512, 512), 64, temperature=0.6),
    "prefill": Shape(1, (8192, 8192), (1, 1), 1),
    "offline256": PublishedShape(256, (100, 1024), (100, 1024), 256, temperature=0.6),
}
