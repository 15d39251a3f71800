"""Resolving a configuration: every value chosen, every wrong one named by its flag."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.config import EngineConfig, ModelConfig, ResolvedConfig, RunConfig, SchedulerConfig, kv_bytes, resolve
from tokenmill.errors import ConfigError
from tokenmill.spec import HardwareInfo, ModelSpec

HARDWARE = HardwareInfo(device="cpu", num_threads=3, memory_bytes=64 << 20, fastest_dtype="bfloat16")
SPEC = ModelSpec(
    family="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=2048,
)  # 256 K/V numbers a token


def run_config(**values: Any) -> RunConfig:
    kinds = (ModelConfig, EngineConfig, SchedulerConfig)
    parts = [
        kind(**{k: v for k, v in values.items() if k in {field.name for field in dataclasses.fields(kind)}})
        for kind in kinds
    ]
    return RunConfig(*parts)


def resolved(**values: Any) -> ResolvedConfig:
    return resolve(run_config(**values), HARDWARE, SPEC)


def test_nothing_is_left_open():
    config = resolved()
    for name, value in dataclasses.asdict(config).items():
        assert value not in ("auto", None), name
    assert (config.device, config.dtype, config.attention, config.threads) == ("cpu", "bfloat16", "reference", 3)
    assert config.max_model_len == SPEC.max_position
    assert resolved() == config
    assert resolved(attention="auto,triton").attention == "reference,triton"


def test_what_was_asked_for_is_kept():
    asked = {
        "dtype": "float32",
        "max_model_len": 50,
        "page_size": 8,
        "num_pages": 10,
        "threads": 2,
        "debug_checks": True,
        "loop": "serial",
        "batch_policy": "prefill-first",
        "max_running": 5,
        "prefill_budget": 7,
        "prefix_cache": False,
        "eviction": "lfu",
        "reserve_ratio": 0.5,
        "max_waiting": 9,
        "max_waiting_tokens": 99,
        "policy": "fair",
    }
    config = resolved(**asked)
    assert {name: getattr(config, name) for name in asked} == asked
    assert (config.pool_tokens, config.pages_per_request) == (80, 7)


def test_the_pool_follows_memory_up_to_what_is_of_use():
    quarter = (64 << 20) // 4
    assert resolved().num_pages == quarter // (256 * 2) // 16
    assert resolved(dtype="float32").num_pages == quarter // (256 * 4) // 16
    assert resolved(memory_fraction=0.5, dtype="float32").num_pages == 2 * quarter // (256 * 4) // 16
    plenty = dataclasses.replace(HARDWARE, memory_bytes=1 << 40)
    assert resolve(run_config(), plenty, SPEC).pool_tokens == 65536
    long = dataclasses.replace(SPEC, max_position=100_000)
    assert resolve(run_config(), plenty, long).pool_tokens == 100_000


def test_the_queue_follows_the_pool_but_takes_a_few_of_any():
    plenty = dataclasses.replace(HARDWARE, memory_bytes=1 << 40)
    small, large = resolved(num_pages=4), resolve(run_config(num_pages=1 << 14, page_size=8), plenty, SPEC)
    assert (small.max_waiting, small.max_waiting_tokens) == (4 * small.max_running, 1 << 20)
    assert (large.max_waiting, large.max_waiting_tokens) == ((1 << 17) // 16, 16 << 17)


def test_a_small_pool_limits_the_length_of_a_request():
    assert resolved(num_pages=3, page_size=16).max_model_len == 48
    assert resolved(num_pages=1, page_size=2).max_model_len == 2


WINDOWED = dataclasses.replace(SPEC, window=256, window_layers=(0, 1, 3))
MISTRAL = dataclasses.replace(SPEC, window=256, window_layers=(0, 1, 2, 3))


def test_two_kinds_share_the_memory():
    config = resolve(run_config(dtype="float32"), HARDWARE, WINDOWED)
    quarter, layer = (64 << 20) // 4, 16 * 64 * 4  # bytes of a page in one layer
    assert config.kind_pages == (config.num_pages, config.num_window_pages)
    assert config.num_window_pages == config.num_pages // 2
    assert quarter - 3 * layer < config.num_pages * layer + config.num_window_pages * 3 * layer <= quarter
    assert (config.window, config.has_full_kind) == (256, True)
    asked = resolve(run_config(num_pages=100, num_window_pages=90), HARDWARE, WINDOWED)
    assert (asked.kind_pages, asked.max_model_len) == ((100, 90), 1600)
    assert asked.longest_row == 89 * 16 - 255
    short = resolve(run_config(num_pages=100, max_model_len=200), HARDWARE, WINDOWED)
    assert (short.kind_pages, short.window, short.longest_row) == ((100,), 0, 200)


def test_where_all_layers_have_a_window_requests_may_be_longer_than_the_pool():
    config = resolve(run_config(num_pages=20), HARDWARE, MISTRAL)
    assert (config.kind_pages, config.has_full_kind, config.max_model_len) == ((20,), False, 2048)
    assert config.num_pages >= config.max_running * config.pages_per_request
    assert config.longest_row == 19 * 16 - 255
    assert resolve(run_config(), HARDWARE, MISTRAL).kind_pages == (resolved().num_pages,)


@pytest.mark.parametrize(
    ("spec", "values", "flags"),
    [
        (SPEC, {"num_window_pages": 10}, "--num-window-pages is for models with layers of both kinds"),
        (MISTRAL, {"num_window_pages": 10}, "--num-window-pages is for models with layers of both kinds"),
        (WINDOWED, {"num_window_pages": 0}, "--num-window-pages must be at least 1"),
        (WINDOWED, {"num_window_pages": 18}, "window of 256: raise --num-window-pages to 19"),
        (MISTRAL, {"num_pages": 18}, "window of 256: raise --num-pages to 19"),
        (WINDOWED, {"num_window_pages": 10**9}, "lower --num-pages"),
    ],
)
def test_windows_that_do_not_fit_are_refused(spec, values, flags):
    with pytest.raises(ConfigError, match=flags):
        resolve(run_config(**values), HARDWARE, spec)


@pytest.mark.parametrize(
    ("values", "flags"),
    [
        ({"page_size": 0}, "--page-size must be at least 1"),
        ({"page_size": 10**6}, "--page-size"),
        ({"max_running": 0}, "--max-running must be at least 1"),
        ({"max_running": 10**9}, "--max-running"),
        ({"prefill_budget": -1}, "--prefill-budget must be at least 1"),
        ({"max_waiting": 0}, "--max-waiting must be at least 1"),
        ({"max_waiting_tokens": 0}, "--max-waiting-tokens must be at least 1"),
        ({"memory_fraction": 1.5}, "--memory-fraction must be from 0 to 1"),
        ({"memory_fraction": float("nan")}, "--memory-fraction must be from 0 to 1"),
        ({"reserve_ratio": -0.1}, "--reserve-ratio must be from 0 to 1"),
        ({"memory_fraction": 0.0}, "raise --memory-fraction"),
        ({"num_pages": 0}, "--num-pages must be at least 1"),
        ({"num_pages": 10**9}, "lower --num-pages"),
        ({"num_pages": 1, "page_size": 1}, "--num-pages 1"),
        ({"max_model_len": 1}, "--max-model-len must be at least 2"),
        ({"max_model_len": 2049}, "--max-model-len 2049 is over the model's context of 2048"),
        ({"max_model_len": 65, "num_pages": 4, "page_size": 16}, "--max-model-len 65 does not fit the K/V pool of 64"),
        ({"threads": 0}, "--threads must be from 1 to 1024"),
        ({"threads": 10**6}, "--threads must be from 1 to 1024"),
    ],
)
def test_what_cannot_work_is_refused_by_its_flag(values, flags):
    with pytest.raises(ConfigError, match=flags):
        resolved(**values)


@settings(deadline=None)
@given(
    memory=st.integers(0, 1 << 34),
    fraction=st.floats(0, 1),
    page_size=st.integers(1, 4096),
    num_pages=st.none() | st.integers(1, 10_000),
    length=st.none() | st.integers(2, 4096),
    spec=st.sampled_from([SPEC, WINDOWED, MISTRAL]),
)
def test_whatever_resolves_can_hold_a_request_and_fits(memory, fraction, page_size, num_pages, length, spec):
    raw = run_config(memory_fraction=fraction, page_size=page_size, num_pages=num_pages, max_model_len=length)
    try:
        config = resolve(raw, dataclasses.replace(HARDWARE, memory_bytes=memory), spec)
    except ConfigError:
        return
    assert 2 <= config.max_model_len <= min(SPEC.max_position, config.pool_tokens)
    assert config.pages_per_request <= config.num_pages
    assert kv_bytes(config, spec.within(length)) <= memory
    assert config.longest_row >= 1
