from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import numpy as np
import torch

from tokenmill.sampling.batch import Opening
from tokenmill.sampling.grammar import NO_ID, NOTHING_LEFT, GrammarTable, apply_masks
from tokenmill.types import SamplingParams, StructuredOutputs

VOCAB, SPARE = 40, 40
INF = float("inf")


def upload(numbers: array) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


class Held:
    """Numbers that are fetched when they are asked for."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def wait(self) -> list[int]:
        return self.ids.tolist()


class Counting:
    """A matcher: after k ids, id k % 7 and id 39 may come next; after `length`, the ends."""

    def __init__(self, length: int, ends: Sequence[int], fails_at: int = 99) -> None:
        self.length, self.ends, self.fails_at = length, ends, fails_at
        self.seen: list[int] = []

    def allowed(self) -> list[int]:
        more = [] if len(self.seen) >= self.length else [len(self.seen) % 7, 39]
        return more + ([*self.ends] if len(self.seen) >= self.length // 2 else [])

    def consume_tokens(self, sampled_tokens: list[int], /) -> bool:
        self.seen += sampled_tokens
        return True

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int, /) -> None:
        mask = bytearray(trg_byte_size)
        for token in self.allowed():
            mask[token >> 3] |= 1 << (token & 7)
        ctypes.memmove(trg_pointer, bytes(mask), trg_byte_size)

    def is_error(self) -> bool:
        return len(self.seen) >= self.fails_at

    def get_error(self) -> str:
        return "too many states\nand more"


class Source:
    """Makes `Counting` matchers; a pattern tells their arguments."""

    def __init__(self, end_ids: Sequence[int] = (3, 31)) -> None:
        self.end_ids = end_ids
        self.made: list[Counting] = []

    def make(self, wanted: StructuredOutputs, worn: object = None, /) -> tuple[Counting, object]:
        length, fails_at = map(int, (wanted.regex or "").split())
        self.made.append(Counting(length, self.end_ids, 99 if worn and fails_at else fails_at))
        return self.made[-1], self


def opening(slot: int, length: int, *, history: Sequence[int] = (), fails_at: int = 99, **options: object) -> Opening:
    wanted = StructuredOutputs(regex=f"{length} {fails_at}")
    params = SamplingParams(structured_outputs=wanted, **options)
    return Opening(slot, params, 2, (), array("i", [8, 9, *history]).tobytes())


def left(logits: torch.Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]


def test_masks_against_numpy() -> None:
    generator = np.random.default_rng(3)
    for vocab in (1, 7, 32, 40, 95, 97):
        words = -(-(vocab + 1) // 32)
        bits = generator.random((5, 32 * words)) < 0.3
        bits[2] = False
        masks = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").copy()).view(torch.int32)
        logits = torch.randn(8, vocab)
        places = torch.tensor([6, 0, 3, 5, 2])
        expected, dead = logits.clone(), torch.zeros(8, dtype=torch.bool)
        for row, place in enumerate(places.tolist()):
            keep = torch.from_numpy(bits[row, :vocab])
            expected[place] = torch.where(keep, logits[place], -INF) if keep.any() else 0.0
            dead[place] = not keep.any()
        assert apply_masks(logits, places, masks).equal(dead)
        assert logits.equal(expected)


def test_matchers_follow_the_ids_of_their_slots() -> None:
    source = Source()
    table = GrammarTable(VOCAB, upload, Held, source)
    table.open([Opening(1, SamplingParams(), 2, ()), opening(2, 8), opening(4, 8, history=[0, 39, 2])])
    assert table.has_any([1, 4])
    assert not table.has_any([0, 1, 3])
    logits = torch.zeros(3, VOCAB)
    assert not table.mask(logits, [4, 1, 2]).any()
    assert left(logits) == [[3, 39], list(range(40)), [0, 39]]
    table.advance(torch.tensor([39, 17, NO_ID]), [4, 1, 2])
    table.open([opening(2, 8)])  # another request: what the one before drew is not its own
    logits = torch.zeros(2, VOCAB)
    assert not table.mask(logits, [2, 4]).any()
    assert left(logits) == [[0, 39], [3, 4, 31, 39]]
    table.advance(torch.tensor([0, 31]), [2, 4])  # the last one ends
    for _ in range(2):
        logits = torch.zeros(2, VOCAB)
        assert not table.mask(logits, [4, 2]).any()
        assert left(logits)[0] == list(range(40))
        table.advance(torch.tensor([5, 39]), [4, 2])
    assert [matcher.seen for matcher in source.made] == [[], [0, 39, 2, 39, 31], [0, 39]]


def test_a_matcher_that_others_wore_out_is_made_anew() -> None:
    source = Source()
    table = GrammarTable(VOCAB, upload, Held, source)
    table.open([opening(0, 8, history=[5], fails_at=2)])
    for token, allowed in ((39, [1, 39]), (1, [2, 39]), (2, [3, 39])):
        logits = torch.zeros(1, VOCAB)
        assert not table.mask(logits, [0]).any()
        assert left(logits) == [allowed]
        table.advance(torch.tensor([token]), [0])
    assert [matcher.seen for matcher in source.made] == [[5, 39], [5, 39, 1]]


def test_ends_come_when_nothing_else_can_or_are_avoided() -> None:
    table = GrammarTable(VOCAB, upload, Held, Source())
    table.open([opening(0, 4, history=[1, 1]), opening(1, 4, history=[1, 1], ignore_eos=True)])
    table.open([opening(slot, 4, history=[1] * 4, ignore_eos=slot == 3) for slot in (2, 3)])
    logits = torch.zeros(4, VOCAB)
    assert not table.mask(logits, [0, 1, 2, 3]).any()
    assert left(logits) == [[2, 3, 31, 39], [2, 39], [3, 31], [3, 31]]


def test_rows_with_nothing_left_are_told_apart() -> None:
    table = GrammarTable(VOCAB, upload, Held, Source(end_ids=(SPARE,)))
    table.open([opening(0, 4, history=[1] * 4), opening(1, 4, fails_at=0), opening(2, 4), opening(3, 4)])
    logits = torch.zeros(4, VOCAB)
    logits[2] = -INF  # forbidden by what came before
    assert table.mask(logits, [0, 1, 2, 3]).tolist() == [True, True, True, False]
    assert logits[:3].equal(torch.zeros(3, VOCAB))
    verdicts = table.verdict(0), table.verdict(1), table.verdict(2)
    assert verdicts[0] is None
    assert verdicts[1] is not None
    assert verdicts[1].param == "structured_outputs"
    assert verdicts[1].message.endswith("followed further: too many states")
    assert str(verdicts[2]) == NOTHING_LEFT
    table.open([opening(0, 4)])
    assert str(table.verdict(0)) == NOTHING_LEFT
