from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from tests.text.vocabularies import TEXTS
from tokenmill.text.tokenizer import Tokenizer


def transformers_tokenizer(path: Path) -> Any:
    """transformers' reading of the file, with the digit rule of the model's own tokenizer.json, which it leaves out."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), words])
    return tokenizer


@pytest.mark.model
def test_default_model_matches_transformers(default_model: Path, default_tokenizer: Tokenizer) -> None:
    oracle = transformers_tokenizer(default_model)
    source = random.Random(0)
    letters = "ab cdE\n\t.,-'09é世😀\u200d\u2028\r"
    texts = [*TEXTS, *("".join(source.choices(letters, k=60)) for _ in range(200))]
    texts += ["<|im_start|>user\nHi<|im_end|>\n", "x<|im_end|> y", "\u00a0 \u3000x"]
    for text in texts:
        ids = default_tokenizer.encode(text)
        assert ids == oracle(text).input_ids, text
        assert default_tokenizer.decode(ids, skip_special_tokens=False) == oracle.decode(ids), text
        assert default_tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True), text
    for _ in range(300):
        ids = source.choices(range(default_tokenizer.vocab_size), k=12)
        assert default_tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


@pytest.mark.model
def test_facts_of_the_default_model(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.vocab_size == 49152
    assert default_tokenizer.end_ids == (2,)
    assert default_tokenizer.special_ids == frozenset(range(17))
    assert default_tokenizer.encode("Hello world") == [19556, 905]
    assert default_tokenizer.decode([10813, 242, 218]) == "\U0001f600"
    assert default_tokenizer.encode("\x04\x06\x13") == []
    assert default_tokenizer.chat_template


@pytest.mark.model
@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", ["a" * 200_000, " " * 200_000, "漢字" * 50_000, ".-" * 100_000, "7" * 200_000])
def test_huge_words_take_no_time(default_tokenizer: Tokenizer, text: str) -> None:
    assert default_tokenizer.decode(default_tokenizer.encode(text)) == text


@pytest.mark.model
def test_no_text_of_the_longest_length_has_fewer_tokens(default_tokenizer: Tokenizer) -> None:
    longest = max((default_tokenizer.decode([i]) for i in range(default_tokenizer.vocab_size)), key=len)
    text = longest * 50
    assert len(default_tokenizer.encode(text)) * len(longest) >= len(text)
    assert len(text) <= default_tokenizer.longest_text(len(default_tokenizer.encode(text)))


def test_piece_vocabulary_matches_transformers(piece_gguf: Path, piece_tokenizer: Tokenizer) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

    _, fields, _ = get_gguf_tokenizer(str(piece_gguf))
    # Of transformers' builders, phi3's puts the space before every text, as llama.cpp and Llama's tokenizer.json do.
    backend, _ = convert_gguf_tokenizer("phi3", fields)
    for text in TEXTS:
        ids = piece_tokenizer.encode(text, add_special_tokens=False)
        assert ids == backend.encode(text, add_special_tokens=False).ids, text
        assert piece_tokenizer.decode(ids) == backend.decode(ids), text


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(byte_tokenizer: Tokenizer, piece_tokenizer: Tokenizer, text: str) -> None:
    assert byte_tokenizer.decode(byte_tokenizer.encode(text), skip_special_tokens=False) == text
    for tokenizer in (byte_tokenizer, piece_tokenizer):
        plain = tokenizer.encode(text, add_special_tokens=False, allow_special=False)
        assert not tokenizer.special_ids.intersection(plain)
        assert tokenizer.decode(plain) == text


def test_lone_surrogates_are_replaced(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.decode(byte_tokenizer.encode("a\ud800b")) == "a\ufffdb"


def test_ids_without_a_token_are_no_text(byte_tokenizer: Tokenizer, piece_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.decode([10**6, *byte_tokenizer.encode("x")]) == "x"
    assert piece_tokenizer.decode([10**6]) == ""


def test_masked_text_is_not_special(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode_masked("<|user|>a \U000f0000 b</s>", {"\U000f0000": "</s>"})
    assert ids[0] == 3
    assert ids[-1] == 2
    assert ids.count(2) == 1
    assert byte_tokenizer.decode(ids, skip_special_tokens=False) == "<|user|>a </s> b</s>"


def test_masking_changes_nothing_else(byte_tokenizer: Tokenizer, piece_tokenizer: Tokenizer) -> None:
    for tokenizer in (byte_tokenizer, piece_tokenizer):
        for text in TEXTS:
            assert tokenizer.encode_masked(text, {"\U000f0000": "</s>"}) == tokenizer.encode(
                text, add_special_tokens=False
            )
