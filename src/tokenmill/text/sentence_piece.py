"""SentencePiece's byte-pair vocabularies (Kudo and Richardson 2018): in its tokenizer.model files, and in GGUF files.

tokenizer.model is a protocol buffer, sentencepiece_model.proto; the few fields that matter are read without a library.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from tokenmill.errors import ModelUnreadable
from tokenmill.text.vocabulary import SPACE_MARK

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
BYTE_PAIR = 2
PIECE, TRAINER, NORMALIZER = 1, 2, 3
MODEL_KIND, IS_SUFFIX = 3, 24
IDS = {"unknown": (40, 0), "bos": (41, 1), "eos": (42, 2)}  # field and default
CHARSMAP, ADD_PREFIX, SQUEEZE, ESCAPE = 2, 3, 4, 5


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Tokens with scores and kinds, and how text becomes what they are looked for in.

    With `add_prefix` a space is put before the text, with `squeeze` spaces are put together; `charsmap` replaces
    letters. `ids` are those of "unknown", "bos" and "eos", where there are such.
    """

    tokens: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    ids: Mapping[str, int]
    add_prefix: bool = True
    squeeze: bool = False
    charsmap: bytes = b""


def read_pieces(path: Path) -> Pieces:
    """The vocabulary in a tokenizer.model. Raises ModelUnreadable: damaged, or not of byte pairs."""
    try:
        data = path.read_bytes()
        tokens, scores, kinds = [], [], []
        trainer: dict[int, Any] = {}
        rules: dict[int, Any] = {}
        for number, value in _fields(data):
            if number == PIECE:
                piece = dict(_fields(value))
                kinds.append(piece.get(3, NORMAL))
                text = piece[1].decode()
                tokens.append(text.replace(SPACE_MARK, " ") if kinds[-1] == USER_DEFINED else text)
                scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
            elif number in (TRAINER, NORMALIZER):
                (trainer if number == TRAINER else rules).update(_fields(value))
        if not tokens:
            raise ValueError("it holds no tokens")
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelUnreadable(
            f"{path} is no SentencePiece model, or it is damaged: {error}. Fetch it again."
        ) from error
    except OSError as error:
        raise ModelUnreadable(f"{path} cannot be read: {error.strerror or error}") from error
    if trainer.get(MODEL_KIND) != BYTE_PAIR or trainer.get(IS_SUFFIX) or not rules.get(ESCAPE, 1):
        kind = "is not of byte pairs with spaces before words, which alone is supported"
        raise ModelUnreadable(f"{path} {kind}: convert the tokenizer with transformers' save_pretrained")
    return Pieces(
        tokens=tokens,
        scores=scores,
        kinds=kinds,
        ids={name: index for name, (key, own) in IDS.items() if (index := trainer.get(key, own)) < len(tokens)},
        add_prefix=bool(rules.get(ADD_PREFIX, 1)),
        squeeze=bool(rules.get(SQUEEZE, 1)),
        charsmap=rules.get(CHARSMAP, b""),
    )


def piece_backend(pieces: Pieces, *, prefix_everywhere: bool = True) -> Backend:
    """The vocabulary as a `tokenizers` backend that knows no added tokens yet.

    With `prefix_everywhere` the space is put before each part between added tokens, as transformers' legacy form and
    llama.cpp do, else before the first alone.
    """
    unknown = pieces.ids.get("unknown")
    unknown_token = None if unknown is None else pieces.tokens[unknown]
    merges = merges_by_score(pieces)
    backend = byte_pairs(pieces.tokens, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown_token)
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(pieces.charsmap)] if pieces.charsmap else []
    if pieces.squeeze:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if pieces.add_prefix and not prefix_everywhere:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme="first", split=False)
    else:
        steps += [normalizers.Prepend(SPACE_MARK)] if pieces.add_prefix else []
        steps += [normalizers.Replace(" ", SPACE_MARK)]
    backend.normalizer = normalizers.Sequence(steps) if steps else None
    shown = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*shown, decoders.Strip(" ", 1, 0)] if pieces.add_prefix else shown)
    return backend


def merges_by_score(pieces: Pieces) -> list[tuple[str, str]]:
    """Every cut of a token into two others, best score first: SentencePiece's BPE in the form of merges.

    Only normal tokens take part: plain text must not merge into a control token.
    """
    listed = zip(pieces.tokens, pieces.scores, pieces.kinds, strict=True)
    ranks = {token: -score for token, score, kind in listed if kind == NORMAL}
    merges = [
        (rank, -cut, -len(token), index, token)
        for index, (token, rank) in enumerate(ranks.items())
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    return [(token[:-left], token[-left:]) for _, left, _, _, token in sorted(merges)]


def byte_pairs(tokens: Sequence[str], merges: list[tuple[str, str]], **options: Any) -> Backend:
    """A backend of merges. Raises ModelUnreadable: they name what is not a token."""
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        return Backend(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:
        raise ModelUnreadable(f"vocabulary and merges do not fit each other: {error}") from error


def add_tokens(backend: Backend, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Make control tokens known as special, and user-defined ones as tokens that stay whole."""
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    plain = [token for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])


def add_ends(backend: Backend, tokens: Sequence[str], bos: int | None, eos: int | None) -> None:
    """Let the backend put these ids before and after a text."""
    marks = [(tokens[token_id], token_id) for token_id in (bos, eos) if token_id is not None]
    if marks:
        single = [] if bos is None else [tokens[bos]]
        single += ["$A"] if eos is None else ["$A", tokens[eos]]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=marks)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a protocol buffer's fields: integers, or bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"a field of kind {kind}")
        size, at = _varint(data, at) if kind == 2 else (8 if kind == 1 else 4, at)
        if at + size > len(data):
            raise ValueError("it ends inside a field")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at
    raise ValueError("it ends inside a number")
