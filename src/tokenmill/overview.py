"""`tokenmill models` and `tokenmill plan`: what can be served, and what serving a model would take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from tokenmill.config import RunConfig, check_range
from tokenmill.errors import ConfigError
from tokenmill.flags import PlanFlags
from tokenmill.hub import ALIASES, resolve_model
from tokenmill.parallel.place import ranks_here
from tokenmill.spec import HardwareInfo, RopeKind
from tokenmill.text.pre_tokenizers import rules
from tokenmill.weights import gguf_config, hf_config

GIB, MIB = 2**30, 2**20
LENGTHS = (1024, 4096, 16384, 65536)
ROWS = (1, 8, 64, 256)


def models() -> Iterator[str]:
    """What is supported, line by line, from the tables that loading goes by."""
    written = {its.name: name.partition(" ")[0] for name, its in gguf_config.ARCHITECTURES.items()}
    yield f"{'architecture':22} {'GGUF':10} of its own"
    for name, architecture in hf_config.ARCHITECTURES.items():
        yield f"{name:22} {written.get(name, '-'):10} {', '.join(architecture.features) or '-'}"
    yield from (f"{name:22} {'-':10} text alone, as {its}" for name, its in hf_config.WRITING_PARTS.items())
    yield ""
    yield f"rope scalings: {', '.join(get_args(RopeKind))}"
    yield "weights: safetensors (float32, bfloat16, float16; sharded too), GGUF (split too), random from config.json"
    yield f"GGUF types: {', '.join((*gguf_config.FLOATS, *gguf_config.QUANTISED))}"
    yield "tokenizers: tokenizer.json, tokenizer.model (SentencePiece, byte pairs), GGUF (gpt2, llama)"
    yield f"GGUF pre-tokenizers: {', '.join(sorted(rules()))}"
    yield "embeddings: of the last token or the mean; without an output matrix too"
    yield f"aliases: {', '.join(ALIASES)}"


def plan(flags: PlanFlags) -> Iterator[str]:
    """What serving a model would take, line by line; its weights are not read.

    Raises:
        TokenmillError: the model cannot be found or read; a flag, or the model with these flags, cannot work.
    """
    check_range("--tp", flags.engine.tp, 1)
    check_range("--length", 1 if flags.length is None else flags.length, 1)
    for flag, amount in (("--memory", flags.memory), ("--bandwidth", flags.bandwidth)):
        check_range(flag, 1 if amount is None else amount, 0.001)
    from tokenmill.engine.device import measure_bandwidth
    from tokenmill.engine.memory import plan_memory
    from tokenmill.weights.checkpoint import read_shape

    run = flags.run
    spec = read_shape(resolve_model(run.model.model, needs_weights=False))
    hardware = _hardware(run, flags)
    found = plan_memory(run, hardware, spec)
    config, total = found.config, sum(found.weights.values())
    ranks = f", one of {run.engine.tp} ranks" if run.engine.tp > 1 else ""
    yield f"{run.model.model}: {spec.family}, {spec.num_layers} layers, {config.dtype}, {hardware.name}{ranks}"
    yield f"weights        {total / GIB:9.2f} GiB"
    yield from (f"  {part:13}{size / MIB:9.1f} MiB" for part, size in found.weights.items() if size)
    yield f"free memory    {hardware.memory_bytes / GIB:9.2f} GiB"
    if found.set_aside:
        yield f"graphs, draws  {found.set_aside / GIB:9.2f} GiB"
    for kind, pages in zip(found.spec.kv_kinds, config.kind_pages, strict=True):
        what = f"{f'window of {kind.window}' if kind.window else 'all tokens'}, {config.kv_dtype}"
        yield f"K/V, bytes a token {found.kv_bytes(kind):9,}   {len(kind.layers)} layers, {what}"
        yield f"K/V pool: {pages:,} pages of {config.page_size}, {pages * config.page_size:,} tokens"
    yield f"longest request: {config.max_model_len:,} tokens; at most {config.max_running} run at once"
    sharers = len(ranks_here(run.engine)) if config.device == "cpu" else 1
    bandwidth = flags.bandwidth * 1e9 if flags.bandwidth else measure_bandwidth(config.device) / sharers
    yield f"a step's floor, by what it reads at {bandwidth / 1e9:,.0f} GB/s" + (" (measured)" * (not flags.bandwidth))
    yield f"{'tokens':>9} {'fit':>6}  " + "  ".join(f"{f'{rows} rows':>10}" for rows in ROWS)
    lengths = (
        (flags.length,)
        if flags.length
        else (*(its for its in LENGTHS if its < config.max_model_len), config.max_model_len)
    )
    for length in lengths:
        fit = found.requests_of(length)
        floors = [found.step_bytes(rows, length) / bandwidth * 1e3 if rows <= fit else None for rows in ROWS]
        yield f"{length:9,} {fit:6}  " + "  ".join("         -" if its is None else f"{its:7.2f} ms" for its in floors)


def _hardware(run: RunConfig, flags: PlanFlags) -> HardwareInfo:
    from tokenmill.engine.device import measure_hardware, why_not_cuda

    if run.engine.device != "cuda" or not (reason := why_not_cuda()):
        hardware = measure_hardware(run.engine.device)
        return hardware if flags.memory is None else replace(hardware, memory_bytes=int(flags.memory * GIB))
    if flags.memory is None or flags.bandwidth is None:
        raise ConfigError(f"no GPU to measure ({reason}): say --memory (GiB free) and --bandwidth (GB/s) of one")
    return HardwareInfo("cuda", 1, int(flags.memory * GIB), "bfloat16", f"a GPU with {flags.memory:g} GiB free")
