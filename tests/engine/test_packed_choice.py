"""When weights stay packed, when they are expanded, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from tests.support.families import make_family
from tests.weights.gguf_convert import convert
from tokenmill.config import EngineConfig, ModelConfig, RunConfig, SchedulerConfig
from tokenmill.engine.load import load_engine
from tokenmill.engine.packing import find_library
from tokenmill.errors import ConfigError
from tokenmill.ops.cpu.kernels import COMPILERS
from tokenmill.parallel.group import Group
from tokenmill.spec import HardwareInfo
from tokenmill.weights.checkpoint import Checkpoint, open_checkpoint

CPU = HardwareInfo("cpu", 2, 1 << 30, "float32")
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C compiler")


@pytest.fixture
def plain(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(make_family(tmp_path / "folder", "llama"))


@pytest.fixture
def quantised(tmp_path: Path, plain: Checkpoint) -> Path:
    return convert(Path(plain.name), tmp_path / "m.gguf", kind=GGMLQuantizationType.Q8_0)


def run(attention: str = "auto", kv_dtype: Any = "auto", **model: Any) -> RunConfig:
    engine = EngineConfig(device="cpu", attention=attention, kv_dtype=kv_dtype, num_pages=8, threads=2)
    return RunConfig(ModelConfig(**model), engine, SchedulerConfig(max_running=2))


@needs_compiler
def test_quantised_files_stay_packed_unless_a_type_is_asked_for(quantised: Path, plain: Checkpoint) -> None:
    checkpoint = open_checkpoint(quantised)
    assert find_library(run(), CPU, checkpoint, Group.solo()) is not None
    assert find_library(run(dtype="float32", quantization="int8"), CPU, plain, Group.solo()) is not None
    others = [run(quantization="none"), run(dtype="float32"), run("reference"), run(kv_dtype="float16")]
    for its in others:
        assert find_library(its, CPU, checkpoint, Group.solo()) is None
    assert find_library(run(), CPU, plain, Group.solo()) is None
    assert find_library(run(), replace(CPU, device="cuda"), checkpoint, Group.solo()) is None


@needs_compiler
@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "expected"), [("auto", "auto", "bfloat16"), ("float32", "auto", "float32")]
)
def test_an_engine_runs_packed(quantised: Path, kv_dtype: str, dtype: str, expected: str) -> None:
    engine, config, _ = load_engine(run(kv_dtype=kv_dtype, dtype=dtype), quantised, Group.solo())
    engine.close()
    assert (config.attention, config.kv_dtype) == ("cpu", expected)


@pytest.mark.parametrize(
    ("options", "device", "words"),
    [
        ({"attention": "reference"}, "cpu", "not with --attention reference"),
        ({"kv_dtype": "float16"}, "cpu", "--kv-dtype float32 or bfloat16"),
        ({}, "cuda", "on one CPU rank alone"),
    ],
)
def test_what_cannot_be_packed_is_refused(plain: Checkpoint, options: Any, device: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"--quantization int4 cannot be used: .*{words}"):
        find_library(run(quantization="int4", **options), replace(CPU, device=device), plain, Group.solo())


def test_without_a_compiler_weights_are_expanded(
    quantised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    caplog.set_level("INFO")
    engine, config, _ = load_engine(run(), quantised, Group.solo())
    engine.close()
    assert config.attention == "reference"
    assert "no C compiler in PATH" in caplog.text
    with pytest.raises(ConfigError, match="--quantization int8 cannot be used: no C compiler"):
        find_library(run(quantization="int8"), CPU, open_checkpoint(quantised), Group.solo())
