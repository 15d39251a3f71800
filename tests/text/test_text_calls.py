"""What tokenizers answer to those who ask them."""

from __future__ import annotations

from tests.text.test_worker import LIMITS, run_tokenizer_loop
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.text.worker import TokenizerStage
from tokenmill.wire.messages import CallAnswer, ChatPrompt, TextCall, pack_ids


def test_loop_tokenizes_and_detokenizes_for_those_who_ask(byte_tokenizer: Tokenizer) -> None:
    stage = TokenizerStage(byte_tokenizer, None, LIMITS)
    ids = byte_tokenizer.encode("ab")
    calls = [
        TextCall(serial=1, text="ab", with_strings=True),
        TextCall(serial=2, text=""),
        TextCall(serial=3, token_ids=pack_ids(ids)),
        TextCall(serial=4, token_ids=pack_ids([LIMITS.vocab_size])),
        TextCall(serial=5, text="a" * 10_000_000),
        TextCall(serial=6, chat=ChatPrompt(messages=[{"role": "user", "content": "x"}])),
    ]
    passed_on, answers = run_tokenizer_loop(stage, calls)
    assert passed_on == []
    strings = list(map(byte_tokenizer.token_string, ids))
    counts = {"max_model_len": LIMITS.max_model_len, "count": len(ids), "tokens": ids}
    assert answers[0] == CallAnswer(1, counts | {"token_strs": strings})
    assert (answers[1].data["tokens"], answers[1].data["token_strs"]) == ([], None)
    assert answers[2].data == {"prompt": "ab"}
    assert [answer.error.param for answer in answers[3:]] == ["tokens", "prompt", "messages"]
