"""Kernels compiled before they are needed, many at a time, while the weights are read.

An engine of one layer without memory ("meta" tensors have a shape only) launches steps of every kind. Triton's hook for
kernels that are not loaded yet keeps them from being launched and hands them to threads, which compile them (most of it
without Python's lock), or find them in Triton's cache folder. So no kernel is listed anywhere: what the engine would
launch is what is compiled, and what this misses is compiled when it is first launched.

A mark in that folder tells the next start that there is nothing to compile; kernels are then read at first use.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmill.attention.base import AttentionBackend
from tokenmill.attention.select import make_backend
from tokenmill.config import ResolvedConfig
from tokenmill.engine.device import Captured, Work
from tokenmill.engine.engine import ModelEngine
from tokenmill.models.load import build_model
from tokenmill.ops.api import Ops
from tokenmill.ops.select import has_pdl
from tokenmill.parallel.group import Group
from tokenmill.sched.plan import Row, SlotOpening, StepPlan
from tokenmill.spec import ModelSpec
from tokenmill.types import SamplingParams

META = torch.device("meta")
TOKENS = sorted({2**power + more for power in range(1, 10) for more in (0, 1)})  # kernels differ by such classes
PACKAGE = Path(__file__).parents[1]
MARK = "compiled"

log = logging.getLogger(__name__)


class MetaDevice:
    """A device that computes shapes. What is submitted is done at once; what is captured is done once."""

    torch_device = META

    def upload(self, numbers: array[int]) -> Tensor:
        """See `Device.upload`."""
        return torch.empty(len(numbers), dtype=torch.int32, device=META)

    stage = upload

    def submit(self, work: Work) -> MetaDevice:
        """See `Device.submit`."""
        with torch.inference_mode():
            work()
        return self

    def wait(self) -> list[int]:
        """See `Pending.wait`."""
        return []

    def capture(self, work: Callable[[], Tensor]) -> Captured:
        """See `GraphDevice.capture`."""
        return Captured(lambda: None, work(), 0)

    def close(self) -> None:
        """Nothing to do."""


def rehearse(spec: ModelSpec, group: Group, config: ResolvedConfig, ops: Ops, attention: AttentionBackend) -> None:
    """Launch steps of every kind without computing any."""
    spec = dataclasses.replace(spec, num_layers=1)
    config = dataclasses.replace(config, debug_checks=False)
    model, _ = build_model(spec, getattr(torch, config.dtype), group, attention, ops, META)
    engine = ModelEngine(model, ops, attention, config, MetaDevice())
    for plan in _plans(config.max_running):
        engine.launch(plan)
    while engine.prepare():
        pass


def _plans(slots: int) -> Iterator[StepPlan]:
    """Steps without and with filters: a prompt, many prompts, a prompt beside decode rows; then decode rows alone."""
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9)):
        openings = tuple(SlotOpening(slot, slot, params, 1, ()) for slot in range(slots))
        for tokens in TOKENS:
            yield StepPlan(0, (_row(0, tokens),), openings)
        for rows in (rows for rows in TOKENS if rows < slots):
            yield StepPlan(0, tuple(_row(slot, 2) for slot in range(rows)))
            yield StepPlan(0, tuple(_row(slot, 1 + (slot == 0)) for slot in range(rows)))
        yield StepPlan(0, (_row(0, 1),), is_decode=True)


def _row(slot: int, length: int) -> Row:
    return Row(slot, slot, 0, length, (0,) * length, True)


class Compilation:
    """Kernels being compiled on `num_threads` threads: those that `rehearsal` would launch and that are not loaded."""

    def __init__(self, rehearsal: Callable[[], None], num_threads: int) -> None:
        device = torch.cuda.current_device() if torch.cuda.is_available() else -1  # -1: `set_device` does nothing
        self._pool = ThreadPoolExecutor(num_threads, "compile", torch.cuda.set_device, (device,))
        self._kernels: dict[tuple[str, str], Future[Any]] = {}
        self._began = time.perf_counter()
        self._rehearsal = self._pool.submit(self._rehearse, rehearsal)

    def wait(self) -> int:
        """Until all are compiled and loaded; how many there were. Raises what rehearsal or compiler raised."""
        try:
            self._rehearsal.result()
            for kernel in self._kernels.values():
                kernel.result()
        finally:
            self.cancel()
        log.info("%d kernels compiled in %.1f s", len(self._kernels), time.perf_counter() - self._began)
        return len(self._kernels)

    def cancel(self) -> None:
        """Begin nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _rehearse(self, rehearsal: Callable[[], None]) -> None:
        from triton import knobs
        from triton.runtime import driver

        thread, real = threading.get_ident(), driver.active
        device = real.get_current_device()

        def divert(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
            if threading.get_ident() != thread:
                return False
            kernel = f"{fn.module}.{fn.name}", key
            loaded, _, target, *_ = fn.jit_function.device_caches[device]
            if key not in loaded and kernel not in self._kernels:
                self._kernels[kernel] = self._pool.submit(_compile, fn.jit_function, key, compile, target, loaded)
            return True  # neither compiled here nor launched

        before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, divert
        driver.set_active(EmptyDevice(real, thread))
        try:
            rehearsal()
        finally:
            driver.set_active(real)
            knobs.runtime.jit_cache_hook = before


class EmptyDevice:
    """Triton's driver, but for one thread the device is one that no kernel was ever loaded on.

    A kernel that is loaded would be launched without asking the hook, and read addresses that are none.
    """

    def __init__(self, real: Any, thread: int) -> None:
        self._real, self._thread = real, thread

    def get_current_device(self) -> object:
        """The device, by which Triton keeps loaded kernels."""
        return META if threading.get_ident() == self._thread else self._real.get_current_device()

    def get_current_stream(self, device: object) -> object:
        """A stream of the device."""
        return 0 if device is META else self._real.get_current_stream(device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _compile(function: Any, key: str, given: dict[str, Any], target: Any, loaded: dict[str, Any]) -> object:
    """What Triton does for a kernel that is not in its table of `loaded` ones; `given` is what the hook was told."""
    from triton.compiler import ASTSource, compile

    options = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in json.loads(given["specialization_data"])["options"].items()
    }
    kernel = compile(ASTSource(function, given["signature"], given["constants"], given["configs"][0]), target, options)
    loaded[key] = kernel
    return kernel.run  # asking for it makes the launcher and loads the kernel


@contextmanager
def compiled_ahead(spec: ModelSpec, group: Group, config: ResolvedConfig) -> Iterator[None]:
    """Compile what the model needs on the current CUDA device beside what the block does; wait for it at its end."""
    mark = None if config.device == "cpu" else _mark(spec, group, config)
    if mark is None or mark.has_file(MARK):
        yield
        return
    device = torch.device("cuda", torch.cuda.current_device())

    def rehearsal() -> None:
        from tokenmill.ops.triton.ops import TritonOps

        attention = make_backend("triton", spec, getattr(torch, config.dtype), device, group.size)
        rehearse(spec, group, config, TritonOps(has_pdl=has_pdl(device)), attention)

    compilation = Compilation(rehearsal, config.threads)
    try:
        yield
    except BaseException:
        compilation.cancel()
        raise
    try:
        compilation.wait()
    except Exception as error:
        details = log.isEnabledFor(logging.DEBUG)
        log.warning(
            "kernels are compiled at first use, not ahead: %s: %s", type(error).__name__, error, exc_info=details
        )
    else:
        mark.put("", MARK)


def _mark(spec: ModelSpec, group: Group, config: ResolvedConfig) -> Any:
    """The folder in Triton's cache for the mark of all that decides which kernels there are, their source included."""
    from triton import __version__
    from triton.runtime.cache import get_cache_manager

    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    sizes = config.dtype, config.page_size, config.max_running, config.graph_max_batch
    digest.update(repr((spec, group.size, sizes, torch.cuda.get_device_name(), __version__)).encode())
    return get_cache_manager(digest.hexdigest())
