"""tokenizer.model files, against the library that writes them."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers

from tests.text.vocabularies import CORPUS, TEXTS, write_gguf
from tokenmill.errors import ModelUnreadable
from tokenmill.text.tokenizer import Tokenizer

LLAMA = {"add_dummy_prefix": True, "remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
GEMMA = {**LLAMA, "add_dummy_prefix": False, "user_defined_symbols": ["<think>", "\n\n", "▁▁▁"]}
KINDS: dict[str, dict[str, Any]] = {"llama": LLAMA, "gemma": GEMMA, "nfkc": {}}
SPECIAL = ("<s>", "</s>", "<unk>", "<|user|>")
ODD = [
    *TEXTS,
    "a    b     c",
    "   lead",
    "trail   ",
    "x\n\ny\n\n\nz",
    "ﬁ ½ Ａ",
    "a <think>b",
    "▁",
    "\u200b\ufeff",
    "a\u00a0b",
]


def train(folder: Path, kind: str = "bpe", **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 4),
        model_writer=model,
        model_type=kind,
        vocab_size=400,
        byte_fallback=True,
        hard_vocab_limit=False,
        control_symbols=["<|user|>"],
        minloglevel=3,
        **options,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return folder


def oracle(folder: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_the_library_s(tmp_path: Path, kind: str) -> None:
    folder = train(tmp_path, **KINDS[kind])
    tokenizer, truth = Tokenizer.load(folder), oracle(folder)
    draw = random.Random(0)
    letters = "the them fox quick 12 \t\né今日"
    texts = [*ODD, *("".join(draw.choices(letters, k=40)) for _ in range(100))]
    assert tokenizer.vocab_size == truth.vocab_size()
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False, allow_special=False)
        assert ids == truth.encode(text), text
        assert tokenizer.decode(ids) == truth.decode(ids), text


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_the_same_vocabulary_in_a_gguf_file(tmp_path: Path, kind: str) -> None:
    """Laid out as llama.cpp's converter does it: user-defined tokens have spaces in place of their marks."""
    truth = oracle(train(tmp_path, **KINDS[kind]))
    pieces = range(truth.vocab_size())
    own = set(KINDS[kind].get("user_defined_symbols", ()))
    names = [truth.id_to_piece(piece) for piece in pieces]
    kinds = [
        2 if truth.is_unknown(piece) else 3 if truth.is_control(piece) else 6 if truth.is_byte(piece) else 1
        for piece in pieces
    ]
    fields = {
        "model": "llama",
        "tokens": [name.replace("▁", " ") if name in own else name for name in names],
        "scores": [truth.get_score(piece) for piece in pieces],
        "token_type": [4 if name in own else kind for name, kind in zip(names, kinds, strict=True)],
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_space_prefix": KINDS[kind]["add_dummy_prefix"],
    }
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "m.gguf", fields))
    for text in ODD:
        ids = tokenizer.encode(text, add_special_tokens=False, allow_special=False)
        assert ids == truth.encode(text), text
        assert tokenizer.decode(ids) == truth.decode(ids), text


def test_special_tokens_and_ends(tmp_path: Path) -> None:
    folder = train(tmp_path, **LLAMA)
    tokenizer, truth = Tokenizer.load(folder), oracle(folder)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert (tokenizer.end_ids, tokenizer.special_ids) == ((2,), {0, 1, 2, 3})
    assert tokenizer.encode("the fox") == [1, *truth.encode("the fox")]
    user = truth.piece_to_id("<|user|>")
    assert tokenizer.encode("<|user|>the", add_special_tokens=False) == [user, *truth.encode("the")]
    assert user not in tokenizer.encode("<|user|>the", allow_special=False)
    config = {"add_bos_token": False, "add_eos_token": True, "eos_token": "<|user|>", "legacy": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    other = Tokenizer.load(folder)
    assert other.encode("the") == [*truth.encode("the"), 2]
    assert other.end_ids == (user,)
    assert other.encode("<|user|>the", add_special_tokens=False)[1:] != truth.encode("the")  # no space before it


def test_tokens_that_were_added_later(tmp_path: Path) -> None:
    folder = train(tmp_path, **LLAMA)
    count = oracle(folder).vocab_size()
    later = {"<|b|>": count + 1, "<|a|>": count, "<|odd|>": "x", "<|far|>": 10 * count}
    (folder / "added_tokens.json").write_text(json.dumps(later))
    declared = {str(count + 2): {"content": "<|c|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": declared}))
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("<|a|><|b|><|c|>", add_special_tokens=False)
    assert ids == [count, count + 1, count + 2]
    assert tokenizer.special_ids.issuperset(ids)


def test_the_same_as_transformers(tmp_path: Path) -> None:
    folder = train(tmp_path, **LLAMA)
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    truth = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer.load(folder)
    for text in [text for text in ODD if text and "\x00" not in text]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == truth(text, add_special_tokens=False).input_ids, text


@pytest.mark.parametrize("length", [0, 1, 7, 300, -1])
def test_damaged_files(tmp_path: Path, length: int) -> None:
    path = train(tmp_path, **LLAMA) / "tokenizer.model"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ModelUnreadable, match=r"tokenizer\.model"):
        Tokenizer.load(tmp_path)


def test_damaged_bytes_never_end_in_another_error(tmp_path: Path) -> None:
    path = train(tmp_path, **GEMMA) / "tokenizer.model"
    sound, draw, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(150):
        damaged = bytearray(sound)
        for _ in range(draw.choice((1, 1, 20))):
            damaged[draw.randrange(len(damaged))] = draw.choice((0, 1, 0x7F, 0xFF, draw.randrange(256)))
        path.write_bytes(damaged)
        try:
            Tokenizer.load(tmp_path).encode("the fox <think>\n\n é")
        except ModelUnreadable:
            refused += 1
    assert 10 < refused < 150


@pytest.mark.parametrize("options", [{"kind": "unigram"}, {"treat_whitespace_as_suffix": True}])
def test_other_kinds_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ModelUnreadable, match="not of byte pairs"):
        Tokenizer.load(train(tmp_path, **options))
