"""From a model's files and a configuration to an engine that is ready."""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path

import torch

from tokenmill.attention.base import AttentionBackend
from tokenmill.attention.select import make_backend
from tokenmill.config import ELEMENT_SIZE, ResolvedConfig, RunConfig, resolve, resolve_dtype
from tokenmill.engine.device import free_cuda_memory, measure_hardware, open_device
from tokenmill.engine.engine import ModelEngine
from tokenmill.models.base import CausalLM
from tokenmill.models.load import load_model, random_model
from tokenmill.ops.api import Ops
from tokenmill.ops.select import make_ops
from tokenmill.parallel.group import Group
from tokenmill.spec import DTypeName, HardwareInfo, ModelSpec
from tokenmill.weights.checkpoint import open_checkpoint
from tokenmill.weights.hf_folder import read_spec

log = logging.getLogger(__name__)


def load_engine(run: RunConfig, path: Path, group: Group) -> tuple[ModelEngine, ResolvedConfig, ModelSpec]:
    """Measure the machine, load the model, size the K/V pool from what is left, make the engine.

    Raises:
        ModelUnreadable: the model's files cannot be used.
        ConfigError: the configuration cannot work with this model on this machine.
    """
    hardware = measure_hardware(run.engine.device)
    dtype = resolve_dtype(run, hardware)
    torch.set_num_threads(run.engine.threads or hardware.num_threads)
    started = time.perf_counter()
    attention, ops, model = _load_model(run, path, group, hardware, dtype)
    log.info("weights loaded in %.1f s", time.perf_counter() - started)
    if hardware.device == "cuda":
        hardware = dataclasses.replace(hardware, memory_bytes=free_cuda_memory())
    config = dataclasses.replace(resolve(run, hardware, model.spec), attention=attention.name)
    reason = "chosen: the faster one here" if run.model.dtype == "auto" else "as asked"
    threads = "" if hardware.device == "cuda" else f", {config.threads} threads"
    log.info("%s%s, %s (%s), %s attention", hardware.name, threads, dtype, reason, config.attention)
    per_token = model.spec.kv_bytes_per_token(ELEMENT_SIZE[dtype])
    log.info(
        "K/V pool: %d pages of %d tokens, up to %d MiB; %d tokens a request at most",
        config.num_pages,
        config.page_size,
        config.pool_tokens * per_token >> 20,
        config.max_model_len,
    )
    engine = ModelEngine(model, ops, attention, config, open_device(config))
    if config.capture_first:
        while engine.prepare():
            pass
    return engine, config, model.spec


def _load_model(
    run: RunConfig, path: Path, group: Group, hardware: HardwareInfo, dtype: DTypeName
) -> tuple[AttentionBackend, Ops, CausalLM]:
    checkpoint = None if run.model.random_weights else open_checkpoint(path)
    spec = read_spec(path) if checkpoint is None else checkpoint.spec
    device = torch.device(hardware.device)
    torch_dtype = getattr(torch, dtype)
    attention = make_backend(run.engine.attention, spec, torch_dtype, device, group.size)
    ops = make_ops("triton" if device.type == "cuda" else "reference", device)
    options = {"dtype": torch_dtype, "group": group, "attention": attention, "ops": ops, "device": device}
    with torch.inference_mode():
        if checkpoint is None:
            return attention, ops, random_model(spec, **options)
        return attention, ops, load_model(checkpoint, **options)
