from __future__ import annotations

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from tests.text.vocabularies import TEXTS
from tokenmill.text.pre_tokenizers import find_rule, rules

ALPHABET = {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}


def words(rule: str, text: str) -> list[str]:
    """The pieces that a rule cuts a text into."""
    pieces = find_rule(rule).build().pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in pieces]


@pytest.mark.parametrize("rule", sorted(rules()))
def test_no_rule_loses_text(rule: str) -> None:
    for text in TEXTS:
        assert "".join(words(rule, text)) == text


@pytest.mark.parametrize(
    ("rule", "pieces"),
    [
        ("gpt-2", ["don", "'t", " I", "'", "M", " 12345", "  ", " x", "\n\n"]),
        ("smollm", ["don", "'t", " I", "'", "M", " ", "1", "2", "3", "4", "5", "  ", " x", "\n\n"]),
        ("llama-bpe", ["don", "'t", " I", "'M", " ", "123", "45", "  ", " x", "\n\n"]),
        ("qwen2", ["don", "'t", " I", "'M", " ", "1", "2", "3", "4", "5", "  ", " x", "\n\n"]),
        ("gpt-4o", ["don't", " I'M", " ", "123", "45", "  ", " x", "\n\n"]),
        ("tekken", ["don", "'t", " I", "'M", " ", "1", "2", "3", "4", "5", "  ", " x", "\n\n"]),
        ("deepseek-v3", ["don", "'t", " I", "'M", " ", "123", "45", "  ", " x", "\n\n"]),
        ("deepseek-llm", ["don", "'", "t", " I", "'", "M", " ", "12345", "  ", " x", "\n", "\n"]),
        ("default", ["don", "'", "t", " I", "'", "M", " ", "123", "45", "  ", " x", "\n\n"]),
    ],
)
def test_where_the_rules_differ(rule: str, pieces: list[str]) -> None:
    assert words(rule, "don't I'M 12345   x\n\n") == pieces


def test_bytes_become_letters_of_the_alphabet() -> None:
    for rule in rules():
        for piece, _ in find_rule(rule).build().pre_tokenize_str("é 世\n"):
            assert set(piece) <= set(ALPHABET)
