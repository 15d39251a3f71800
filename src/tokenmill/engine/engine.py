"""The only owner of device memory: plans in, drawn ids out."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch

from tokenmill.attention.base import AttentionBackend
from tokenmill.attention.select import make_backend
from tokenmill.config import ELEMENT_SIZE, ResolvedConfig, RunConfig, resolve
from tokenmill.engine import stage
from tokenmill.engine.device import CpuStream, Task, measure_hardware
from tokenmill.engine.kv_pool import DeviceState, allocate
from tokenmill.models.base import CausalLM
from tokenmill.models.load import load_model
from tokenmill.parallel.group import Group
from tokenmill.sampling.batch import SamplingTable
from tokenmill.sampling.sampler import sample
from tokenmill.sched.plan import StepPlan, StepResult
from tokenmill.spec import ModelSpec
from tokenmill.weights.checkpoint import open_checkpoint

log = logging.getLogger(__name__)


def load_engine(run: RunConfig, path: Path, group: Group) -> tuple[ModelEngine, ResolvedConfig, ModelSpec]:
    """Measure the machine, resolve the configuration, load the model, allocate K/V.

    Raises:
        ModelUnreadable: the model's files cannot be used.
        ConfigError: the configuration cannot work with this model on this machine.
    """
    hardware = measure_hardware()
    checkpoint = open_checkpoint(path)
    config = resolve(run, hardware, checkpoint.spec)
    torch.set_num_threads(config.threads)
    attention = make_backend(config.attention, checkpoint.spec)
    dtype = getattr(torch, config.dtype)
    started = time.perf_counter()
    with torch.inference_mode():
        model = load_model(checkpoint, dtype=dtype, group=group, attention=attention)
    reason = "chosen: the faster one here" if run.model.dtype == "auto" else "as asked"
    log.info("%s, %d threads, %s (%s)", hardware.name, config.threads, config.dtype, reason)
    log.info("weights loaded in %.1f s", time.perf_counter() - started)
    per_token = checkpoint.spec.kv_bytes_per_token(ELEMENT_SIZE[config.dtype])
    log.info(
        "K/V pool: %d pages of %d tokens, up to %d MiB; %d tokens a request at most",
        config.num_pages,
        config.page_size,
        config.pool_tokens * per_token >> 20,
        config.max_model_len,
    )
    return ModelEngine(model, attention, config), config, checkpoint.spec


class ModelEngine:
    """Runs a model step by step on one stream."""

    def __init__(self, model: CausalLM, attention: AttentionBackend, config: ResolvedConfig) -> None:
        self.config = config
        self._model = model
        self._attention = attention
        self._state: DeviceState = allocate(config, model.spec, torch.device(config.device))
        self._table = SamplingTable(config.max_running, torch.device(config.device))
        self._stream = CpuStream(config.threads)

    def launch(self, plan: StepPlan) -> Task[StepResult]:
        """Start a step and return at once; steps run in the order in which they are launched."""
        return self._stream.submit(lambda: self._step(plan))

    def close(self) -> None:
        """Finish what was launched."""
        self._stream.close()

    def _step(self, plan: StepPlan) -> StepResult:
        state = self._state
        stage.apply_updates(plan, state, self._table)
        batch = stage.make_batch(plan, state, self._attention)
        logits = self._model.forward(batch, state.kv)
        sampled = [row for row in plan.rows if row.is_sampled]
        if not sampled:
            return StepResult(plan.step, ())
        slots = [row.slot for row in sampled]
        if self.config.debug_checks and not torch.isfinite(logits).all():
            raise RuntimeError(f"step {plan.step}: logits are not finite")
        ids = sample(logits, self._table, slots, [row.start + row.length for row in sampled])
        state.last_tokens[torch.tensor(slots, device=ids.device)] = ids
        return StepResult(plan.step, tuple(ids.tolist()))
