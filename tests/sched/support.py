from __future__ import annotations

from typing import Any

from tokenmill.config import ResolvedConfig


def make_config(**changes: Any) -> ResolvedConfig:
    """A small resolved config; max_model_len follows the pool unless given."""
    values: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "attention": "reference",
        "threads": 1,
        "page_size": 4,
        "num_pages": 64,
        "max_running": 8,
        "max_waiting": 10_000,
        "max_waiting_tokens": 1 << 30,
        "prefill_budget": 16,
        "policy": "fcfs",
        "batch_policy": "mixed",
        "loop": "serial",
        "prefix_cache": True,
        "eviction": "lru",
        "reserve_ratio": 0.0,
        "graph_max_batch": 0,
        "capture_first": False,
        "debug_checks": True,
    } | changes
    values.setdefault("max_model_len", values["num_pages"] * values["page_size"])
    return ResolvedConfig(**values)
