from __future__ import annotations

import importlib.util
import shutil
from typing import Any

import pytest
import torch

from tokenmill.attention.base import GraphAttention
from tokenmill.attention.reference import ReferenceAttention
from tokenmill.attention.select import make_backend
from tokenmill.errors import ConfigError
from tokenmill.spec import ModelSpec

SPEC = ModelSpec("llama", 8, 8, 8, 2, 16, 8, 128, 512)
CUDA = torch.device("cuda")


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
    backend = make_backend(choice, SPEC)
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
        make_backend(choice, SPEC)
    message = str(caught.value)
    assert message.startswith("--attention")
    assert "\n" not in message
    for part in parts:
        assert message.count(part) == 1


def test_flashinfer_for_all_rows(made: list[Recorder]) -> None:
    backend: Any = make_backend("flashinfer", SPEC, torch.bfloat16, CUDA, group_size=2)
    assert made == [backend]
    assert backend.options == {
        "scale": 128**-0.5,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 128,
        "dtype": torch.bfloat16,
        "device": CUDA,
        "lengths": (1, 2),
    }


@pytest.mark.parametrize(("choice", "lengths"), [("flashinfer,reference", (2,)), ("reference,flashinfer", (1,))])
def test_half_of_flashinfer_compiles_half_of_it(made: list[Recorder], choice: str, lengths: tuple[int]) -> None:
    backend = make_backend(choice, SPEC, torch.float16, CUDA)
    assert backend.name == choice
    assert [its.options["lengths"] for its in made] == [lengths]
    assert made[0].options["num_kv_heads"] == 8


def test_flashinfer_does_not_take_what_it_cannot_serve(made: list[Recorder]) -> None:
    with pytest.raises(ConfigError, match="flashinfer takes bfloat16 or float16, not float32"):
        make_backend("flashinfer,reference", SPEC, torch.float32, CUDA)
    assert made == []


def test_a_pair_whose_decode_backend_has_graphs_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.attention.test_split import Graphed

    def make(name: str, *_: Any) -> ReferenceAttention:
        return (Graphed if name == "triton" else ReferenceAttention)(scale=1.0, token_elements=8)

    monkeypatch.setattr("tokenmill.attention.select._make", make)
    monkeypatch.setattr("tokenmill.attention.select.why_not", lambda *_: None)
    assert isinstance(make_backend("reference,triton", SPEC), GraphAttention)
    assert isinstance(make_backend("auto,auto", SPEC), GraphAttention)
    assert not isinstance(make_backend("triton,reference", SPEC), GraphAttention)
