"""Logprobs come with their text: held back as it is, cut where it is, and placed where it stands."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from tokenmill.text.detokenizer_stage import DetokenizerStage
from tokenmill.text.logprobs import LogprobStream, PromptLogprobs
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.types import FinishReason
from tokenmill.wire.messages import Finish, OpenText, TextDelta, TextOptions, TokenBatch, pack_ids


def record(logprob: float, rank: int = 1, *top: tuple[int, float]) -> bytes:
    return struct.pack("<fi" + "if" * len(top), logprob, rank, *(number for pair in top for number in pair))


class Reader:
    """One request at a detokenizer: its deltas' texts and logprobs."""

    def __init__(self, tokenizer: Tokenizer, **options: Any) -> None:
        self.stage = DetokenizerStage(tokenizer)
        self.stage.process(OpenText(1, TextOptions(**{"logprobs": 0} | options)))

    def send(self, *token_ids: int, finish: Finish | None = None, **fields: Any) -> TextDelta:
        records = b"".join(record(-0.5 - token_id) for token_id in token_ids)
        message = TokenBatch(
            uids=[1] if token_ids else [],
            counts=[len(token_ids)] if token_ids else [],
            token_ids=pack_ids(token_ids),
            logprobs={1: records} if token_ids else {},
            finished=[finish] if finish else [],
            **fields,
        )
        batch, _ = self.stage.process(message)
        assert batch is not None
        (delta,) = batch.deltas
        return delta


def shown(delta: TextDelta) -> list[tuple[str, int]]:
    assert delta.logprobs is not None
    return [(its.token.text, its.offset) for its in delta.logprobs]


END = Finish(uid=1, reason=FinishReason.LENGTH)
STOPPED = Finish(uid=1, reason=FinishReason.STOP, is_stop_token=True)


def test_a_record_becomes_an_entry(byte_tokenizer: Tokenizer) -> None:
    (fox,) = byte_tokenizer.encode("x", add_special_tokens=False)[:1]
    stream = LogprobStream(byte_tokenizer, 2)
    stream.push([fox], [4], record(-1.5, 7, (fox + 1, -0.25), (fox, -1.5)))
    (entry,) = stream.release(None)
    assert (entry.token.token_id, entry.token.text, entry.token.data) == (fox, "x", b"x")
    assert (entry.token.logprob, entry.token.rank, entry.offset) == (-1.5, 7, 4)
    assert [(its.token_id, its.logprob, its.rank) for its in entry.top] == [(fox + 1, -0.25, 1), (fox, -1.5, 2)]


def test_bytes_of_a_split_character_are_told_and_come_with_it(byte_tokenizer: Tokenizer) -> None:
    ids = [byte_tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ab"]
    assert byte_tokenizer.token_bytes is not None
    spelled = {byte_tokenizer.token_bytes(token_id): token_id for token_id in range(byte_tokenizer.vocab_size)}
    smile = [spelled[bytes([byte])] for byte in "\U0001f600".encode()]
    reader = Reader(byte_tokenizer)
    assert shown(reader.send(ids[0])) == [("a", 0)]
    assert [shown(reader.send(token_id)) for token_id in smile[:3]] == [[], [], []]
    delta = reader.send(smile[3])
    assert delta.text == "\U0001f600"
    assert shown(delta) == [(f"bytes:\\x{byte:02x}", 1) for byte in delta.text.encode()]
    assert delta.logprobs is not None
    assert b"".join(its.token.data for its in delta.logprobs) == delta.text.encode()
    assert shown(reader.send(ids[1], smile[0], finish=END)) == [("b", 2), ("bytes:\\xf0", 3)]


@pytest.mark.parametrize(("include", "kept"), [(False, 1), (True, 3)])
def test_entries_end_where_a_stop_string_cuts_the_text(byte_tokenizer: Tokenizer, include: bool, kept: int) -> None:
    ids = [byte_tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcd"]
    reader = Reader(byte_tokenizer, stop=["bc"], include_stop=include)
    assert shown(reader.send(ids[0])) == [("a", 0)]
    assert shown(reader.send(ids[1])) == []  # it may be the stop string's beginning, and so may its entry
    delta = reader.send(ids[2], ids[3])
    assert (delta.stop_reason, delta.text) == ("bc", "bc" if include else "")
    assert shown(delta) == [("b", 1), ("c", 2)][: kept - 1]


def test_what_was_held_back_comes_at_the_end(byte_tokenizer: Tokenizer) -> None:
    ids = [byte_tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ab"]
    reader = Reader(byte_tokenizer, stop=["bc"])
    assert shown(reader.send(*ids)) == [("a", 0)]
    assert shown(reader.send(finish=END)) == [("b", 1)]


@pytest.mark.parametrize(("include", "count"), [(False, 1), (True, 2)])
def test_a_stop_token_has_an_entry_only_if_it_is_kept(byte_tokenizer: Tokenizer, include: bool, count: int) -> None:
    (letter,) = byte_tokenizer.encode("a", add_special_tokens=False)[:1]
    delta = Reader(byte_tokenizer, include_stop=include).send(letter, 2, finish=STOPPED)
    assert len(shown(delta)) == count
    assert delta.completion_tokens == 2


def test_offsets_stand_behind_an_echoed_prompt(byte_tokenizer: Tokenizer) -> None:
    prompt = byte_tokenizer.encode("abc", add_special_tokens=False)
    options = {"echo_text": "abc", "prompt_ids": pack_ids(prompt), "prompt_logprobs": 0}
    reader = Reader(byte_tokenizer, **options)
    records = b"".join(record(-1.0) for _ in prompt[1:])
    delta = reader.send(prompt[0], prompt[1], prompt_logprobs={1: (1, records)})
    assert delta.text.startswith("abc")
    assert delta.prompt_logprobs is not None
    starts = [its.offset for its in delta.prompt_logprobs]
    assert [delta.text[start] for start in starts] == [its.token.text[0] for its in delta.prompt_logprobs]
    assert shown(delta)[0][1] == 3


def test_records_of_a_prompt_that_come_again_count_once(byte_tokenizer: Tokenizer) -> None:
    prompt = PromptLogprobs(byte_tokenizer, 0, [5, 6, 7, 8, 9], [0] * 5)
    values = [record(-float(place)) for place in range(5)]
    prompt.push(1, values[1] + values[2])
    prompt.push(1, values[1])
    prompt.push(2, values[2] + values[3])
    prompt.push(1, b"")
    prompt.push(4, values[4])
    entries = prompt.take()
    assert [(its.token.token_id, its.token.logprob) for its in entries] == [(5, None)] + [
        (5 + place, -float(place)) for place in range(1, 5)
    ]
    assert prompt.take() == []


def test_nothing_of_the_output_is_shown_of_a_prompt_alone(byte_tokenizer: Tokenizer) -> None:
    reader = Reader(byte_tokenizer, is_prompt_only=True, echo_text="abc", logprobs=None)
    delta = reader.send(9, finish=END)
    assert (delta.text, delta.token_ids, delta.completion_tokens, delta.logprobs) == ("abc", b"", 0, None)
    assert delta.finish_reason is FinishReason.LENGTH
