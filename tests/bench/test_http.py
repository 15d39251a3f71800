"""`bench http`: real processes over an engine that keeps time."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tokenmill import cli
from tokenmill.bench.paced import NUM_WORDS, PacedEngine, words
from tokenmill.errors import ConfigError
from tokenmill.sched.plan import Row, StepPlan
from tokenmill.text.tokenizer import Tokenizer


@pytest.mark.server
@pytest.mark.model
@pytest.mark.parametrize("workers", ["1", "2"])
def test_figures_of_each_number_of_streams(
    default_model: Path, capfd: pytest.CaptureFixture[str], workers: str
) -> None:
    flags = ["--model", str(default_model), "--seconds", "0.5", "--rate", "400", "--api-workers", workers]
    assert cli.main(["bench", "http", "--streams", "1", "3", *flags, "--json"]) == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["streams"] for line in lines] == [1, 3]
    for line in lines:
        assert 1 <= line["tokens_a_chunk"] <= 100
        assert 0 < line["tokens_a_second"] < 2000
        assert line["cpu_ms_a_1000_tokens"] == pytest.approx(line["api_cpu_ms"] + line["detokenizer_cpu_ms"])
        assert 0 <= line["delay_p50_ms"] <= line["delay_p99_ms"]


def test_the_engine_draws_the_time_for_every_row_that_is_sampled() -> None:
    engine = PacedEngine(list(range(1000, 1000 + NUM_WORDS)), rate=1000, stream_rate=500)
    rows = tuple(Row(uid, uid, 0, 1, (5,), uid > 0) for uid in range(4))
    first, second = (engine.launch(StepPlan(step, rows)) for step in range(2))
    assert second.due - first.due == pytest.approx(0.003)
    result = second.wait()
    assert time.monotonic() >= second.due
    assert len(set(result.token_ids)) == 1
    assert len(result.token_ids) == 3
    assert 1000 <= result.token_ids[0] < 1000 + NUM_WORDS
    assert not engine.prepare()


@pytest.mark.model
def test_words_stand_alone_in_a_text(default_model: Path) -> None:
    tokenizer = Tokenizer.load(default_model)
    texts = [tokenizer.decode([token_id]) for token_id in words(tokenizer)]
    assert len(set(texts)) == NUM_WORDS
    assert all(text.startswith(" ") and text[1:].isalpha() for text in texts)


def test_a_vocabulary_without_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a vocabulary of"):
        words(Tokenizer.load(tmp_path, or_bytes=True))
