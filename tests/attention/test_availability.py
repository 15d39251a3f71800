from __future__ import annotations

import importlib.util
from dataclasses import replace

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
    assert "float64" in str(why_not("triton", SPEC, CUDA, torch.float64))
    assert "256" in str(why_not("triton", replace(SPEC, head_dim=288), CUDA, torch.bfloat16))
    assert "fastest" in str(why_not("fastest", SPEC, CUDA, torch.bfloat16))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in str(why_not("triton", SPEC, CUDA, torch.bfloat16))
