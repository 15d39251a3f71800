"""tokenizer.json as transformers writes it for the tokenizer classes of the families."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.text.test_sentence_piece import GEMMA, LLAMA, ODD, train
from tests.text.vocabularies import byte_level
from tokenmill.text.sentence_piece import merges_by_score, read_pieces
from tokenmill.text.tokenizer import Tokenizer


def pieces(folder: Path, options: dict[str, Any]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    found = read_pieces(train(folder / "pieces", **options) / "tokenizer.model")
    return {token: index for index, token in enumerate(found.tokens)}, merges_by_score(found)


def byte_pairs() -> tuple[dict[str, int], list[tuple[str, str]]]:
    backend = byte_level()
    merges = json.loads(backend.to_str())["model"]["merges"]
    return backend.get_vocab(with_added_tokens=True), [tuple(merge) for merge in merges]


ENDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CLASSES: dict[str, Callable[[Path], Any]] = {
    "llama": lambda folder: transformers.LlamaTokenizer(*pieces(folder, LLAMA), **ENDS),
    "llama-legacy": lambda folder: transformers.LlamaTokenizer(*pieces(folder, LLAMA), **ENDS, legacy=True),
    "gemma": lambda folder: transformers.GemmaTokenizer(*pieces(folder, GEMMA), **ENDS),
    "qwen2": lambda folder: transformers.Qwen2Tokenizer(*byte_pairs(), eos_token="</s>", pad_token="</s>"),
    "olmo2": lambda folder: transformers.GPT2Tokenizer(*byte_pairs(), **ENDS),
}


@pytest.mark.parametrize("family", CLASSES)
def test_ids_and_texts_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    truth = CLASSES[family](tmp_path)
    truth.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
    tokenizer = Tokenizer.load(tmp_path)
    draw = random.Random(0)
    texts = [*ODD, *("".join(draw.choices("the them fox 12 \t\né今日's\r", k=40)) for _ in range(100))]
    for text in texts:
        for adds in (False, True):
            ids = tokenizer.encode(text, add_special_tokens=adds)
            assert ids == truth(text, add_special_tokens=adds).input_ids, text
        shown = truth.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids) == shown, text
    assert tokenizer.special_tokens["eos_token"] == "</s>"
    assert tokenizer.end_ids == (truth.eos_token_id,)
