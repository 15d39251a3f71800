"""What a model takes of a device's memory: told from its shape alone, by the functions that the engine uses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from tokenmill.attention.select import make_backends
from tokenmill.config import ELEMENT_SIZE, ResolvedConfig, RunConfig, resolve
from tokenmill.engine.graphs import graph_bytes
from tokenmill.errors import ConfigError
from tokenmill.models.load import build_model
from tokenmill.parallel.group import Group
from tokenmill.parallel.shard import check_size, split_kv_heads
from tokenmill.sampling.adjust import most_bytes
from tokenmill.spec import HardwareInfo, KVKind, ModelSpec

PARTS: Mapping[str, str] = {  # the first that matches a tensor's name
    "token vectors": r"\.embed_tokens\.",
    "output matrix": r"lm_head",
    "norms": r"norm",
    "experts": r"\.experts\.",
    "routers": r"\.gate\.",
    "attention": r"attn",
    "feed-forward": r"",
}


def set_aside(config: ResolvedConfig, spec: ModelSpec) -> int:
    """Bytes of device memory that the K/V pool must leave: for CUDA graphs, and for what sampling may need."""
    if config.device != "cuda":
        return 0
    most = config.graph_max_batch, config.prefill_budget + config.max_running
    return graph_bytes(spec, *most, ELEMENT_SIZE[config.dtype]) + most_bytes(config.max_running, spec.vocab_size)


def resolve_beside(
    run: RunConfig, hardware: HardwareInfo, spec: ModelSpec, config: ResolvedConfig, free: int
) -> ResolvedConfig:
    """The configuration once the weights are there and `free` bytes are left; on a CPU it stays as it is."""
    if config.device != "cuda":
        return config
    return resolve(run, replace(hardware, memory_bytes=max(free - set_aside(config, spec), 0)), spec)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What one rank holds; sizes in bytes."""

    spec: ModelSpec
    config: ResolvedConfig
    hardware: HardwareInfo
    weights: Mapping[str, int]  # by part of the model
    set_aside: int
    num_kv_heads: int

    def kv_bytes(self, kind: KVKind) -> int:
        """Bytes of K and V that a token takes in the layers of a kind."""
        return 2 * len(kind.layers) * self.num_kv_heads * self.spec.head_dim * ELEMENT_SIZE[self.config.kv_dtype]

    def requests_of(self, length: int) -> int:
        """How many requests of so many tokens, prompt and output, fit at once."""
        config, kinds = self.config, zip(self.config.kind_pages, self.spec.kv_kinds, strict=True)
        held = (
            (pages, min(length, kind.window + config.page_size) if kind.window else length) for pages, kind in kinds
        )
        return min(config.max_running, *(pages // -(-tokens // config.page_size) for pages, tokens in held))

    def step_bytes(self, rows: int, length: int) -> int:
        """Bytes that a decode step of `rows` requests with `length` tokens each must read."""
        weights = {
            part: size for part, size in self.weights.items() if part != "token vectors" or self.spec.tie_embeddings
        }
        if (experts := self.spec.experts) is not None:  # those that no token chose are not read
            chosen = 1 - (1 - experts.num_chosen / experts.num_experts) ** rows
            weights["experts"] = int(weights["experts"] * chosen)
        kinds = self.spec.kv_kinds
        read = sum(self.kv_bytes(kind) * min(length, kind.window or length) for kind in kinds)
        return sum(weights.values()) + rows * read


def share_of(spec: ModelSpec, size: int) -> ModelSpec:
    """The model with the heads that one of `size` ranks has: what its K/V take is told from that.

    Raises:
        ConfigError: the model does not divide by `size`.
    """
    check_size(spec, size)
    heads = split_kv_heads(spec.num_heads, spec.num_kv_heads, 0, size).size
    return replace(spec, num_heads=spec.num_heads // size, num_kv_heads=heads)


def part_of(hardware: HardwareInfo, ranks: int) -> HardwareInfo:
    """What each of the ranks on a host has: of a CPU a part, of GPUs one of its own."""
    if hardware.device != "cpu":
        return hardware
    threads, memory = max(1, hardware.num_threads // ranks), hardware.memory_bytes // ranks
    return replace(hardware, num_threads=threads, memory_bytes=memory)


def plan_memory(run: RunConfig, hardware: HardwareInfo, spec: ModelSpec) -> MemoryPlan:
    """What a rank would hold of a model; nothing is loaded.

    Raises:
        ModelUnreadable: unknown family.
        ConfigError: the model does not divide by --tp, or the configuration cannot work on this machine.
    """
    spec = spec.within(run.model.max_model_len)
    size = run.engine.tp
    group, share = Group(0, size), share_of(spec, size)
    hardware = part_of(hardware, size // run.engine.nnodes)
    config = resolve(run, hardware, share)
    dtype = getattr(torch, config.dtype)
    _, sources = build_model(spec, dtype, group, make_backends("reference", spec), None, torch.device("meta"))
    weights = dict.fromkeys(PARTS, 0)
    for name, source in sources.items():
        part = next(part for part, pattern in PARTS.items() if re.search(pattern, name))
        weights[part] += sum(its.target.nbytes for its in (source, *source.others))
    total = sum(weights.values())
    if total > hardware.memory_bytes:
        raise ConfigError(
            f"the weights take {total / 2**30:.1f} GiB of each of {size} devices, which have "
            f"{hardware.memory_bytes / 2**30:.1f} GiB free: raise --tp, or take a smaller model or --dtype"
        )
    config = resolve_beside(run, hardware, share, config, hardware.memory_bytes - total)
    return MemoryPlan(spec, config, hardware, weights, set_aside(config, spec), share.num_kv_heads)
