"""Columns of ids to deltas of text, and the loop around it."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill.text.detokenizer import TextStream
from tokenmill.text.detokenizer_stage import DetokenizerStage
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.text.worker import detokenizer_loop
from tokenmill.types import FinishReason
from tokenmill.wire.channel import MemoryChannel
from tokenmill.wire.messages import (
    Abort,
    ErrorInfo,
    Finish,
    OpenText,
    Stop,
    TextDelta,
    TextOptions,
    Timings,
    TokenBatch,
    pack_ids,
    unpack_ids,
)


@pytest.fixture
def text_stage(byte_tokenizer: Tokenizer) -> DetokenizerStage:
    return DetokenizerStage(byte_tokenizer)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def step(rows: dict[int, list[int]], **columns: Any) -> TokenBatch:
    token_ids = [token_id for ids in rows.values() for token_id in ids]
    counts = [len(ids) for ids in rows.values()]
    return TokenBatch(uids=list(rows), counts=counts, token_ids=pack_ids(token_ids), **columns)


def deltas(stage: DetokenizerStage, batch: TokenBatch) -> tuple[list[TextDelta], list[int]]:
    made, aborts = stage.process(batch)
    return ([] if made is None else made.deltas), aborts


def test_a_request_from_first_token_to_last(text_stage: DetokenizerStage, byte_tokenizer: Tokenizer) -> None:
    the, fox = ids_of(byte_tokenizer, "the"), ids_of(byte_tokenizer, " fox")
    assert text_stage.process(OpenText(5, TextOptions())) == (None, [])
    assert deltas(text_stage, step({}, accepted=[5])) == ([TextDelta(uid=5, accepted=True)], [])
    made, aborts = deltas(text_stage, step({5: the}, admitted=[(5, 3)]))
    count = len(the)
    assert made == [TextDelta(uid=5, text="the", token_ids=pack_ids(the), completion_tokens=count, cached_tokens=3)]
    finish = Finish(uid=5, reason=FinishReason.LENGTH)
    (last,), more = deltas(text_stage, step({5: fox}, admitted=[(5, 9)], finished=[finish]))
    assert (last.text, last.finish_reason, last.stop_reason) == (" fox", FinishReason.LENGTH, None)
    assert (last.completion_tokens, last.cached_tokens) == (count + len(fox), 3)
    assert aborts == more == []
    assert text_stage.num_open == 0


@pytest.mark.parametrize("ends_here", [False, True])
def test_times_of_a_request_come_with_its_end(
    text_stage: DetokenizerStage, byte_tokenizer: Tokenizer, ends_here: bool
) -> None:
    (a,), (b,) = ids_of(byte_tokenizer, "a"), ids_of(byte_tokenizer, "b")
    text_stage.process(OpenText(5, TextOptions(stop=["b"] if ends_here else [])))
    finishes = [] if ends_here else [Finish(uid=5, reason=FinishReason.LENGTH)]
    for batch in (
        step({}, accepted=[5], now=10),
        step({5: [a]}, began=[(5, 12)], now=20),
        step({}, began=[(5, 25)], now=26),  # it was retracted
        step({5: [a]}, now=30),
    ):
        assert [delta.timings for delta in deltas(text_stage, batch)[0]] in ([None], [])
    (last,), _ = deltas(text_stage, step({5: [b]}, finished=finishes, now=40))
    assert last.timings == Timings(queued=10, began=12, first=20, last=40)
    text_stage.process(OpenText(6, TextOptions()))
    never = step({}, accepted=[6], finished=[Finish(uid=6, reason=FinishReason.ABORT)], now=50)
    assert deltas(text_stage, never)[0][0].timings == Timings(queued=50, began=50, first=50, last=50)


def test_stop_string_ends_the_request_here_and_in_the_scheduler(
    text_stage: DetokenizerStage, byte_tokenizer: Tokenizer
) -> None:
    text_stage.process(OpenText(5, TextOptions(stop=["o"])))
    ids = ids_of(byte_tokenizer, "f") + ids_of(byte_tokenizer, "o") + ids_of(byte_tokenizer, "x")
    (delta,), aborts = deltas(text_stage, step({5: ids}))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("f", FinishReason.STOP, "o")
    assert (delta.completion_tokens, unpack_ids(delta.token_ids)) == (2, ids[:2])
    assert aborts == [5]
    late = step({5: ids}, finished=[Finish(uid=5, reason=FinishReason.ABORT)])
    assert deltas(text_stage, late) == ([], [])


def test_stop_string_in_the_last_step_needs_no_abort(text_stage: DetokenizerStage, byte_tokenizer: Tokenizer) -> None:
    text_stage.process(OpenText(5, TextOptions(stop=["x"])))
    finish = Finish(uid=5, reason=FinishReason.LENGTH)
    (delta,), aborts = deltas(text_stage, step({5: ids_of(byte_tokenizer, "fox")}, finished=[finish]))
    assert (delta.text, delta.finish_reason, delta.stop_reason, aborts) == ("fo", FinishReason.STOP, "x", [])


@pytest.mark.parametrize(
    ("finish", "include", "text", "stop_reason"),
    [
        (Finish(uid=5, reason=FinishReason.STOP, is_stop_token=True), False, "a", None),
        (Finish(uid=5, reason=FinishReason.STOP, is_stop_token=True, stop_token=66), False, "a", 66),
        (Finish(uid=5, reason=FinishReason.STOP, is_stop_token=True, stop_token=66), True, "ab", 66),
    ],
)
def test_stop_tokens(
    text_stage: DetokenizerStage,
    byte_tokenizer: Tokenizer,
    finish: Finish,
    include: bool,
    text: str,
    stop_reason: int | None,
) -> None:
    text_stage.process(OpenText(5, TextOptions(include_stop=include)))
    ids = ids_of(byte_tokenizer, "a") + ids_of(byte_tokenizer, "b")
    (delta,), _ = deltas(text_stage, step({5: ids}, finished=[finish]))
    assert (delta.text, delta.stop_reason, delta.completion_tokens) == (text, stop_reason, 2)


def test_what_is_held_comes_out_at_the_end(text_stage: DetokenizerStage, byte_tokenizer: Tokenizer) -> None:
    text_stage.process(OpenText(5, TextOptions(stop=["ab!"])))
    cut = ids_of(byte_tokenizer, "ab") + ids_of(byte_tokenizer, "\U0001f600")[:-1]
    (first,), _ = deltas(text_stage, step({5: cut}))
    error = ErrorInfo("the engine died")
    finish = Finish(uid=5, reason=FinishReason.ERROR, error=error)
    (last,), _ = deltas(text_stage, step({}, finished=[finish]))
    assert (first.text + last.text, last.finish_reason, last.error) == ("ab\ufffd", FinishReason.ERROR, error)


def test_requests_without_text(text_stage: DetokenizerStage) -> None:
    error = ErrorInfo("too long", "BadRequestError", 400)
    finished = [
        Finish(uid=1, reason=FinishReason.ERROR, error=error),
        Finish(uid=2, reason=FinishReason.ABORT),
    ]
    made, aborts = deltas(text_stage, step({3: [9]}, accepted=[4], finished=finished))
    refused = TextDelta(uid=1, finish_reason=FinishReason.ERROR, error=error)
    assert made == [TextDelta(uid=4, accepted=True), refused]
    assert aborts == []


def test_a_bug_ends_one_request_only(
    text_stage: DetokenizerStage, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for uid in (1, 2):
        text_stage.process(OpenText(uid, TextOptions()))
    push = TextStream.push

    def faulty(stream: TextStream, token_ids: list[int], ends_with_stop_token: bool = False) -> Any:
        if len(token_ids) == 2:
            raise KeyError("bug")
        return push(stream, token_ids, ends_with_stop_token)

    monkeypatch.setattr(TextStream, "push", faulty)
    a = ids_of(byte_tokenizer, "a")
    (bad, good), aborts = deltas(text_stage, step({1: a + a, 2: a}))
    assert bad.error is not None
    assert (bad.error.status, bad.finish_reason, aborts) == (500, FinishReason.ERROR, [1])
    assert good.text == "a"
    assert text_stage.num_open == 1


def test_detokenizer_loop(text_stage: DetokenizerStage, byte_tokenizer: Tokenizer) -> None:
    inbox, scheduler, server = MemoryChannel[Any](), MemoryChannel[Any](), MemoryChannel[Any]()
    a = ids_of(byte_tokenizer, "a")
    for message in (OpenText(1, TextOptions(stop=["a"])), step({1: a}), Stop(), step({1: a})):
        inbox.send(message)
    detokenizer_loop(text_stage, inbox, scheduler, server)
    assert scheduler.receive() == [Abort([1])]
    ((batch),) = server.receive()
    assert [delta.stop_reason for delta in batch.deltas] == ["a"]
