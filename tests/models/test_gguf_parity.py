"""Checkpoints written as GGUF compute what the folders do that they were made from."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from tests.support.families import FAMILIES, make_family
from tests.support.harness import Harness
from tests.weights.gguf_convert import convert
from tests.weights.gguf_files import read_all
from tokenmill.attention.select import make_backends
from tokenmill.errors import ModelUnreadable
from tokenmill.models.load import load_model
from tokenmill.parallel.group import Group
from tokenmill.weights.checkpoint import open_checkpoint

# What llama.cpp's files cannot say: a scale of Gemma's own, windows of Qwen2, which layers of Qwen3 have experts.
CHANGES = {"gemma2": {"query_pre_attn_scalar": 24}, "gemma3": {"query_pre_attn_scalar": 24}}
METADATA = {"gemma3": {"attention.sliding_window_pattern": 3, "rope.freq_base_swa": 500.0}}
NAMES = [name for name in FAMILIES if name != "qwen2-window" and not name.startswith("qwen3_moe-")]
PROMPT = [(7 * i) % 251 + 4 for i in range(90)]


def logits_of(path: Path) -> Tensor:
    checkpoint = open_checkpoint(path)
    backends = make_backends("reference", checkpoint.spec)
    model = load_model(checkpoint, dtype=torch.float32, group=Group.solo(), attention=backends)
    return Harness(model, backends).logits([(0, 0, PROMPT)], of_all_tokens=True)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = make_family(tmp_path / "folder", name, **CHANGES.get(name, {}))
    expected = logits_of(folder)
    assert expected.std() > 0.1
    found = logits_of(convert(folder, tmp_path / "m.gguf", metadata=METADATA.get(name)))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_quantised_weights_come_near(tmp_path: Path, name: str) -> None:
    folder = make_family(tmp_path / "folder", name)
    found = read_all(convert(folder, tmp_path / "m.gguf", kind=GGMLQuantizationType.Q8_0))
    expected = read_all(folder)
    assert found.keys() == expected.keys()
    for tensor, its in expected.items():
        assert found[tensor].shape == its.shape
        assert (found[tensor] - its).norm() < 0.01 * its.norm()


def test_a_split_file_is_read_as_one(tmp_path: Path) -> None:
    folder = make_family(tmp_path / "folder", "mistral-full")
    first = convert(folder, tmp_path / "m.gguf", tensors_per_file=14)
    assert first.name == "m-00001-of-00003.gguf"
    torch.testing.assert_close(logits_of(first), logits_of(folder), atol=1e-5, rtol=1e-5)
    second = tmp_path / "m-00002-of-00003.gguf"
    with pytest.raises(ModelUnreadable, match="part 2 of 3 of a model: name the first part"):
        open_checkpoint(second)
    second.unlink()
    with pytest.raises(ModelUnreadable, match="lacks its other parts beside it: m-00002-of"):
        open_checkpoint(first)
    with pytest.raises(ModelUnreadable, match="name the first part, called NAME-00001-of-00003"):
        open_checkpoint(first.rename(tmp_path / "renamed.gguf"))
