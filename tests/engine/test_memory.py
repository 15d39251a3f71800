"""The memory plan that is told beforehand, against what the engine then takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.families import FAMILIES, make_family
from tests.support.tiny_models import make_tiny_llama
from tokenmill.config import EngineConfig, ModelConfig, RunConfig
from tokenmill.engine import load
from tokenmill.engine.graphs import graph_bytes
from tokenmill.engine.memory import plan_memory, set_aside
from tokenmill.errors import ConfigError
from tokenmill.parallel.group import Group
from tokenmill.spec import ExpertsSpec, HardwareInfo, ModelSpec
from tokenmill.weights.checkpoint import open_checkpoint, read_shape

CPU = HardwareInfo("cpu", 2, 2**30, "float32", "a processor")
CUDA = HardwareInfo("cuda", 2, 140 * 2**30, "bfloat16", "a GPU")
LARGE = ModelSpec("llama", 32_000, 4096, 11_008, 32, 32, 8, 128, 8192)


@pytest.mark.parametrize("family", ["llama3", "phi3", "gemma3"])
def test_the_plan_is_what_the_engine_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    folder = make_family(tmp_path, family)
    run = RunConfig(ModelConfig(dtype="float32"), EngineConfig(page_size=4))
    monkeypatch.setattr(load, "measure_hardware", lambda wanted: CPU)
    engine, config, spec = load.load_engine(run, folder, Group.solo())
    try:
        plan = plan_memory(run, CPU, read_shape(folder))
        assert plan.spec == spec
        assert replace(plan.config, threads=config.threads) == config
        pools = [cache.keys.nbytes + cache.values.nbytes for cache in engine._state.kv]
        kinds = zip(config.kind_pages, spec.kv_kinds, strict=True)
        assert pools == [(pages + 1) * config.page_size * plan.kv_bytes(kind) for pages, kind in kinds]  # one to spare
    finally:
        engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_file(tmp_path: Path, family: str) -> None:
    folder = make_family(tmp_path, family)
    plan = plan_memory(RunConfig(ModelConfig(dtype="float32")), CPU, read_shape(folder))
    stored = open_checkpoint(folder).shapes
    expected = {name: 4 * torch.Size(shape).numel() for name, shape in stored.items()}
    if plan.spec.tie_embeddings:
        expected.pop("lm_head.weight", None)
    assert sum(plan.weights.values()) == sum(expected.values())
    assert plan.weights["token vectors"] == expected["model.embed_tokens.weight"]
    assert plan.weights["norms"] == sum(size for name, size in expected.items() if "norm" in name)


def test_ranks_share_the_weights() -> None:
    one, half = (plan_memory(RunConfig(engine=EngineConfig(tp=size)), CUDA, LARGE) for size in (1, 2))
    assert {part: 2 * size for part, size in half.weights.items() if part != "norms"}.items() <= one.weights.items()
    assert half.num_kv_heads == 4
    assert half.config.num_pages > 2 * one.config.num_pages


def test_ranks_share_a_processor() -> None:
    small = replace(LARGE, hidden_size=64, intermediate_size=64, head_dim=16, max_position=10**6)
    runs = [RunConfig(ModelConfig(dtype="float32"), EngineConfig(tp=size)) for size in (1, 2)]
    one, half = (plan_memory(run, replace(CPU, num_threads=7), small) for run in runs)
    assert (half.hardware.memory_bytes, half.config.threads) == (one.hardware.memory_bytes // 2, 3)
    assert half.config.num_pages == one.config.num_pages  # half the memory, for half the heads


def test_on_a_gpu_the_pool_is_what_weights_and_graphs_leave() -> None:
    plan = plan_memory(RunConfig(), CUDA, LARGE)
    left = CUDA.memory_bytes - sum(plan.weights.values()) - plan.set_aside
    per_page = sum(map(plan.kv_bytes, LARGE.kv_kinds)) * plan.config.page_size
    assert plan.config.num_pages == int(0.9 * left) // per_page
    assert plan.set_aside == set_aside(plan.config, LARGE) > graph_bytes(LARGE, 256, 8448, 2) > 0
    assert set_aside(replace(plan.config, device="cpu"), LARGE) == 0


def test_weights_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"weights take 11\.1 GiB of each of 1 devices, which have 8\.0 GiB free"):
        plan_memory(RunConfig(), replace(CUDA, memory_bytes=8 * 2**30), LARGE)


def test_what_fits_and_what_a_step_reads() -> None:
    run = RunConfig(engine=EngineConfig(num_pages=100, page_size=16))
    plan = plan_memory(run, CUDA, LARGE)
    assert [plan.requests_of(length) for length in (1, 16, 17, 800, 1601)] == [100, 100, 50, 2, 0]
    weights = sum(plan.weights.values()) - plan.weights["token vectors"]
    assert plan.step_bytes(1, 0) == weights
    assert plan.step_bytes(3, 100) == weights + 300 * LARGE.kv_bytes_per_token(2)
    windowed = plan_memory(run, CUDA, replace(LARGE, window=40, window_layers=tuple(range(16))))
    assert windowed.step_bytes(1, 100) == weights + 70 * LARGE.kv_bytes_per_token(2)
    assert windowed.config.kind_pages == (100, 50)
    assert [windowed.requests_of(length) for length in (17, 41, 160)] == [25, 16, 10]  # 2, 3 and 4 pages of windows
    tied = plan_memory(run, CUDA, replace(LARGE, tie_embeddings=True))
    assert tied.step_bytes(1, 0) == weights


def test_experts_that_no_token_chose_are_not_read() -> None:
    spec = replace(LARGE, family="mixtral", experts=ExpertsSpec(num_experts=8, num_chosen=2, size=2048))
    plan = plan_memory(RunConfig(), CUDA, spec)
    experts = plan.weights["experts"]
    assert experts == 2 * 32 * 8 * 3 * 2048 * 4096
    all_read = plan.step_bytes(1000, 0)
    assert all_read - plan.step_bytes(1, 0) == pytest.approx(0.75 * experts)
    assert all_read - plan.step_bytes(2, 0) == pytest.approx(0.75**2 * experts)


def test_a_model_is_planned_without_its_weights(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    (folder / "model.safetensors").unlink()
    run = RunConfig(ModelConfig(dtype="float32"))
    plan = plan_memory(run, CPU, read_shape(folder))
    assert plan.weights["attention"] > 0
