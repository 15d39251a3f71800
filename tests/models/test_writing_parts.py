"""Models that also see are loaded for what they write."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.test_families import PROMPT, assert_near, harness_of
from tests.support.families import GEMMA, SIZES

SEEING = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
SEEING |= {"image_size": 32, "patch_size": 16}


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma3_with_eyes(tmp_path: Path, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    text = {**SIZES, **GEMMA, "model_type": "gemma3_text"}
    config = transformers.Gemma3Config(text_config=text, vision_config=SEEING, mm_tokens_per_image=4)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(torch.randn(tensor.shape) * (0.2 if tensor.dim() < 2 or "embed" in name else 0.1))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("language_model.model.") for name in tensors)
    renamed = {name.replace("language_model.model.", prefix, 1): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([PROMPT])).logits[0]
    assert_near(harness_of(tmp_path).logits([(0, 0, PROMPT)], of_all_tokens=True), expected)
    assert "tensors for images are left out" in caplog.text


def test_values_that_published_files_leave_out(tmp_path: Path) -> None:
    from tokenmill.weights.hf_folder import read_spec

    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path)
    expected = transformers.Gemma3TextConfig(**text)
    assert (spec.vocab_size, spec.num_heads, spec.head_dim) == (
        expected.vocab_size,
        expected.num_attention_heads,
        expected.head_dim,
    )
    assert (spec.num_kv_heads, spec.max_position) == (expected.num_key_value_heads, expected.max_position_embeddings)
    assert (spec.rope.factor, spec.window, len(spec.window_layers)) == (8.0, 1024, 29)
