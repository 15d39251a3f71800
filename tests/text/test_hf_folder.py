from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.text.vocabularies import TEXTS, byte_level, write_folder
from tokenmill.errors import ModelUnreadable
from tokenmill.text.chat_template import ChatTemplate
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.wire.messages import ChatPrompt


def load(path: Path, **files: dict[str, Any]) -> Tokenizer:
    return Tokenizer.load(write_folder(path / "model", byte_level(), **files))


def test_tokenizer_json_alone(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    assert tokenizer.chat_template is None
    assert tokenizer.end_ids == ()
    assert tokenizer.special_ids == {0, 1, 2, 3}
    assert [tokenizer.encode(text) for text in TEXTS] == [byte_level().encode(text).ids for text in TEXTS]


def test_matches_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
    }
    tokenizer = load(tmp_path, tokenizer_config=config)
    oracle = PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    assert tokenizer.special_tokens.items() >= {("bos_token", "<s>"), ("eos_token", "</s>")}
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == oracle(text).input_ids
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def test_end_ids_and_sampling_defaults(tmp_path: Path) -> None:
    generation = {"eos_token_id": [3, 1], "temperature": 0.6, "top_k": 20, "top_p": 0.9, "do_sample": True}
    tokenizer = load(tmp_path, generation_config=generation, tokenizer_config={"eos_token": "</s>"})
    assert tokenizer.end_ids == (3, 1, 2)
    assert tokenizer.sampling_defaults == {"temperature": 0.6, "top_k": 20, "top_p": 0.9}


def test_end_id_of_the_model_config_is_a_fallback(tmp_path: Path) -> None:
    assert load(tmp_path, config={"eos_token_id": 3}).end_ids == (3,)
    assert load(tmp_path, config={"eos_token_id": 3}, generation_config={"eos_token_id": 2}).end_ids == (2,)


def test_template_from_each_place(tmp_path: Path) -> None:
    assert load(tmp_path, tokenizer_config={"chat_template": "one"}).chat_template == "one"
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "two"}]
    assert load(tmp_path, tokenizer_config={"chat_template": named}).chat_template == "two"
    named += [{"name": "tool_use", "template": "\n  {{ tools[0].function.name }}\n"}]
    named[1]["template"] = "\n  {{ messages[0].content }}\n"
    template = ChatTemplate(load(tmp_path, tokenizer_config={"chat_template": named}).chat_template or "")
    assert template.takes_tools
    for tools, shown in (([{"function": {"name": "add"}}], "add"), (None, "hi")):
        assert template.render(ChatPrompt(messages=[{"role": "user", "content": "hi"}], tools=tools)) == f"\n  {shown}"
    (tmp_path / "model" / "chat_template.jinja").write_text("thrée", "utf-8")
    assert Tokenizer.load(tmp_path / "model").chat_template == "thrée"


def test_tokens_that_only_the_config_declares(tmp_path: Path) -> None:
    size = byte_level().get_vocab_size()
    declared = {
        str(size): {"content": "<tool>", "special": True},
        str(size + 1): {"content": "<note>", "special": False},
        str(size + 9): {"content": "<elsewhere>", "special": True},
    }
    config = {"added_tokens_decoder": declared, "additional_special_tokens": [{"content": "the"}]}
    tokenizer = load(tmp_path, tokenizer_config=config)
    assert tokenizer.encode("<tool><note>") == [size, size + 1]
    assert size in tokenizer.special_ids
    assert size + 1 not in tokenizer.special_ids
    assert tokenizer.vocab_size == size + 2
    the = byte_level().token_to_id("the")
    assert the in tokenizer.special_ids


def test_truncation_and_padding_in_the_file_do_not_count(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer.load(write_folder(tmp_path / "model", backend))
    assert tokenizer.encode("x y z x y z") == byte_level().encode("x y z x y z").ids


def test_folders_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(ModelUnreadable, match=r"neither tokenizer\.json nor tokenizer\.model"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelUnreadable, match="damaged"):
        Tokenizer.load(tmp_path)
    folder = write_folder(tmp_path / "model", byte_level())
    (folder / "tokenizer_config.json").write_text("[")
    with pytest.raises(ModelUnreadable, match=r"tokenizer_config\.json"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "generation_config.json", "config.json"])
@pytest.mark.parametrize("content", [b"\xff\xfe", b"{", b'{"a":' * 5000])
def test_damaged_small_files(tmp_path: Path, file: str, content: bytes) -> None:
    folder = write_folder(tmp_path / "model", byte_level())
    (folder / file).write_bytes(content)
    with pytest.raises(ModelUnreadable, match=file):
        Tokenizer.load(folder)


def test_a_template_that_is_not_text(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", byte_level())
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelUnreadable, match=r"chat_template\.jinja"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("value", [5, True, "abc", None, [1, None], {"a": 1}])
def test_odd_values_of_small_files_count_as_absent(tmp_path: Path, value: Any) -> None:
    config = {"additional_special_tokens": value, "added_tokens_decoder": value}
    ends = {"eos_token_id": 2**40, "temperature": "warm"}
    tokenizer = load(tmp_path, tokenizer_config=config, generation_config=ends)
    assert (tokenizer.end_ids, dict(tokenizer.sampling_defaults)) == ((), {})


@pytest.mark.parametrize(
    ("modules", "modes", "words"),
    [
        ([], ["cls_token"], "embeddings by cls_token"),
        ([], ["lasttoken", "mean_tokens"], "embeddings by lasttoken, mean_tokens"),
        (["Transformer", "Pooling", "Dense"], ["lasttoken"], "embeddings by Dense"),
    ],
)
def test_poolings_that_cannot_be_made_are_refused(
    tmp_path: Path, modules: list[str], modes: list[str], words: str
) -> None:
    folder = write_folder(tmp_path / "model", byte_level())
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True for mode in modes}))
    (folder / "modules.json").write_text(json.dumps([{"type": f"sentence_transformers.models.{m}"} for m in modules]))
    with pytest.raises(ModelUnreadable, match=words):
        Tokenizer.load(folder)


def test_tokens_that_a_model_must_have(tmp_path: Path) -> None:
    backend = byte_level()
    added = backend.get_vocab_size(with_added_tokens=True)
    backend.add_special_tokens(["<image>"])  # Gemma 3 has one more than its smallest model has vectors
    tokenizer = Tokenizer.load(write_folder(tmp_path / "model", backend))
    assert tokenizer.vocab_size == added + 1
    assert tokenizer.num_own_tokens == added - 1  # without <think> too
