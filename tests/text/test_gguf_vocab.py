from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.text.vocabularies import TEXTS, byte_level, byte_level_fields, piece_fields, write_gguf
from tokenmill.errors import ModelUnreadable
from tokenmill.text.tokenizer import Tokenizer


def load(tmp_path: Path, fields: dict[str, Any]) -> Tokenizer:
    return Tokenizer.load(write_gguf(tmp_path / "model.gguf", fields))


def test_byte_level_vocabulary_is_the_one_that_was_written(byte_tokenizer: Tokenizer) -> None:
    backend = byte_level()
    for text in TEXTS:
        assert byte_tokenizer.encode(text) == backend.encode(text).ids, text
    assert byte_tokenizer.special_ids == {0, 1, 2, 3}
    assert byte_tokenizer.end_ids == (2,)
    assert byte_tokenizer.special_tokens.items() >= {("bos_token", "<s>"), ("eos_token", "</s>")}
    think = byte_tokenizer.encode("a<think>b")
    assert byte_tokenizer.vocab_size - 1 in think
    assert byte_tokenizer.decode(think) == "a<think>b"


def test_pieces(piece_tokenizer: Tokenizer) -> None:
    with_ends = piece_tokenizer.encode("the fox")
    assert with_ends[0] == 1
    assert with_ends[1:] == piece_tokenizer.encode("the fox", add_special_tokens=False)
    assert piece_tokenizer.decode(with_ends) == "the fox"
    assert piece_tokenizer.decode(with_ends, skip_special_tokens=False) == "<s> the fox"
    letters_and_bytes = piece_tokenizer.encode("\U0001f600", add_special_tokens=False)
    assert piece_tokenizer.decode(letters_and_bytes) == "\U0001f600"
    assert len(letters_and_bytes) == 5


def test_flags_for_bos_eos_and_space_prefix(tmp_path: Path) -> None:
    fields = piece_fields() | {"add_bos_token": False, "add_eos_token": True, "add_space_prefix": False}
    tokenizer = load(tmp_path, fields)
    ids = tokenizer.encode("the")
    assert ids[0] != 1
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "the"
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


@pytest.mark.parametrize(("rule", "adds_bos"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_rules_that_add_bos(tmp_path: Path, rule: str, adds_bos: bool) -> None:
    tokenizer = load(tmp_path, byte_level_fields(byte_level(), rule))
    assert (tokenizer.encode("x")[0] == 1) == adds_bos


def test_end_ids(tmp_path: Path) -> None:
    fields = byte_level_fields(byte_level())
    fields["tokens"][3] = "<|im_end|>"
    assert load(tmp_path, fields).end_ids == (2, 3)
    fields["eos_token_id"] = 3
    assert load(tmp_path, fields | {"eot_token_id": 3, "eom_token_id": 0}).end_ids == (3, 0)
    assert load(tmp_path, fields | {"eos_token_id": 10**6}).end_ids == (3,)


def test_template_and_sampling_defaults(tmp_path: Path) -> None:
    fields = byte_level_fields(byte_level())
    extra = {"tokenizer.chat_template": "{{ bos_token }}", "general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    tokenizer = load(tmp_path, fields | extra)
    assert tokenizer.chat_template == "{{ bos_token }}"
    assert tokenizer.sampling_defaults == {"temperature": 0.5, "top_k": 20}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pre": "nonsense"}, "'nonsense'.*smollm"),
        ({"model": "bert"}, "'bert'.*gpt2, llama"),
        ({"merges": ["a b c"]}, "do not fit"),
        ({"token_type": [1]}, "token types"),
        ({"model": "llama"}, "0 scores"),
        ({"tokens": ["a"], "token_type": [1]}, "do not fit"),
    ],
)
def test_files_that_cannot_work(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelUnreadable, match=words):
        load(tmp_path, byte_level_fields(byte_level()) | change)


def test_no_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ModelUnreadable, match="no vocabulary"):
        load(tmp_path, {"a.b": 1})


def test_text_never_merges_into_a_control_token(tmp_path: Path) -> None:
    fields = piece_fields()
    for token, score in (("<", -1.0), ("s", -1.0), (">", -1.0), ("<s", -1.0)):
        if token not in fields["tokens"]:
            fields["tokens"].append(token)
            fields["scores"].append(score)
            fields["token_type"].append(1)
    tokenizer = load(tmp_path, fields | {"add_space_prefix": False, "add_bos_token": False})
    assert tokenizer.encode("<s>") == [1]
    assert 1 not in tokenizer.encode("<s>", allow_special=False)


@pytest.mark.parametrize(("kind", "pooling"), [(0, "last"), (1, "mean"), (3, "last")])
def test_pooling(tmp_path: Path, kind: int, pooling: str) -> None:
    assert load(tmp_path, byte_level_fields(byte_level()) | {"llama.pooling_type": kind}).pooling == pooling


def test_a_pooling_that_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(ModelUnreadable, match="pooling_type 2 is not supported"):
        load(tmp_path, byte_level_fields(byte_level()) | {"llama.pooling_type": 2})
