"""Small vocabularies made on the spot: byte-level BPE and SentencePiece-style BPE, as folders and as GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf import GGUFWriter
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. 12345 67890",
    "def main():\n    return {'a': 1}\n",
    "naïve café, façade; Größe über alles",
    "今日は世界 こんにちは 你好世界",
    "the there then them these those this that " * 3,
] * 2
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>"]
TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces   and\ttabs ",
    "line\r\nline\n\n\nline\u2028end",
    "def f(x):\n    return x ** 2  # comment",
    "今日は世界、元気？",
    "emoji 👨‍👩‍👧 😀🏽 end",
    "1234567890 3.14 ١٢٣",
    "नमस्ते दुनिया",
    "a\x00b",
    "\x04\x06\U00040000",
    "don't we'll I'M",
    "e\u0301 \u00e9",
    "x" * 300,
    "<s> not <|user|> bos </s>",
]


def byte_level() -> Tokenizer:
    """Byte-level BPE with 400 tokens, of which four are special and one is added."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return backend


def pieces_with_scores() -> list[tuple[str, float, int]]:
    """(token, score, type) of a SentencePiece-style vocabulary: specials, 256 bytes, letters, merged pieces."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=250, show_progress=False))
    vocab = backend.get_vocab()
    pieces = sorted(vocab, key=lambda piece: vocab[piece])
    listed = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("<|user|>", 0.0, 3)]
    listed += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    return listed + [(piece, -float(rank), 1) for rank, piece in enumerate(pieces)]


def write_folder(path: Path, backend: Tokenizer, **files: dict[str, Any]) -> Path:
    """A Hugging Face folder; `files` are the JSON files beside tokenizer.json."""
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def write_gguf(path: Path, fields: dict[str, Any]) -> Path:
    """A GGUF file without tensors."""
    writer = GGUFWriter(path, "llama")
    add_fields(writer, fields)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def add_fields(writer: GGUFWriter, fields: dict[str, Any]) -> None:
    """Keys without a dot are in `tokenizer.ggml.`."""
    for name, value in fields.items():
        key = name if "." in name else f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def byte_level_fields(backend: Tokenizer, rule: str = "gpt-2") -> dict[str, Any]:
    """GGUF fields of `byte_level()`."""
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    merges = json.loads(backend.to_str())["model"]["merges"]
    kinds = [3 if token in SPECIAL else 4 if token == "<think>" else 1 for token in tokens]
    return {
        "model": "gpt2",
        "pre": rule,
        "tokens": tokens,
        "token_type": kinds,
        "merges": [" ".join(merge) for merge in merges],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def piece_fields() -> dict[str, Any]:
    """GGUF fields of `pieces_with_scores()`."""
    pieces = pieces_with_scores()
    return {
        "model": "llama",
        "tokens": [token for token, _, _ in pieces],
        "scores": [score for _, score, _ in pieces],
        "token_type": [kind for _, _, kind in pieces],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
