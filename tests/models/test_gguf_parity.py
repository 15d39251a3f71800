"""Checkpoints written as GGUF compute what the folders do that they were made from."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from torch import Tensor

from tests.support.harness import Harness
from tests.weights.gguf_convert import convert
from tokenmill.attention.select import make_backends
from tokenmill.errors import ModelUnreadable
from tokenmill.models.load import load_model
from tokenmill.parallel.group import Group
from tokenmill.weights.checkpoint import open_checkpoint

PROMPT = [(7 * i) % 89 + 1 for i in range(70)]
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biased": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama-llama3": {"rope_parameters": {**LLAMA3, "rope_theta": 500.0, "original_max_position_embeddings": 32}},
    "qwen3": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
}


def make_folder(folder: Path, family: str, **options: Any) -> Path:
    """A random model of transformers' own making; norms are not all one."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family.partition("-")[0], **SIZES | options)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.2 if parameter.ndim == 1 else 1.5 * parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn_like(parameter) * scale + (parameter if name.endswith("norm.weight") else 0))
    model.save_pretrained(folder)
    return folder


def logits_of(path: Path) -> Tensor:
    checkpoint = open_checkpoint(path)
    backend = make_backends("reference", checkpoint.spec)
    model = load_model(checkpoint, dtype=torch.float32, group=Group.solo(), attention=backend)
    return Harness(model, backend).logits([(0, 0, PROMPT)], of_all_tokens=True)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path / "folder", name, **MODELS[name])
    expected = logits_of(folder)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits_of(convert(folder, tmp_path / "m.gguf")), expected, atol=1e-4, rtol=1e-4)


def test_quantised_weights_come_near(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "folder", "llama")
    expected = logits_of(folder)
    found = logits_of(convert(folder, tmp_path / "m.gguf", kind=GGMLQuantizationType.Q8_0))
    assert 0 < (found - expected).norm() < 0.05 * expected.norm()


def test_a_split_file_is_read_as_one(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "folder", "llama")
    first = convert(folder, tmp_path / "m.gguf", tensors_per_file=8)
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
