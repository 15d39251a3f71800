from __future__ import annotations

from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from tokenmill.text.grammar import Matchers, Vocabulary, lark_source
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.text.vocabulary import Vocabulary as TextVocabulary
from tokenmill.types import StructuredOutputs


class Walk:
    """A matcher, by text."""

    def __init__(self, vocabulary: Vocabulary, **wanted: object) -> None:
        self.vocabulary = vocabulary
        matchers = Matchers(lambda: vocabulary)
        self.matcher, _ = matchers.make(StructuredOutputs(**wanted))  # type: ignore[arg-type]
        matchers.close()

    def allowed(self) -> Iterator[int]:
        mask = self.matcher.compute_bitmask()
        return (i for i in range(len(self.vocabulary.texts)) if mask[i >> 3] >> (i & 7) & 1)

    def texts(self) -> set[bytes]:
        return {self.vocabulary.texts[i] for i in self.allowed()}


def test_masks_hold_every_token_that_fits_and_no_special_one(byte_tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary.of(byte_tokenizer, 410)  # 9 ids have no token
    assert len(vocabulary.texts) == 411
    walk = Walk(vocabulary, regex="(?s:.*)")
    texts = [text for i, text in enumerate(vocabulary.texts) if i not in vocabulary.special_ids]
    whole = {text for text in texts if text and is_utf8(text)}
    assert whole <= walk.texts() <= {*texts, *(vocabulary.texts[i] for i in vocabulary.end_ids)}
    assert b"" not in walk.texts()
    theirs = {text for text in whole if "the ".startswith(text.decode())}
    assert Walk(vocabulary, regex="the ").texts() == theirs
    assert len(theirs) > 1  # forced text may be spelled in any way
    named = Walk(vocabulary, grammar="start: <|user|> /a/")
    assert [vocabulary.texts[i] for i in named.allowed()] == [b"<|user|>"]


def is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_what_may_follow_depends_on_the_text_alone(default_tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary.of(default_tokenizer, 49152)
    matchers = Matchers(lambda: vocabulary)
    wanted = StructuredOutputs(
        json={"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    )
    text = '{"name": "Ada Lovelace'
    one_by_one, at_once, by_letters = (matchers.make(wanted)[0] for _ in range(3))
    ids = default_tokenizer.encode(text)
    for token_id in ids:
        one_by_one.compute_bitmask()
        assert one_by_one.consume_tokens([token_id])
    assert at_once.consume_tokens(ids)
    assert by_letters.consume_tokens([token_id for letter in text for token_id in default_tokenizer.encode(letter)])
    masks = {matcher.compute_bitmask() for matcher in (one_by_one, at_once, by_letters)}
    assert len(masks) == 1
    matchers.close()


def test_what_copies_share_is_replaced_when_it_is_worn(byte_tokenizer: Tokenizer) -> None:
    matchers = Matchers(lambda: Vocabulary.of(byte_tokenizer, 410))
    wanted = StructuredOutputs(regex="a+")
    (first, shared), (second, same) = matchers.make(wanted), matchers.make(wanted)
    assert shared is same
    assert first is not second
    _, other = matchers.make(wanted, shared)
    assert other is not shared
    assert matchers.make(wanted, shared)[1] is matchers.make(wanted)[1] is other
    matchers.close()


def test_a_spare_id_may_stand_for_the_end() -> None:
    vocabulary = Vocabulary([b"a", b"b", b"<end>"], [2], [2])
    walk = Walk(vocabulary, regex="a+b")
    assert list(walk.allowed()) == [0]
    assert walk.matcher.consume_tokens([0, 1])
    assert list(walk.allowed()) == [2]
    assert walk.matcher.is_accepting()


def test_a_vocabulary_that_decodes_only_in_lists() -> None:
    words = ["[UNK]", "the", "cat", "##s", "sat", ",", "b"]
    backend = Backend(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    tokenizer = Tokenizer(TextVocabulary(backend=backend, end_ids=(), special_tokens={}))
    assert tokenizer.token_bytes is None
    vocabulary = Vocabulary.of(tokenizer, 8)
    assert vocabulary.texts == [b" [UNK]", b" the", b" cat", b"s", b" sat", b" ,", b" b", b"", b"<end>"]
    assert vocabulary.end_ids == [8]
    walk = Walk(vocabulary, regex=" the cats? sat")
    assert walk.texts() == {b" the"}
    assert walk.matcher.consume_tokens([1, 2])
    assert walk.texts() == {b"s", b" sat"}


@pytest.mark.parametrize(
    ("wanted", "part"),
    [
        ({"choice": ["a", 'b"\n']}, 'CHOICE: "a" | "b\\"\\n"'),
        ({"regex": "a/b\n"}, "start: /a\\/b\\n/"),
        ({"json_object": True, "disable_any_whitespace": True}, '"whitespace_flexible": false}'),
        ({"json": True, "whitespace_pattern": " ?"}, '"whitespace_pattern": " ?"'),
        ({"json": {}, "strict": False}, '"lenient": true'),
        ({"json": {"x-guidance": {"lenient": True}}}, '"lenient": true'),
        ({"json": False}, "start: %json false"),
        ({"grammar": 'start: "a"'}, 'start: "a"'),
    ],
)
def test_sources(wanted: dict[str, object], part: str) -> None:
    source = lark_source(StructuredOutputs(**wanted))  # type: ignore[arg-type]
    assert part in source
    assert source.endswith('\n%llguidance {"no_forcing": true}\n')
