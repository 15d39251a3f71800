"""Tokenizers out of GGUF metadata: byte-level BPE ("gpt2") and SentencePiece-style BPE ("llama")."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers

from tokenmill.errors import ModelUnreadable
from tokenmill.gguf_metadata import read_header
from tokenmill.text.pre_tokenizers import find_rule
from tokenmill.text.sentence_piece import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    Pieces,
    add_ends,
    add_tokens,
    byte_pairs,
    piece_backend,
)
from tokenmill.text.vocabulary import Vocabulary
from tokenmill.types import Pooling

PREFIX = "tokenizer.ggml."
SPECIAL_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
SAMPLING_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
POOLINGS: dict[int, Pooling] = {0: "last", 1: "mean", 3: "last"}
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")


def load_gguf_vocabulary(path: Path) -> Vocabulary:
    """Build the tokenizer that a GGUF file describes.

    Raises ModelUnreadable: no vocabulary in the file, an unknown kind or rule, or lists that do not fit each other.
    """
    fields, _ = read_header(path)
    tokens = fields.get(f"{PREFIX}tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelUnreadable(f"{path} holds no vocabulary (tokenizer.ggml.tokens): use a file of a text model")
    kinds = fields.get(f"{PREFIX}token_type") or [NORMAL] * len(tokens)
    kind = fields.get(f"{PREFIX}model")
    try:
        if len(kinds) != len(tokens):
            raise ModelUnreadable(f"{len(tokens)} tokens but {len(kinds)} token types")
        if kind == "gpt2":
            backend, add_bos = _byte_level(fields, tokens)
        elif kind == "llama":
            backend, add_bos = _sentence_piece(fields, tokens, kinds)
        else:
            raise ModelUnreadable(f"vocabulary kind {kind!r} (tokenizer.ggml.model) is not known; known: gpt2, llama")
    except ModelUnreadable as error:
        raise ModelUnreadable(f"{path}: {error.message}") from error
    add_tokens(backend, tokens, kinds)
    bos, eos = (_token_id(fields, key, tokens) for key in ("bos", "eos"))
    before = bos if fields.get(f"{PREFIX}add_bos_token", add_bos) else None
    add_ends(backend, tokens, before, eos if fields.get(f"{PREFIX}add_eos_token", False) else None)
    template = fields.get("tokenizer.chat_template")
    return Vocabulary(
        backend=backend,
        end_ids=_end_ids(fields, tokens, kinds),
        special_tokens={
            name: tokens[token_id]
            for name, key in SPECIAL_NAMES.items()
            if (token_id := _token_id(fields, key, tokens)) is not None
        },
        chat_template=template if isinstance(template, str) else None,
        sampling_defaults={
            name: fields[key] for name, key in SAMPLING_KEYS.items() if isinstance(fields.get(key), int | float)
        },
        pooling=_pooling(fields, path),
        hidden_ids=frozenset(token_id for token_id, kind in enumerate(kinds) if kind in (UNKNOWN, CONTROL)),
    )


def _pooling(fields: dict[str, Any], path: Path) -> Pooling:
    kind = fields.get(f"{fields.get('general.architecture')}.pooling_type", 0)
    if kind not in POOLINGS:
        raise ModelUnreadable(f"{path}: pooling_type {kind} is not supported; known: 0 (none), 1 (mean), 3 (last)")
    return POOLINGS[kind]


def _byte_level(fields: dict[str, Any], tokens: list[str]) -> tuple[Backend, bool]:
    rule = find_rule(fields.get(f"{PREFIX}pre", "default"))
    pairs = (merge.partition(" ") for merge in fields.get(f"{PREFIX}merges", []))
    merges = [(left, right) for left, _, right in pairs]
    backend = byte_pairs(tokens, merges, ignore_merges=rule.ignore_merges)
    if rule.compose:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = rule.build()
    backend.decoder = decoders.ByteLevel()
    return backend, rule.add_bos


def _sentence_piece(fields: dict[str, Any], tokens: list[str], kinds: Sequence[int]) -> tuple[Backend, bool]:
    scores = fields.get(f"{PREFIX}scores", [])
    if len(scores) != len(tokens):
        raise ModelUnreadable(f"{len(tokens)} tokens but {len(scores)} scores")
    unknown = _token_id(fields, "unknown", tokens)
    ids = {} if unknown is None else {"unknown": unknown}
    add_prefix = bool(fields.get(f"{PREFIX}add_space_prefix", True))
    return piece_backend(Pieces(tokens=tokens, scores=scores, kinds=kinds, ids=ids, add_prefix=add_prefix)), True


def _end_ids(fields: dict[str, Any], tokens: list[str], kinds: Sequence[int]) -> tuple[int, ...]:
    named = [_token_id(fields, key, tokens) for key in ("eos", "eot", "eom")]
    # Converters before 2024 wrote no eot: an end-of-turn token is known by its text, as in llama.cpp.
    turn_ends = [index for index, kind in enumerate(kinds) if kind == CONTROL and tokens[index] in TURN_ENDS]
    return tuple(dict.fromkeys(token_id for token_id in [*named, *turn_ends] if token_id is not None))


def _token_id(fields: dict[str, Any], key: str, tokens: list[str]) -> int | None:
    token_id = fields.get(f"{PREFIX}{key}_token_id")
    return token_id if isinstance(token_id, int) and 0 <= token_id < len(tokens) else None
