"""Models whose weights stay packed come near those of the same file expanded."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from tests.support.families import make_family
from tests.support.harness import Harness
from tests.weights.gguf_convert import convert
from tokenmill.attention.select import make_backends
from tokenmill.errors import ModelUnreadable
from tokenmill.models.load import load_model, load_packed
from tokenmill.models.packed import PackedDecoder, why_not_packed
from tokenmill.ops.api import Hidden
from tokenmill.ops.cpu.kernels import COMPILERS, CpuKernels, compiled
from tokenmill.parallel.group import Group
from tokenmill.weights.checkpoint import open_checkpoint

pytestmark = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C compiler")
SERVED: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3": {},
    "mistral-full": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
}
REFUSED = {"mistral": "layers", "smollm3": "layers", "gemma2": "layers", "mixtral": "layers", "qwen3": "24 dimensions"}
PROMPT = [(7 * i) % 251 + 4 for i in range(90)]


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    return CpuKernels(compiled(), 2)


def expanded(path: Path) -> Harness:
    checkpoint = open_checkpoint(path)
    backends = make_backends("reference", checkpoint.spec)
    return Harness(
        load_model(checkpoint, dtype=torch.float32, group=Group.solo(), attention=backends), backends, max_len=128
    )


def packed(
    path: Path, kernels: CpuKernels, bits: int | None = None, dtype: torch.dtype = torch.float32
) -> tuple[PackedDecoder, Harness]:
    checkpoint = open_checkpoint(path)
    assert why_not_packed(checkpoint, bits) is None
    model = load_packed(checkpoint, kernels, bits)
    return model, Harness(model, (model.attention(),), dtype=dtype, max_len=128)


@pytest.mark.parametrize("name", SERVED)
def test_logits_come_near(tmp_path: Path, kernels: CpuKernels, name: str) -> None:
    folder = make_family(tmp_path / "folder", name, **SERVED[name])
    path = convert(folder, tmp_path / "m.gguf", kind=GGMLQuantizationType.Q8_0)
    expected = expanded(path).logits([(0, 0, PROMPT)], of_all_tokens=True)
    for source, bits, dtype in ((path, None, torch.float32), (path, None, torch.bfloat16), (folder, 8, torch.float32)):
        _, harness = packed(source, kernels, bits, dtype)
        found = harness.logits([(0, 0, PROMPT)], of_all_tokens=True)
        assert (found - expected).norm() < 0.05 * expected.norm()


def test_steps_of_all_sizes_agree(tmp_path: Path, kernels: CpuKernels) -> None:
    model, harness = packed(make_family(tmp_path / "folder", "llama"), kernels, 4)
    whole = harness.logits([(0, 0, PROMPT)], of_all_tokens=True)
    harness.logits([(1, 0, PROMPT[:50])])
    mixed = harness.logits([(1, 50, PROMPT[50:51]), (2, 0, PROMPT[:40])])
    torch.testing.assert_close(mixed, whole[[50, 39]], atol=0.02, rtol=0.02)
    mixed = harness.logits([(1, 51, PROMPT[51:]), (2, 40, PROMPT[40:41])])
    torch.testing.assert_close(mixed, whole[[-1, 40]], atol=0.02, rtol=0.02)
    states = torch.randn(6, model.spec.hidden_size, generator=torch.Generator().manual_seed(0))
    logits = model.logits(Hidden(states))
    assert logits.shape == (6, model.spec.vocab_size)
    torch.testing.assert_close(logits[2:3], model.logits(Hidden(states[2:3])), atol=1e-4, rtol=1e-4)
    assert model.logits(Hidden(states[:0])).shape == (0, model.spec.vocab_size)
    assert model.final_states(Hidden(states)).shape == states.shape


def test_hidden_states_are_those_that_logits_are_made_of(tmp_path: Path, kernels: CpuKernels) -> None:
    model, harness = packed(make_family(tmp_path / "folder", "qwen2"), kernels, 8)
    expected = harness.logits([(0, 0, PROMPT)])
    forward = model.forward
    model.forward = lambda batch, kv: model.logits(model.hidden(batch, kv))  # type: ignore[method-assign]
    torch.testing.assert_close(harness.logits([(0, 0, PROMPT)]), expected, atol=1e-4, rtol=1e-4)
    assert forward != model.forward


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_not_packed(tmp_path: Path, name: str) -> None:
    reason = why_not_packed(open_checkpoint(make_family(tmp_path / "folder", name)), 8)
    assert reason is not None
    assert REFUSED[name] in reason


def test_sizes_that_blocks_do_not_divide_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_family(tmp_path / "folder", "llama"))
    odd = replace(checkpoint, spec=replace(checkpoint.spec, num_heads=5, num_kv_heads=1, head_dim=16))
    assert "multiples of 32" in str(why_not_packed(odd, 8))
    headless = replace(checkpoint, spec=replace(checkpoint.spec, has_output=False))
    assert why_not_packed(headless, 8) == "it has no output matrix"


def test_plain_numbers_are_packed_only_where_that_is_asked_for(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_family(tmp_path / "folder", "llama"))
    assert why_not_packed(checkpoint, None) == "its files hold plain numbers"
    assert why_not_packed(checkpoint, 4) is None


def test_a_missing_tensor_is_named(tmp_path: Path, kernels: CpuKernels) -> None:
    folder = make_family(tmp_path / "folder", "llama")
    checkpoint = open_checkpoint(folder)
    stored = {name: its for name, its in checkpoint.stored.items() if "up_proj" not in name}
    with pytest.raises(ModelUnreadable, match=r"lacks tensors .*up_proj"):
        load_packed(type(checkpoint)("m", checkpoint.spec, stored), kernels, 8)
