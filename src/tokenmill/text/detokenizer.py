"""Ids to text as they come: whole characters, stop strings, nothing kept that is not needed.

One `TextStream` is one request. What it holds is bounded: at most three bytes of an unfinished character (or a short
window of ids where a vocabulary has no bytes), and a text shorter than the longest stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from tokenmill.text.tokenizer import Tokenizer
from tokenmill.text.vocabulary import TokenBytes
from tokenmill.wire.messages import TextOptions, unpack_ids

WINDOW = 8


class ByteDecoder:
    """For vocabularies whose tokens are bytes.

    `context` are the prompt's last ids: a character that they leave unfinished is completed by the first ids, and shown
    whole; if it is not, it was the prompt's fault and is not shown.
    """

    def __init__(self, token_bytes: TokenBytes, hidden: frozenset[int], context: Sequence[int] = ()) -> None:
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.decode(b"".join(token_bytes(token_id) for token_id in context if token_id not in hidden))
        self._is_prompts = self._utf8.getstate()[0] != b""

    def push(self, token_id: int) -> str:
        """The characters that this id completes; a byte that can be none is U+FFFD."""
        data = b"" if token_id in self._hidden else self._token_bytes(token_id)
        if not data:
            return ""
        text = self._utf8.decode(data)
        if self._is_prompts:
            self._is_prompts = False
            return text.removeprefix("\ufffd")
        return text

    def finish(self) -> str:
        """U+FFFD for an unfinished character."""
        return "" if self._is_prompts else self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For other vocabularies: a window of ids is decoded with and without the new one, and the difference is shown."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], context: Sequence[int] = ()) -> None:
        self._decode = tokenizer.decode
        self._hidden = hidden
        self._shown = [token_id for token_id in context if token_id not in hidden]
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that this id adds; text that ends in U+FFFD waits for more, for at most `WINDOW` ids."""
        if token_id in self._hidden:
            return ""
        self._held.append(token_id)
        text = self._difference()
        if text.endswith("\ufffd") and len(self._held) < WINDOW:
            return ""
        return self._take(text)

    def finish(self) -> str:
        """The text that waits."""
        return self._take(self._difference())

    def _difference(self) -> str:
        before = self._decode(self._shown, skip_special_tokens=False)
        return self._decode(self._shown + self._held, skip_special_tokens=False)[len(before) :]

    def _take(self, text: str) -> str:
        # A window that begins at a token of its own text decodes as in the whole, but for what follows its first id.
        self._shown = (self._shown + self._held)[-WINDOW:]
        self._held = []
        return text


class _StopString:
    """Knuth, Morris and Pratt's search for one string in a text that comes in pieces; its table grows as it matches."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._borders = [0]

    def find_end(self, piece: str) -> int | None:
        """Index in `piece` after the first match's last letter."""
        for index, letter in enumerate(piece):
            self.matched = self._extend(self.matched, letter)
            if self.matched > len(self._borders):
                self._borders.append(self._extend(self._borders[-1], letter))
            if self.matched == len(self.text):
                return index + 1
        return None

    def _extend(self, length: int, letter: str) -> int:
        """How much of the string matches after one more letter, where `length` letters did before."""
        while length and self.text[length] != letter:
            length = self._borders[length - 1]
        return length + (self.text[length] == letter)


class StopScanner:
    """Finds the stop string that is complete first, and holds back only what may be the beginning of one."""

    def __init__(self, stops: Iterable[str], include_stop: bool) -> None:
        self._stops = [_StopString(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that can be shown, and the stop string if one was found: then all after it is dropped."""
        if not self._stops:
            return text, None
        ends = [(end, -len(stop.text), stop.text) for stop in self._stops if (end := stop.find_end(text)) is not None]
        text, before = self._held + text, len(self._held)
        if ends:
            end, minus_length, stop = min(ends)
            end += before
            self._held = ""
            return text[: end if self._include_stop else end + minus_length], stop
        length = max(stop.matched for stop in self._stops)
        self._held = text[len(text) - length :]
        return text[: len(text) - length], None

    def finish(self) -> str:
        """The beginning of a stop string that never came."""
        held, self._held = self._held, ""
        return held


def make_decoder(tokenizer: Tokenizer, hidden: frozenset[int], context: Sequence[int]) -> ByteDecoder | WindowDecoder:
    """The decoder for a vocabulary; ids in `hidden` are no text."""
    if tokenizer.token_bytes is None:
        return WindowDecoder(tokenizer, hidden, context)
    return ByteDecoder(tokenizer.token_bytes, hidden, context)


class TextStream:
    """The text of one request, with its stop strings. `completion_tokens` counts up to the text's end.

    `offsets` tell where in the whole text, an echoed prompt included, the tokens of the last `push` begin, but for a
    stop token that is left out; `prompt_offsets` where those of an echoed prompt do, if its logprobs are asked for.
    """

    def __init__(self, tokenizer: Tokenizer, options: TextOptions) -> None:
        hidden = tokenizer.special_ids.difference(options.shown_ids) if options.skip_special_tokens else frozenset()
        context = [] if options.echo_ids is not None else unpack_ids(options.prompt_tail)
        self._decoder = make_decoder(tokenizer, hidden, context)
        self._scanner = StopScanner(options.stop, options.include_stop)
        self._min_tokens = options.min_tokens
        self._include_stop = options.include_stop
        self._echo = options.echo_text or ""
        if options.echo_ids is not None:
            self._echo = "".join(map(self._decoder.push, unpack_ids(options.echo_ids)))
            self._echo = self._echo.removeprefix(" " if tokenizer.strips_first_space else "")
        self.completion_tokens = 0
        self.offsets: list[int] = []
        self._length = len(self._echo)
        self.prompt_offsets: list[int] = []
        length = -tokenizer.strips_first_space
        decoder = make_decoder(tokenizer, hidden, ())
        for token_id in unpack_ids(options.prompt_ids):
            self.prompt_offsets.append(min(max(length, 0), self._length))
            length += len(decoder.push(token_id))

    def push(self, token_ids: Sequence[int], ends_with_stop_token: bool = False) -> tuple[str, str | None]:
        """New text, and the stop string that ended it, if any. `completion_tokens` is where it ended.

        A stop token's own text is left out unless stops are to be included.
        """
        shown, self._echo, self.offsets = [self._echo], "", []
        last = len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            self.completion_tokens += 1
            if ends_with_stop_token and index == last and not self._include_stop:
                break
            decoded = self._decoder.push(token_id)
            self.offsets.append(self._length)
            self._length += len(decoded)
            text, stop = self._scan(decoded)
            shown.append(text)
            if stop is not None:
                return "".join(shown), stop
        return "".join(shown), None

    def finish(self) -> tuple[str, str | None]:
        """All that was held back, and the stop string in it, if any."""
        echo, self._echo = self._echo, ""
        text, stop = self._scan(self._decoder.finish())
        return echo + text + ("" if stop is not None else self._scanner.finish()), stop

    def _scan(self, text: str) -> tuple[str, str | None]:
        return self._scanner.push(text) if self.completion_tokens > self._min_tokens else (text, None)
