import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tests.weights.gguf_files import SIZES, read_all, write_gguf, write_raw
from tokenmill.errors import ModelUnreadable
from tokenmill.spec import RopeSpec
from tokenmill.weights.checkpoint import open_checkpoint
from tokenmill.weights.gguf_config import ARCHITECTURES, FLOATS, QUANTISED, spec_from_metadata
from tokenmill.weights.gguf_file import hugging_face_name


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_tensors_come_back_under_hugging_face_names(tmp_path: Path, kind: str) -> None:
    path, tensors = write_gguf(tmp_path / "m.gguf", kind=Kind[kind], attention_bias=True)
    found = read_all(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        expected = tensor
        if tensor.ndim == 2 and kind in QUANTISED:
            expected = torch.from_numpy(
                gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), Kind[kind]), Kind[kind])
            )
        elif tensor.ndim == 2:
            expected = tensor.to(getattr(torch, FLOATS[kind]))
        torch.testing.assert_close(found[name], expected, atol=0, rtol=0)


@pytest.mark.parametrize("kind", [*FLOATS, *QUANTISED])
def test_every_type_as_the_gguf_package_reads_it(tmp_path: Path, kind: str) -> None:
    raw = write_raw(tmp_path / "m.gguf", Kind[kind], rows=37, columns=512)
    found = open_checkpoint(tmp_path / "m.gguf").read("model.embed_tokens.weight", 5, 30)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, Kind[kind]))[5:30]
    assert expected.isfinite().all()
    assert expected.any()
    torch.testing.assert_close(found.float(), expected, atol=0, rtol=0)


def test_rows_of_paired_heads_can_be_read_in_parts(tmp_path: Path) -> None:
    path, tensors = write_gguf(tmp_path / "m.gguf", num_attention_heads=3, num_key_value_heads=1, hidden_size=48)
    checkpoint, name = open_checkpoint(path), "model.layers.1.self_attn.q_proj.weight"
    for start, stop in ((0, 48), (3, 4), (15, 33), (16, 32), (40, 48)):
        torch.testing.assert_close(checkpoint.read(name, start, stop), tensors[name][start:stop])


def test_spec(tmp_path: Path) -> None:
    path, _ = write_gguf(tmp_path / "m.gguf", attention_bias=True, mlp_bias=True, head_dim=20)
    spec = open_checkpoint(path).spec
    assert (spec.family, spec.vocab_size, spec.hidden_size, spec.intermediate_size) == ("llama", 40, 64, 96)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 4, 2, 20)
    assert (spec.max_position, spec.rope) == (128, RopeSpec(theta=10000.0))
    assert spec.norm_eps == pytest.approx(1e-5)
    assert spec.attention_bias
    assert spec.attention_output_bias
    assert spec.mlp_bias
    assert not spec.tie_embeddings


def test_no_output_tensor_means_tied(tmp_path: Path) -> None:
    path, _ = write_gguf(tmp_path / "m.gguf", tie_word_embeddings=True)
    checkpoint = open_checkpoint(path)
    assert checkpoint.spec.tie_embeddings
    assert "lm_head.weight" not in checkpoint.shapes


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, RopeSpec()),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            RopeSpec(kind="linear", factor=4.0, original_max_position=128),
        ),
        ({"rope.scale_linear": 2.0}, RopeSpec(kind="linear", factor=2.0, original_max_position=128)),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
            RopeSpec(kind="yarn", factor=4.0, original_max_position=32, attention_factor=0.1 * math.log(4) + 1),
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 0.5},
            RopeSpec(kind="yarn", factor=2.0, original_max_position=128, attention_factor=0.05 * math.log(2) + 0.5),
        ),
        ({"rope.dimension_count": 8, "rope.freq_base": 500.0}, RopeSpec(theta=500.0, rotary_dim=8)),
        (
            {"rope.dimension_count": 30, "attention.key_length": 44, "attention.value_length": 44},
            RopeSpec(rotary_dim=30),
        ),
    ],
)
def test_rope_settings(tmp_path: Path, keys: dict[str, Any], expected: RopeSpec) -> None:
    path, _ = write_gguf(tmp_path / "m.gguf", metadata=keys)
    assert open_checkpoint(path).spec.rope == expected


def test_rope_factors_are_read_into_the_spec(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, SIZES["head_dim"] // 2, dtype=np.float32)
    path, _ = write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": factors})
    checkpoint = open_checkpoint(path)
    assert checkpoint.spec.rope.frequency_factors == tuple(factors.tolist())
    assert "rope_freqs.weight" not in checkpoint.shapes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "gpt2"}, "architecture 'gpt2' is not supported; known: llama"),
        ({"metadata": {"attention.head_count": None}}, "does not say attention.head_count"),
        ({"metadata": {"attention.head_count_kv": 3}}, "4 heads cannot share 3 K/V heads"),
        ({"metadata": {"vocab_size": 41}}, "vocab_size contradicts its 40 token vectors"),
        ({"metadata": {"expert_shared_count": 1}}, "expert_shared_count 1 is not supported"),
        ({"metadata": {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}}, "'longrope' is not supported"),
        ({"metadata": {"attention.value_length": 8}}, "different sizes"),
        ({"metadata": {"block_count": "two"}}, "block_count must be a number, not 'two'"),
        ({"leave_out": ("model.embed_tokens.weight",)}, "lacks the tensor token_embd.weight"),
        ({"extra": {"rope_freqs.weight": np.ones(3, dtype=np.float32)}}, "3 rope factors for 8 pairs"),
        ({"extra": {"scales": np.ones(3, dtype=np.int32)}}, "scales is of type I32, which is not read"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path, _ = write_gguf(tmp_path / "m.gguf", **options)
    with pytest.raises(ModelUnreadable, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize("pattern", [3, [True, True, False, True]])
def test_windows_of_some_layers(pattern: int | list[bool]) -> None:
    prefixed = {"block_count": 4, "context_length": 512, "embedding_length": 64, "feed_forward_length": 96}
    prefixed |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6}
    prefixed |= {"attention.sliding_window": 128, "attention.sliding_window_pattern": pattern}
    metadata = {"general.architecture": "gemma3", **{f"gemma3.{key}": value for key, value in prefixed.items()}}
    spec = spec_from_metadata(metadata, {"token_embd.weight": (50, 64)}, {}, "m.gguf")
    assert (spec.window, spec.window_layers) == (128, (0, 1, 3))


@pytest.mark.parametrize(("layers", "scale"), [(61, 16), (62, 36)])
def test_gemma_of_27b_scales_by_its_width(layers: int, scale: int) -> None:
    prefixed = {"block_count": layers, "context_length": 512, "embedding_length": 144, "feed_forward_length": 96}
    prefixed |= {"attention.head_count": 4, "attention.key_length": 16, "attention.value_length": 16}
    prefixed |= {"attention.layer_norm_rms_epsilon": 1e-6, "attention.head_count_kv": 2}
    metadata = {"general.architecture": "gemma3", **{f"gemma3.{key}": value for key, value in prefixed.items()}}
    spec = spec_from_metadata(metadata, {"token_embd.weight": (50, 144)}, {}, "m.gguf")
    assert spec.attention_scale == pytest.approx(scale**-0.5)


def test_a_name_that_is_there_twice(tmp_path: Path) -> None:
    path, _ = write_gguf(tmp_path / "m.gguf")
    data = path.read_bytes()
    assert data.count(b"blk.0.attn_k.weight") == 1
    path.write_bytes(data.replace(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"))
    with pytest.raises(ModelUnreadable, match=r"twice: blk\.0\.attn_q\.weight"):
        open_checkpoint(path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5, 0.999])
def test_truncated_files(tmp_path: Path, share: float) -> None:
    path, _ = write_gguf(tmp_path / "m.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelUnreadable, match=r"m\.gguf"):
        open_checkpoint(path)


def test_unknown_names_stay_as_they_are() -> None:
    llama = ARCHITECTURES["llama"]
    assert hugging_face_name("blk.12.ffn_up.bias", llama) == "model.layers.12.mlp.up_proj.bias"
    assert hugging_face_name("output.weight", llama) == "lm_head.weight"
    assert hugging_face_name("blk.0.ssm_conv1d.weight", llama) == "blk.0.ssm_conv1d.weight"
