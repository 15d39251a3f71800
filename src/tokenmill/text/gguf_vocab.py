"""Tokenizers out of GGUF metadata: byte-level BPE ("gpt2") and SentencePiece-style BPE ("llama")."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend

from tokenmill.errors import ModelUnreadable
from tokenmill.gguf_metadata import read_header
from tokenmill.text.pre_tokenizers import find_rule
from tokenmill.text.vocabulary import SPACE_MARK, Vocabulary
from tokenmill.types import Pooling

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
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
    _add_tokens(backend, tokens, kinds)
    _add_ends(backend, fields, tokens, add_bos)
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
    backend = _bpe(tokens, merges, ignore_merges=rule.ignore_merges)
    if rule.compose:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = rule.build()
    backend.decoder = decoders.ByteLevel()
    return backend, rule.add_bos


def _sentence_piece(fields: dict[str, Any], tokens: list[str], kinds: Sequence[int]) -> tuple[Backend, bool]:
    scores = fields.get(f"{PREFIX}scores", [])
    if len(scores) != len(tokens):
        raise ModelUnreadable(f"{len(tokens)} tokens but {len(scores)} scores")
    merges = _merges_by_score(tokens, scores, kinds)
    unknown = _token_id(fields, "unknown", tokens)
    unknown_token = None if unknown is None else tokens[unknown]
    backend = _bpe(tokens, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown_token)
    add_prefix = bool(fields.get(f"{PREFIX}add_space_prefix", True))
    marks = normalizers.Replace(" ", SPACE_MARK)
    prepend = normalizers.Prepend(SPACE_MARK)
    backend.normalizer = normalizers.Sequence([prepend, marks]) if add_prefix else marks
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if add_prefix else steps)
    return backend, True


def _merges_by_score(tokens: list[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Every cut of a token into two others, best score first: SentencePiece's BPE in the form of merges.

    Only normal tokens take part: plain text must not merge into a control token.
    """
    ranks = {token: -score for token, score, kind in zip(tokens, scores, kinds, strict=True) if kind == NORMAL}
    merges = [
        (rank, -cut, -len(token), index, token)
        for index, (token, rank) in enumerate(ranks.items())
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    return [(token[:-left], token[-left:]) for _, left, _, _, token in sorted(merges)]


def _bpe(tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> Backend:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        return Backend(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:
        raise ModelUnreadable(f"vocabulary and merges do not fit each other: {error}") from error


def _add_tokens(backend: Backend, tokens: list[str], kinds: Sequence[int]) -> None:
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    plain = [token for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])


def _add_ends(backend: Backend, fields: dict[str, Any], tokens: list[str], add_bos: bool) -> None:
    """Let the backend put bos before and eos after a text where the file asks for it."""
    bos, eos = (_token_id(fields, key, tokens) for key in ("bos", "eos"))
    before = bos if fields.get(f"{PREFIX}add_bos_token", add_bos) else None
    after = eos if fields.get(f"{PREFIX}add_eos_token", False) else None
    marks = [(tokens[token_id], token_id) for token_id in (before, after) if token_id is not None]
    if marks:
        single = [] if before is None else [tokens[before]]
        single += ["$A"] if after is None else ["$A", tokens[after]]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=marks)


def _end_ids(fields: dict[str, Any], tokens: list[str], kinds: Sequence[int]) -> tuple[int, ...]:
    named = [_token_id(fields, key, tokens) for key in ("eos", "eot", "eom")]
    # Converters before 2024 wrote no eot: an end-of-turn token is known by its text, as in llama.cpp.
    turn_ends = [index for index, kind in enumerate(kinds) if kind == CONTROL and tokens[index] in TURN_ENDS]
    return tuple(dict.fromkeys(token_id for token_id in [*named, *turn_ends] if token_id is not None))


def _token_id(fields: dict[str, Any], key: str, tokens: list[str]) -> int | None:
    token_id = fields.get(f"{PREFIX}{key}_token_id")
    return token_id if isinstance(token_id, int) and 0 <= token_id < len(tokens) else None
