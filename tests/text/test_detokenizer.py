from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from tokenmill.text.detokenizer import WINDOW, ByteDecoder, StopScanner, TextStream
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.text.vocabulary import Vocabulary
from tokenmill.wire.messages import TextOptions, pack_ids

EMOJI = "😀".encode()
BYTES = st.binary(max_size=12) | st.text(max_size=4).map(lambda text: text.encode("utf-8", "surrogatepass"))


def one_byte_tokens(token_id: int) -> bytes:
    return bytes([token_id])


def chunks(data: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def stream_text(stream: TextStream, parts: list[list[int]]) -> tuple[str, str | None, list[str]]:
    """All text, the stop string, and the single deltas."""
    deltas = []
    for part in parts:
        text, stop = stream.push(part)
        deltas.append(text)
        if stop is not None:
            return "".join(deltas), stop, deltas
    text, stop = stream.finish()
    return "".join([*deltas, text]), stop, [*deltas, text]


@given(st.text(max_size=6))
def test_a_character_is_shown_with_its_last_byte(text: str) -> None:
    decoder = ByteDecoder(one_byte_tokens, frozenset())
    for character in text:
        *first, last = character.encode()
        assert [*map(decoder.push, first)] == [""] * len(first)
        assert decoder.push(last) == character


@given(BYTES)
def test_bytes_one_by_one_give_the_whole_text(data: bytes) -> None:
    decoder = ByteDecoder(one_byte_tokens, frozenset())
    assert "".join(map(decoder.push, data)) + decoder.finish() == data.decode("utf-8", "replace")


@given(st.data())
def test_any_split_gives_the_whole_text(byte_tokenizer: Tokenizer, piece_tokenizer: Tokenizer, data: Any) -> None:
    tokenizer = data.draw(st.sampled_from([byte_tokenizer, piece_tokenizer]))
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=6))
    skip = data.draw(st.booleans())
    stream = TextStream(tokenizer, TextOptions(skip_special_tokens=skip))
    text, stop, _ = stream_text(stream, chunks(ids, cuts))
    assert stop is None
    assert text.removeprefix(" " if tokenizer.strips_first_space else "") == tokenizer.decode(ids, skip)
    assert stream.completion_tokens == len(ids)
    echo = TextStream(tokenizer, TextOptions(skip_special_tokens=skip, echo_ids=pack_ids(ids[:5])))
    assert stream_text(echo, chunks(ids[5:], cuts))[0] == tokenizer.decode(ids, skip)


def test_an_unfinished_character_of_the_prompt() -> None:
    whole = ByteDecoder(one_byte_tokens, frozenset(), [0x41, *EMOJI[:2]])
    assert [whole.push(byte) for byte in EMOJI[2:]] == ["", "😀"]
    other = ByteDecoder(one_byte_tokens, frozenset(), EMOJI[:3])
    assert other.push(0x61) == "a"
    stray = ByteDecoder(one_byte_tokens, frozenset(), EMOJI[:2])
    assert [stray.push(0x9F), stray.push(0x61)] == ["", "\ufffda"]
    assert ByteDecoder(one_byte_tokens, frozenset(), EMOJI[:3]).finish() == ""


def test_pieces_keep_their_first_space_after_a_prompt(piece_tokenizer: Tokenizer) -> None:
    prompt = piece_tokenizer.encode("the quick")
    ids = piece_tokenizer.encode("brown fox", add_special_tokens=False)
    stream = TextStream(piece_tokenizer, TextOptions(prompt_tail=pack_ids(prompt[-4:])))
    assert stream_text(stream, [ids])[0] == " brown fox"


def naive_stop(texts: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    """Look at the text letter by letter; the first complete stop wins, the longest of those."""
    whole = "".join(texts)
    for end in range(len(whole) + 1):
        found = [stop for stop in stops if whole[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return whole[: end if include else end - len(longest)], longest
    return whole, None


@given(
    st.lists(st.text("ab ", max_size=5), max_size=8),
    st.lists(st.text("ab ", min_size=1, max_size=6), min_size=1, max_size=4),
    st.booleans(),
)
def test_stops_lose_nothing_and_leak_nothing(texts: list[str], stops: list[str], include: bool) -> None:
    scanner = StopScanner(stops, include)
    shown, seen = "", ""
    stop: str | None = None
    for text in texts:
        piece, stop = scanner.push(text)
        seen += text
        shown += piece
        if stop is not None:
            break
        held = seen[len(shown) :]
        longest = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert len(held) == longest
    if stop is None:
        shown += scanner.finish()
    assert (shown, stop) == naive_stop(texts, stops, include)


@pytest.fixture
def words() -> Tokenizer:
    """Tokens " a", "\\n\\n", "é"'s two bytes, and the special "<end>"."""
    vocab = {"Ġa": 0, "ĊĊ": 1, "Ã": 2, "©": 3, "<end>": 4}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(Vocabulary(backend=backend, end_ids=(4,), special_tokens={}))


@pytest.mark.parametrize(
    ("stops", "ids", "text", "stop", "count"),
    [
        ([" a"], [0, 0], "", " a", 1),
        (["a a a a", "a a"], [0, 0, 0, 0], " ", "a a", 2),
        (["a"], [0, 0], " ", "a", 1),
        (["éé"], [2, 3, 2, 3, 0], "", "éé", 4),
        (["\n"], [0, 1, 0], " a", "\n", 2),
        (["<end>"], [4, 0], " a", None, 2),
        (["a b"], [0, 0], " a a", None, 2),
        (["\ufffd"], [0, 2], " a", "\ufffd", 2),
    ],
)
def test_stops(words: Tokenizer, stops: list[str], ids: list[int], text: str, stop: str | None, count: int) -> None:
    for parts in ([ids], [[token_id] for token_id in ids]):
        stream = TextStream(words, TextOptions(stop=stops))
        assert stream_text(stream, parts)[:2] == (text, stop)
        assert stream.completion_tokens == count


def test_stop_text_kept_on_request(words: Tokenizer) -> None:
    stream = TextStream(words, TextOptions(stop=["a a"], include_stop=True))
    assert stream_text(stream, [[0, 0, 0]])[:2] == (" a a", "a a")


def test_stop_in_shown_special_token(words: Tokenizer) -> None:
    stream = TextStream(words, TextOptions(stop=["<end>"], skip_special_tokens=False))
    assert stream_text(stream, [[0, 4, 0]])[:2] == (" a", "<end>")


def test_text_before_min_tokens_is_no_stop(words: Tokenizer) -> None:
    stream = TextStream(words, TextOptions(stop=["a a"], min_tokens=3))
    text, stop, deltas = stream_text(stream, [[0], [0], [0], [0], [0], [0]])
    assert (text, stop) == (" a a a ", "a a")
    assert deltas[:3] == [" a", " a", " a"]
    assert stream.completion_tokens == 5


def test_stop_token_text(words: Tokenizer) -> None:
    for include, expected in ((False, " a"), (True, " a\n\n")):
        stream = TextStream(words, TextOptions(include_stop=include))
        assert stream.push([0, 1], ends_with_stop_token=True) == (expected, None)
        assert stream.completion_tokens == 2


def test_echo_comes_first_and_is_no_stop(words: Tokenizer) -> None:
    stream = TextStream(words, TextOptions(echo_text="x a a", stop=["a a"], prompt_tail=pack_ids([0, 2])))
    assert [stream.push([3])[0], stream.push([0])[0]] == ["x a aé", " "]
    ids = TextStream(words, TextOptions(echo_ids=pack_ids([0, 0, 2]), stop=["a a"]))
    assert ids.push([3]) == (" a aé", None)
    nothing = TextStream(words, TextOptions(echo_text="x"))
    assert nothing.finish() == ("x", None)


def test_long_stop_strings_cost_nothing_until_they_match(words: Tokenizer) -> None:
    stream = TextStream(words, TextOptions(stop=["b" * 1_000_000, " a" * 100_000]))
    text, stop, _ = stream_text(stream, [[0] * 99_999 + [1]])
    assert (len(text), stop) == (2 * 99_999 + 2, None)


def word_piece() -> Tokenizer:
    vocab = {"[UNK]": 0, "un": 1, "##aff": 2, "##able": 3, ".": 4, "hello": 5, "[SEP]": 6}
    backend = Backend(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[SEP]"])
    return Tokenizer(Vocabulary(backend=backend, end_ids=(), special_tokens={}))


@given(st.lists(st.integers(0, 6), max_size=40))
def test_other_decoders_go_through_a_window(ids: list[int]) -> None:
    tokenizer = word_piece()
    stream = TextStream(tokenizer, TextOptions())
    assert tokenizer.token_bytes is None
    text, _, deltas = stream_text(stream, [[token_id] for token_id in ids])
    assert text == tokenizer.decode(ids)
    assert len(deltas) > WINDOW or len(deltas) == len(ids) + 1
