"""Text to ids and back, for any model file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer as Backend

from tokenmill.text.gguf_vocab import load_gguf_vocabulary
from tokenmill.text.hf_folder import load_folder_vocabulary
from tokenmill.text.vocabulary import Vocabulary, byte_vocabulary, token_bytes

SURROGATES = re.compile("[\ud800-\udfff]")
NORMALIZER_SHRINK = 4
MAX_SPELLED = 1 << 16


class Tokenizer:
    """A model's tokenizer. Not safe for use from several threads.

    Attributes:
        token_bytes: the bytes of an id; None if only whole lists of ids can be decoded.
        pooling: how an embedding model makes one vector of a text.
        num_own_tokens: tokens that its model must have. Of those added later models may lack some.
        strips_first_space: whether the first space of a decoded text was put there by the tokenizer.
        spell: what an id is alone: text, and bytes. Bytes that are no text are told as OpenAI does.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._backend = vocabulary.backend
        added = self._backend.get_added_tokens_decoder()
        special = {token_id: token.content for token_id, token in added.items() if token.special}
        self.special_ids = frozenset(special) | vocabulary.hidden_ids
        self.special_texts = {text: token_id for token_id, text in special.items()}
        self.end_ids = vocabulary.end_ids
        self.special_tokens = vocabulary.special_tokens
        self.chat_template = vocabulary.chat_template
        self.sampling_defaults = vocabulary.sampling_defaults
        self.pooling = vocabulary.pooling
        self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)
        self.token_bytes, self.strips_first_space = token_bytes(self._backend)
        longest_first = sorted(filter(None, special.values()), key=len, reverse=True)
        self.special_pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.spell = lru_cache(MAX_SPELLED)(self._spell)
        vocab = self._backend.get_vocab(with_added_tokens=True)
        self._letters_per_token = max(map(len, vocab), default=1)
        self.num_own_tokens = 1 + max((token_id for token_id in vocab.values() if token_id not in added), default=-1)

    @classmethod
    def load(cls, path: Path, *, or_bytes: bool = False) -> Tokenizer:
        """Read a Hugging Face folder or a GGUF file; with `or_bytes` a folder without a tokenizer gets one of bytes.

        Raises ModelUnreadable: nothing there to make a tokenizer of, or it is damaged.
        """
        if or_bytes and path.is_dir() and not any((path / f"tokenizer.{end}").exists() for end in ("json", "model")):
            return cls(byte_vocabulary())
        return cls(load_folder_vocabulary(path) if path.is_dir() else load_gguf_vocabulary(path))

    def copy_backend(self) -> Backend:
        """A backend of its own, for use by another thread."""
        return Backend.from_str(self._backend.to_str())

    def longest_text(self, num_tokens: int) -> int:
        """Most characters that `num_tokens` tokens can stand for: a longer text need not be tokenized to be refused."""
        shrink = 1 if self._backend.normalizer is None else NORMALIZER_SHRINK
        return num_tokens * self._letters_per_token * shrink

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """The ids of `text`. Lone surrogates count as U+FFFD.

        Args:
            text: any text; bytes that the vocabulary cannot express are dropped or become its unknown token.
            add_special_tokens: put bos and eos where the model wants them.
            allow_special: a special token's text becomes that token; otherwise it is text like any other.
        """
        self._backend.encode_special_tokens = not allow_special
        return list(self._backend.encode(SURROGATES.sub("\ufffd", text), add_special_tokens=add_special_tokens).ids)

    def encode_masked(self, text: str, plain: Mapping[str, str]) -> list[int]:
        """Like `encode` without bos and eos, but with text in it that must not become special tokens.

        Args:
            text: what special tokens are looked for in.
            plain: single letters in `text`, and the text that each stands for.
        """
        text = SURROGATES.sub("\ufffd", text)
        self._backend.encode_special_tokens = False
        encoding = self._backend.encode(text, add_special_tokens=False)
        masks = str.maketrans(dict(plain))
        ids: list[int] = []
        run: list[int] = []
        start = 0

        def close_run(end: int) -> None:
            piece = text[start:end]
            shown = piece.translate(masks)
            ids.extend(run if shown == piece else self.encode(shown, add_special_tokens=False, allow_special=False))
            run.clear()

        for token_id, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            # An unknown letter may also be a special id: only the text tells.
            if token_id in self.special_ids and self.special_pattern.search(text[begin:end]):
                close_run(begin)
                ids.append(token_id)
                start = end
            else:
                run.append(token_id)
        close_run(len(text))
        return ids

    def token_string(self, token_id: int) -> str:
        """How the vocabulary writes an id; empty for ids without a token."""
        return self._backend.id_to_token(token_id) or ""

    def _spell(self, token_id: int) -> tuple[str, bytes]:
        if self.token_bytes is None:
            data = self.decode([token_id], skip_special_tokens=False).encode()
        else:
            data = self.token_bytes(token_id)
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are no UTF-8 become U+FFFD, ids without a token nothing."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        shown = [token_id for token_id in token_ids if token_id not in hidden]
        if self.token_bytes is None:
            return str(self._backend.decode(shown, skip_special_tokens=False))
        data = b"".join(map(self.token_bytes, shown))
        return data.removeprefix(b" " if self.strips_first_space else b"").decode("utf-8", "replace")
