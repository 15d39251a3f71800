"""Thoughts before what an output must be: masks in each state, budgets, tags in any tokens."""

from __future__ import annotations

from array import array

import pytest

from tokenmill.text.grammar import Matchers, Vocabulary
from tokenmill.types import StructuredOutputs, Thoughts

TEXTS = [bytes([value]) for value in range(256)] + [b"<t>", b"</t>", b"x</t>\n", b"<end>"]
START, END, WITH_MORE, STOP = 256, 257, 258, 259
VOCABULARY = Vocabulary(TEXTS, [START, END, STOP], [STOP])
SPELLED = list(b"</t>")


def make(thoughts: Thoughts, **wanted: str) -> tuple[Matchers, object]:
    matchers = Matchers(lambda: VOCABULARY)
    return matchers, matchers.make(StructuredOutputs(thoughts=thoughts, **wanted))[0]  # type: ignore[arg-type]


class Run:
    """A matcher, asked step by step."""

    def __init__(self, thoughts: Thoughts, **wanted: str) -> None:
        self.matchers, self.matcher = make(thoughts, **wanted)

    def allowed(self) -> set[int]:
        words = array("i", bytes(4 * 9))
        self.matcher.unsafe_compute_mask_ptr(words.buffer_info()[0], 4 * len(words))  # type: ignore[attr-defined]
        bits = memoryview(words).cast("B")
        return {token_id for token_id in range(len(TEXTS)) if bits[token_id >> 3] >> (token_id & 7) & 1}

    def go(self, *token_ids: int) -> set[int]:
        """What may come after these."""
        for token_id in token_ids:
            assert token_id in self.allowed()
            assert self.matcher.consume_tokens([token_id])  # type: ignore[attr-defined]
        return self.allowed()


ALL = set(range(len(TEXTS)))
A, B = ord("a"), ord("b")


def test_a_grammar_begins_after_thoughts() -> None:
    run = Run(Thoughts([START], [END]), regex="ab")
    assert run.allowed() == {A, START}
    assert run.go(START) == ALL - {STOP}
    assert run.go(B, B, 7) == ALL - {STOP}
    assert run.go(END) == {A}
    assert run.go(A) == {B}
    assert run.go(B) == {STOP}


def test_thoughts_may_be_left_out_or_be_open_already() -> None:
    left_out = Run(Thoughts([START], [END]), regex="ab")
    assert left_out.go(A) == {B}
    is_open = Run(Thoughts([], [END]), regex="ab")
    assert is_open.allowed() == ALL - {STOP}
    assert is_open.go(END) == {A}


@pytest.mark.parametrize("tag", [SPELLED, [WITH_MORE], [END]])
def test_an_end_tag_is_found_in_any_tokens(tag: list[int]) -> None:
    run = Run(Thoughts([], [END]), regex="ab")
    assert run.go(B, *tag) == {A}


def test_a_start_of_several_tokens_is_gone_through() -> None:
    run = Run(Thoughts(list(b"<t>"), SPELLED), regex="ab")
    assert run.allowed() == {A, ord("<")}
    assert run.go(ord("<")) == {ord("t")}
    assert run.go(ord("t")) == {ord(">")}
    assert run.go(ord(">")) == ALL - {STOP}


def test_a_budget_forces_the_end() -> None:
    run = Run(Thoughts([], SPELLED, 2))
    assert run.go(A) == ALL
    assert run.go(A) == {SPELLED[0]}
    assert run.go(*SPELLED[:3]) == {SPELLED[3]}
    assert run.go(SPELLED[3]) == ALL
    assert run.go(A, A, A, STOP) == ALL
    assert Run(Thoughts([START], [END], 0)).go(START) == {END}
    assert Run(Thoughts([], [END], 0)).allowed() == {END}
    half = Run(Thoughts([], SPELLED, 2))
    assert half.go(A, SPELLED[0]) == {SPELLED[1]}
    in_time = Run(Thoughts([], [END], 2), regex="ab")
    assert in_time.go(B, END) == {A}


def test_what_was_drawn_before_a_retraction_is_taken_in_at_once() -> None:
    drawn = [START, B, B, *SPELLED, A]
    _, matcher = make(Thoughts([START], SPELLED, 3), regex="ab")
    run = Run(Thoughts([START], SPELLED, 3), regex="ab")
    run.matcher = matcher
    assert matcher.consume_tokens(drawn)  # type: ignore[attr-defined]
    assert run.allowed() == {B}
    assert not matcher.is_error()  # type: ignore[attr-defined]
    assert not matcher.consume_tokens([A])  # type: ignore[attr-defined]
