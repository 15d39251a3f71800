"""Logprobs between the detokenizer and the client: merged for slow readers, shown in OpenAI's shapes."""

from __future__ import annotations

import asyncio

from tokenmill.server.generation import Generation
from tokenmill.server.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from tokenmill.types import FinishReason, Logprob, TokenLogprobs
from tokenmill.wire.messages import TextDelta


def entry(token_id: int, text: str, logprob: float | None, offset: int = 0, *top: Logprob) -> TokenLogprobs:
    return TokenLogprobs(Logprob(token_id, text, text.encode(), logprob, 2), list(top), offset)


FIRST = entry(4, "x", None)
LIKELIEST = Logprob(8, "c", b"c", -0.25, 1)
SMILE = Logprob(9, "bytes:\\xf0", b"\xf0", -2.0, 2)
SECOND = entry(7, "ab", -1.5, 1, LIKELIEST, SMILE)


def test_what_waits_for_a_reader_loses_no_logprobs() -> None:
    async def read() -> list[TextDelta]:
        generation = Generation(1, 1)
        generation.tokenized(3, False)
        generation.add(0, TextDelta(uid=1, accepted=True, logprobs=[], prompt_logprobs=[FIRST]))
        generation.add(0, TextDelta(uid=1, logprobs=[], prompt_logprobs=[SECOND]))
        generation.add(0, TextDelta(uid=1, text="a", logprobs=[FIRST], prompt_logprobs=[]))
        generation.add(0, TextDelta(uid=1, logprobs=[SECOND], prompt_logprobs=[]))
        generation.add(0, TextDelta(uid=1, finish_reason=FinishReason.ABORT))
        return [delta async for batch in generation.deltas() for _, delta in batch]

    (delta,) = asyncio.run(read())
    assert (delta.text, delta.finish_reason) == ("a", FinishReason.ABORT)
    assert delta.prompt_logprobs == [FIRST, SECOND]
    assert delta.logprobs == [FIRST, SECOND]


def test_the_shape_of_chats() -> None:
    assert chat_logprobs(None) is None
    assert chat_logprobs([]) == {"content": [], "refusal": None}
    shown = chat_logprobs([SECOND])
    assert shown is not None
    assert shown["content"] == [
        {
            "token": "ab",
            "logprob": -1.5,
            "bytes": [97, 98],
            "top_logprobs": [
                {"token": "c", "logprob": -0.25, "bytes": [99]},
                {"token": "bytes:\\xf0", "logprob": -2.0, "bytes": [240]},
            ],
        }
    ]


def test_the_shape_of_completions() -> None:
    assert completion_logprobs(None) is None
    assert completion_logprobs([FIRST, SECOND, entry(8, "c", -0.5, 3)]) == {
        "tokens": ["x", "ab", "c"],
        "token_logprobs": [None, -1.5, -0.5],
        "top_logprobs": [None, {"c": -0.25, "bytes:\\xf0": -2.0, "ab": -1.5}, {"c": -0.5}],
        "text_offset": [0, 1, 3],
    }


def test_the_shape_of_prompts() -> None:
    assert prompt_logprobs([FIRST, SECOND]) == [
        None,
        {
            "7": {"logprob": -1.5, "rank": 2, "decoded_token": "ab"},
            "8": {"logprob": -0.25, "rank": 1, "decoded_token": "c"},
            "9": {"logprob": -2.0, "rank": 2, "decoded_token": "bytes:\\xf0"},
        },
    ]
