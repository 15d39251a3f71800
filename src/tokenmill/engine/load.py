"""From a model's files and a configuration to an engine that is ready."""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path

import torch

from tokenmill.attention.select import make_backends
from tokenmill.config import ResolvedConfig, RunConfig, check_vocabulary, kv_bytes, resolve
from tokenmill.engine.compiler import Rehearsal
from tokenmill.engine.device import finish_cuda_work, free_cuda_memory, measure_hardware, open_device
from tokenmill.engine.engine import ModelEngine
from tokenmill.engine.memory import part_of, resolve_beside, set_aside, share_of
from tokenmill.engine.packing import BITS, find_library
from tokenmill.engine.warm_up import WarmUp
from tokenmill.errors import ConfigError
from tokenmill.models.base import CausalLM
from tokenmill.models.load import load_model, load_packed, random_model
from tokenmill.ops.cpu.kernels import CpuKernels
from tokenmill.ops.select import make_ops
from tokenmill.parallel.group import Group
from tokenmill.parallel.place import ranks_here
from tokenmill.sampling.grammar import Apply, MatcherSource
from tokenmill.spec import HardwareInfo, ModelSpec
from tokenmill.version import __version__
from tokenmill.weights.checkpoint import open_checkpoint, read_shape

log = logging.getLogger(__name__)


def load_engine(
    run: RunConfig,
    path: Path,
    group: Group,
    warm_up: WarmUp | None = None,
    matchers: MatcherSource | None = None,
    num_tokens: int = 0,
) -> tuple[ModelEngine, ResolvedConfig, ModelSpec]:
    """Measure the machine, load the model, size the K/V pool from what is left, make the engine.

    Without `matchers` it takes no requests with grammars. `num_tokens` are the tokenizer's own, where they are known.

    Raises:
        ModelUnreadable: the model's files cannot be used.
        ConfigError: the configuration cannot work with this model on this machine.
    """
    if group.size != run.engine.tp:
        raise ConfigError("--tp is not for this command: leave it out")
    warm_up = warm_up or WarmUp(run, path)
    try:
        hardware = _shared_hardware(measure_hardware(run.engine.device), group, len(ranks_here(run.engine)))
        checkpoint = None if run.model.random_weights else open_checkpoint(path)
        spec = read_shape(path) if checkpoint is None else checkpoint.spec
        spec = spec.within(run.model.max_model_len)
        checkpoint = None if checkpoint is None else dataclasses.replace(checkpoint, spec=spec)
        check_vocabulary(num_tokens, spec.vocab_size)
        library = find_library(run, hardware, checkpoint, group)
        if library is not None and run.engine.kv_dtype == "auto":
            kv_dtype = "bfloat16" if run.model.dtype == "auto" else run.model.dtype
            run = dataclasses.replace(run, engine=dataclasses.replace(run.engine, kv_dtype=kv_dtype))
        share = share_of(spec, group.size)
        config = resolve(run, hardware, share)  # what cannot work is refused before the weights are read
        torch.set_num_threads(config.threads)
        device, dtype = torch.device(config.device), getattr(torch, config.dtype)
        attention = make_backends(run.engine.attention, spec, dtype, device, group.size)
        ops = make_ops("triton" if device.type == "cuda" else "reference", device)
        if attention[0].name == "triton":
            alone = Group(group.rank, group.size)
            warm_up.begin(Rehearsal(spec, alone, config, ops, attention, torch.cuda.get_device_capability(device)))
        else:
            warm_up.cancel()
        if device.type == "cuda" and group.size > 1 and run.engine.nnodes == 1 and run.engine.peer_memory:
            from tokenmill.parallel.peers import with_peer_memory  # needs Triton

            own = torch.device("cuda", torch.cuda.current_device())
            group = with_peer_memory(group, spec.hidden_size, dtype, own)
        started = time.perf_counter()
        options = {"dtype": dtype, "group": group, "attention": attention, "ops": ops, "device": device}
        model: CausalLM
        apply_masks: Apply | None = None
        with torch.inference_mode():
            if checkpoint is None:
                model = random_model(spec, **options)
            elif library is None:
                model = load_model(checkpoint, **options)
            else:
                kernels = CpuKernels(library, config.threads)
                packed = load_packed(checkpoint, kernels, BITS.get(run.model.quantization))
                model, attention, apply_masks = packed, (packed.attention(),), kernels.apply_masks
                torch.set_num_threads(1)  # torch's own would spin where the kernels' work
        log.info("weights loaded in %.1f s", time.perf_counter() - started)
        if config.device == "cuda":
            log.info("%d MiB of device memory set aside for CUDA graphs and sampling", set_aside(config, spec) >> 20)
            free = min(map(int, group.exchange("free", str(free_cuda_memory()))))
            config = resolve_beside(run, hardware, share, config, free)
        config = dataclasses.replace(config, attention=attention[0].name)
        _compare(config, spec, group)
        if group.rank == 0:
            _log(run, hardware, config, share)
        parts = (
            model,
            ops,
            attention,
            config,
            open_device(config if library is None else dataclasses.replace(config, threads=1)),
        )
        engine = ModelEngine(
            *parts,
            matchers=matchers,
            apply_masks=apply_masks,
            may_capture=warm_up.is_done,
            agree=group.all_agree,
            at_close=warm_up.cancel,
        )
        if config.device == "cuda":
            finish_cuda_work()
        warm_up.wait(for_all=config.capture_first)
    except BaseException:
        warm_up.cancel()
        raise
    while config.capture_first and engine.prepare():
        pass
    return engine, config, spec


def _shared_hardware(hardware: HardwareInfo, group: Group, num_here: int) -> HardwareInfo:
    """What all ranks reckon with: rank 0's choice of a type, and the least that one of them has.

    Raises:
        ConfigError: the ranks' devices differ.
    """
    if group.size == 1:
        return hardware
    hardware = part_of(hardware, num_here)
    word = f"{hardware.device} {hardware.fastest_dtype} {hardware.memory_bytes}"
    devices, dtypes, memories = zip(*(its.split() for its in group.exchange("hardware", word)), strict=True)
    if len(set(devices)) > 1:
        found = ", ".join(f"rank {rank}: {device}" for rank, device in enumerate(devices))
        raise ConfigError(f"the ranks' devices differ ({found}): say which with --device")
    return dataclasses.replace(hardware, fastest_dtype=dtypes[0], memory_bytes=min(map(int, memories)))


def _compare(config: ResolvedConfig, spec: ModelSpec, group: Group) -> None:
    """Raises ConfigError: the ranks were not started alike."""
    words = repr((__version__, dataclasses.replace(config, threads=0), spec))
    if group.size > 1 and len(set(group.exchange("configuration", words))) > 1:
        advice = "start all with one command, but for --node-rank"
        raise ConfigError(f"the ranks have different flags, models or versions of tokenmill: {advice}")


def _log(run: RunConfig, hardware: HardwareInfo, config: ResolvedConfig, spec: ModelSpec) -> None:
    reason = "chosen: the faster one here" if run.model.dtype == "auto" else "as asked"
    threads = "" if config.device == "cuda" else f", {config.threads} threads"
    log.info("%s%s, %s (%s), %s attention", hardware.name, threads, config.dtype, reason, config.attention)
    log.info(
        "K/V pool: %s pages of %d tokens, up to %d MiB; %d tokens a request at most",
        " and ".join(map(str, config.kind_pages)),
        config.page_size,
        kv_bytes(config, spec) >> 20,
        config.max_model_len,
    )
