from __future__ import annotations

import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenmill.attention.base import GraphAttention
from tokenmill.attention.reference import ReferenceAttention
from tokenmill.attention.select import make_backends, why_not
from tokenmill.errors import ConfigError
from tokenmill.spec import ModelSpec

SPEC = ModelSpec("llama", 8, 8, 8, 2, 16, 8, 128, 512)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Recorder:
    """In place of FlashInferAttention."""

    name = "flashinfer"

    def __init__(self, **options: Any) -> None:
        self.options = options


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """The FlashInfer backends that are made, where all that it needs is there."""
    made: list[Recorder] = []

    def make(**options: Any) -> Recorder:
        made.append(Recorder(**options))
        return made[-1]

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr("tokenmill.attention.flashinfer.FlashInferAttention", make)
    return made


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ("auto", "reference"),
        ("reference", "reference"),
        ("reference,reference", "reference,reference"),
        ("auto,reference", "reference,reference"),
    ],
)
def test_what_is_chosen_on_a_cpu(choice: str, name: str) -> None:
    (backend,) = make_backends(choice, SPEC)
    assert backend.name == name
    assert not isinstance(backend, GraphAttention)


@pytest.mark.parametrize(
    ("choice", "parts"),
    [
        ("fastest", ["no attention backend called 'fastest'; known: reference, triton, flashinfer"]),
        ("triton,fastest", ["triton needs an NVIDIA GPU", "'fastest'"]),
        ("flashinfer,flashinfer", ["flashinfer needs an NVIDIA GPU, and the device is cpu"]),
        ("reference,", ["called ''"]),
        ("reference,reference,reference", ["two as PREFILL,DECODE"]),
        ("Reference", ["'Reference'"]),
    ],
)
def test_each_refusal_is_one_line_that_names_the_flag(choice: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make_backends(choice, SPEC)
    message = str(caught.value)
    assert message.startswith("--attention")
    assert "\n" not in message
    for part in parts:
        assert message.count(part) == 1


def test_flashinfer_for_all_rows(made: list[Recorder]) -> None:
    backends = make_backends("flashinfer", SPEC, torch.bfloat16, CUDA, group_size=2)
    assert made == [*backends]
    assert made[0].options == {
        "scale": 128**-0.5,
        "window": 0,
        "cap": 0.0,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 128,
        "dtype": torch.bfloat16,
        "device": CUDA,
        "lengths": (1, 2),
    }


@pytest.mark.parametrize(("choice", "lengths"), [("flashinfer,reference", (2,)), ("reference,flashinfer", (1,))])
def test_half_of_flashinfer_compiles_half_of_it(made: list[Recorder], choice: str, lengths: tuple[int]) -> None:
    (backend,) = make_backends(choice, SPEC, torch.float16, CUDA)
    assert backend.name == choice
    assert [its.options["lengths"] for its in made] == [lengths]
    assert made[0].options["num_kv_heads"] == 8


def test_flashinfer_does_not_take_what_it_cannot_serve(made: list[Recorder]) -> None:
    with pytest.raises(ConfigError, match="flashinfer takes bfloat16 or float16, not float32"):
        make_backends("flashinfer,reference", SPEC, torch.float32, CUDA)
    assert made == []


def test_a_pair_whose_decode_backend_has_graphs_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.attention.test_split import Graphed

    def make(name: str, *_: Any) -> ReferenceAttention:
        return (Graphed if name == "triton" else ReferenceAttention)(scale=1.0, token_elements=8)

    monkeypatch.setattr("tokenmill.attention.select._make", make)
    monkeypatch.setattr("tokenmill.attention.select.why_not", lambda *_: None)
    assert isinstance(make_backends("reference,triton", SPEC)[0], GraphAttention)
    assert isinstance(make_backends("auto,auto", SPEC)[0], GraphAttention)
    assert not isinstance(make_backends("triton,reference", SPEC)[0], GraphAttention)


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
