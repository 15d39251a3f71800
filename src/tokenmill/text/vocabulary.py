"""What a tokenizer is made from, whichever file it came in, and how token ids become bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from tokenmill.types import Pooling

SPACE_MARK = "▁"

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A `tokenizers` backend with what the model's other files say about it.

    Args:
        backend: knows every added token, special ones as special; adds bos and eos by itself where the model wants it.
        end_ids: ids that end the output, the most usual first.
        special_tokens: the template's names (`bos_token`, `eos_token`, ...) and their text.
        chat_template: jinja2 source.
        sampling_defaults: what the model's makers advise.
        hidden_ids: special ids besides those that the backend knows as special.
        pooling: how an embedding model makes one vector of a text.
    """

    backend: Backend
    end_ids: tuple[int, ...]
    special_tokens: dict[str, str]
    chat_template: str | None = None
    sampling_defaults: dict[str, float | int] = field(default_factory=dict)
    hidden_ids: frozenset[int] = frozenset()
    pooling: Pooling = "last"


def byte_alphabet() -> dict[str, int]:
    """The letter that stands for each byte in a byte-level vocabulary (Radford et al. 2019, GPT-2)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


def byte_vocabulary() -> Vocabulary:
    """A token for each byte and no other: for models of random numbers that come without a tokenizer."""
    backend = Backend(BPE(vocab={letter: index for index, letter in enumerate(byte_alphabet())}, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    return Vocabulary(backend=backend, end_ids=(), special_tokens={})


def token_bytes(backend: Backend) -> tuple[TokenBytes | None, bool]:
    """How to turn an id into bytes, and whether the first space of a whole text is the tokenizer's, not the user's.

    None where the backend's decoder is neither byte-level nor SentencePiece-style: then only whole lists of ids decode.
    An id without a token is no bytes.
    """
    steps = _decoder_steps(backend)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        spell, strips_first_space = _byte_letters(), False
    elif steps and all(map(_is_piece_step, steps)):
        has_bytes = any(step["type"] == "ByteFallback" for step in steps)
        spell, strips_first_space = _pieces(has_bytes), any(map(_strips_first_space, steps))
    else:
        return None, False
    added = {token_id: token.content.encode() for token_id, token in backend.get_added_tokens_decoder().items()}
    name = backend.id_to_token

    def convert(token_id: int) -> bytes:
        return added[token_id] if token_id in added else spell(name(token_id) or "")

    return convert, strips_first_space


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return steps


def _is_piece_step(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "Replace", "pattern": {"String": mark}, "content": " "}:
            return bool(mark == SPACE_MARK)
        case {"type": "Metaspace", "replacement": mark}:
            return bool(mark == SPACE_MARK)
        case {"type": "Strip", "content": " ", "stop": 0}:
            return True
    return step["type"] in ("ByteFallback", "Fuse")


def _strips_first_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return bool(step["type"] == "Strip" and step["start"] > 0)


def _byte_letters() -> Callable[[str], bytes]:
    alphabet = byte_alphabet()

    def spell(token: str) -> bytes:
        try:
            return bytes([alphabet[letter] for letter in token])
        except KeyError:
            return token.encode()

    return spell


def _pieces(has_bytes: bool) -> Callable[[str], bytes]:
    byte_tokens = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)} if has_bytes else {}
    return lambda token: byte_tokens.get(token) or token.replace(SPACE_MARK, " ").encode()
