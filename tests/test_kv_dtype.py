"""K and V of a smaller type than the weights'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.families import make_family
from tests.support.tiny_models import write_byte_tokenizer
from tokenmill import LLM, SamplingParams
from tokenmill.config import EngineConfig, RunConfig, resolve
from tokenmill.errors import ConfigError
from tokenmill.spec import HardwareInfo, ModelSpec

PROMPTS = [[5 + (7 * i + j * j) % 250 for j in range(length)] for i, length in enumerate((3, 40, 100))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_it_is_half_as_large_and_nearly_as_good(tmp_path: Path, family: str) -> None:
    folder = make_family(tmp_path, family)
    write_byte_tokenizer(folder)

    def run(kv_dtype: str, **options: Any) -> tuple[int, list[list[int]], torch.Tensor]:
        with LLM(folder, dtype="float32", kv_dtype=kv_dtype, num_pages=64, **options) as llm:
            size = sum(its.keys.nbytes + its.values.nbytes for its in llm._engine._state.kv)
            outputs = [its.choices[0].token_ids for its in llm.generate(PROMPTS, GREEDY)]
            return size, outputs, torch.tensor(llm.embed(PROMPTS, pooling="mean"))

    whole, expected, exact = run("auto")
    half, found, near = run("bfloat16")
    assert half * 2 == whole
    assert 0 < (near - exact).norm() < 0.02 * exact.norm()
    # However it is computed, K and V are rounded once, when they are written.
    assert run("bfloat16", prefill_budget=7, loop="serial", prefix_cache=False)[1] == found
    assert run("float32")[1] == expected


def test_fast_backends_take_one_type() -> None:
    spec = ModelSpec("llama", 1000, 64, 96, 2, 4, 2, 16, 512)
    hardware = HardwareInfo("cuda", 1, 2**30, "bfloat16")
    with pytest.raises(ConfigError, match=r"triton attention takes K/V of the weights' type, bfloat16"):
        resolve(RunConfig(engine=EngineConfig(kv_dtype="float16")), hardware, spec)
    assert resolve(RunConfig(engine=EngineConfig(kv_dtype="bfloat16")), hardware, spec).kv_dtype == "bfloat16"
    slow = EngineConfig(kv_dtype="float32", attention="reference")
    small, large = (resolve(RunConfig(engine=its), hardware, spec) for its in (slow, EngineConfig()))
    assert small.num_pages == large.num_pages // 2
