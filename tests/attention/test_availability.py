from __future__ import annotations

import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tokenmill.attention.availability import why_not
from tokenmill.spec import ModelSpec

SPEC = ModelSpec("llama", 8, 8, 8, 2, 4, 2, 128, 512)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_the_reference_runs_anywhere() -> None:
    assert why_not("reference", SPEC, CPU, torch.float64) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_triton_runs_on_a_gpu(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert why_not("triton", SPEC, CUDA, dtype) is None


def test_each_refusal_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert "GPU" in str(why_not("triton", SPEC, CPU, torch.bfloat16))
    assert "GPU" in str(why_not("flashinfer", SPEC, CPU, torch.bfloat16))
    assert "float64" in str(why_not("triton", SPEC, CUDA, torch.float64))
    assert "bfloat16 or float16, not float32" in str(why_not("flashinfer", SPEC, CUDA, torch.float32))
    assert "256" in str(why_not("triton", replace(SPEC, head_dim=288), CUDA, torch.bfloat16))
    assert "have 80" in str(why_not("flashinfer", replace(SPEC, head_dim=80), CUDA, torch.bfloat16))
    assert "fastest" in str(why_not("fastest", SPEC, CUDA, torch.bfloat16))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in str(why_not("triton", SPEC, CUDA, torch.bfloat16))
    assert "tokenmill[cuda]" in str(why_not("flashinfer", SPEC, CUDA, torch.bfloat16))


@pytest.mark.parametrize(
    ("cached", "tools", "has_toolkit", "reason"),
    [
        (True, (), False, None),
        (False, ("nvcc", "ninja"), False, None),
        (False, ("ninja",), True, None),
        (False, ("ninja",), False, "no nvcc"),
        (False, ("nvcc",), True, "no ninja"),
    ],
)
def test_flashinfer_needs_what_compiles_its_kernels(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cached: bool,
    tools: tuple[str, ...],
    has_toolkit: bool,
    reason: str | None,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if cached or "jit" not in name else None)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in tools else None)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    if has_toolkit:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").touch()
    found = why_not("flashinfer", replace(SPEC, head_dim=64), CUDA, torch.bfloat16)
    assert found is None if reason is None else reason in str(found)
