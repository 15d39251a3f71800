"""Kernels compiled before they are needed, many at a time, while the weights are read.

An engine of one layer without memory ("meta" tensors have a shape only) launches steps of every kind. Triton's hook for
kernels that are not loaded yet keeps them from being launched and hands them to threads, which compile them (most of it
without Python's lock), or find them in Triton's cache folder. So no kernel is listed anywhere: what the engine would
launch is what is compiled, and what this misses is compiled when it is first launched.

A start waits for the kernels of a first request only; the others are compiled while it is served. A mark in the cache
folder tells the next start that there is nothing to compile; kernels are then read at first use.
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
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
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
FIRST_PROMPT = 32
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


def rehearse(
    spec: ModelSpec,
    group: Group,
    config: ResolvedConfig,
    ops: Ops,
    attention: AttentionBackend,
    first_known: Callable[[], None],
) -> None:
    """Launch steps of every kind without computing any; calls `first_known` after those of a first request."""
    spec = dataclasses.replace(spec, num_layers=1)
    config = dataclasses.replace(config, debug_checks=False)
    model, _ = build_model(spec, getattr(torch, config.dtype), group, attention, ops, META)
    may_capture = threading.Event()
    engine = ModelEngine(model, ops, attention, config, MetaDevice(), may_capture=may_capture.is_set)
    for plan in (StepPlan(0, (_row(0, FIRST_PROMPT),)), StepPlan(1, (_row(0, 1),), is_decode=True)):
        engine.launch(plan)
    first_known()
    for plan in _plans(config.max_running):
        engine.launch(plan)
    may_capture.set()
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
    """Kernels being compiled on `num_threads` threads: those that `rehearsal` would launch and that are not loaded.

    The rehearsal is given a function to call when the kernels that are needed first are known. Another thread that
    launches a kernel which is being compiled waits for it.
    """

    def __init__(self, rehearsal: Callable[[Callable[[], None]], None], num_threads: int) -> None:
        from triton import knobs
        from triton.runtime import driver

        device = torch.cuda.current_device() if torch.cuda.is_available() else -1  # -1: `set_device` does nothing
        self._pool = ThreadPoolExecutor(num_threads, "compile", torch.cuda.set_device, (device,))
        self._kernels: dict[tuple[str, str], Future[Any]] = {}
        self._first: list[Future[Any]] = []
        self._first_known = threading.Event()
        self._began = time.perf_counter()
        self._runtime, self._driver = knobs.runtime, driver
        self._hook_before, self._real = knobs.runtime.jit_cache_hook, driver.active
        self._device = driver.active.get_current_device()
        self._rehearsing = 0
        knobs.runtime.jit_cache_hook = self._divert
        self._rehearsal = self._pool.submit(self._rehearse, rehearsal)

    def wait_first(self) -> None:
        """Until the kernels that are needed first are compiled and loaded."""
        self._first_known.wait()
        for kernel in self._first:
            kernel.result()

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
        self._runtime.jit_cache_hook = self._hook_before
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _divert(self, *, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        kernel = f"{fn.module}.{fn.name}", key
        if threading.get_ident() != self._rehearsing:
            if kernel in self._kernels and not threading.current_thread().name.startswith("compile"):
                wait_for((self._kernels[kernel],))
            return False
        loaded, _, target, *_ = fn.jit_function.device_caches[self._device]
        if key not in loaded and kernel not in self._kernels:
            self._kernels[kernel] = self._pool.submit(_compile, fn.jit_function, key, compile, target, loaded)
        return True  # neither compiled here nor launched

    def _rehearse(self, rehearsal: Callable[[Callable[[], None]], None]) -> None:
        self._rehearsing = threading.get_ident()
        self._driver.set_active(EmptyDevice(self._real, self._rehearsing))
        try:
            rehearsal(self._tell_first)
        finally:
            self._rehearsing = 0
            self._driver.set_active(self._real)
            self._first_known.set()

    def _tell_first(self) -> None:
        self._first = list(self._kernels.values())
        self._first_known.set()


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


class WarmUp:
    """Compiles what the model needs on the current CUDA device beside what else is done; nothing on a CPU."""

    def __init__(self, spec: ModelSpec, group: Group, config: ResolvedConfig) -> None:
        self._mark: Any = None if config.device == "cpu" else _mark(spec, group, config)
        self._compilation: Compilation | None = None
        self._is_done = True
        if self._mark is None or self._mark.has_file(MARK):
            return
        device = torch.device("cuda", torch.cuda.current_device())

        def rehearsal(first_known: Callable[[], None]) -> None:
            from tokenmill.ops.triton.ops import TritonOps

            attention = make_backend("triton", spec, getattr(torch, config.dtype), device, group.size)
            rehearse(spec, group, config, TritonOps(has_pdl=has_pdl(device)), attention, first_known)

        self._is_done = False
        self._compilation = Compilation(rehearsal, config.threads)

    def wait(self, *, for_all: bool) -> None:
        """Until a first request can be served, or for all kernels, the others of which go on being compiled."""
        if self._compilation is None:
            return
        if for_all:
            self._finish()
            return
        with suppress(Exception):  # told at the end
            self._compilation.wait_first()
        threading.Thread(target=self._finish, name="warm-up", daemon=True).start()

    def is_done(self) -> bool:
        """Whether kernels are compiled; until then a graph's kernels would keep its capture waiting."""
        return self._is_done

    def cancel(self) -> None:
        """Begin nothing more."""
        if self._compilation is not None:
            self._compilation.cancel()

    def _finish(self) -> None:
        assert self._compilation is not None
        try:
            self._compilation.wait()
        except CancelledError:
            return
        except Exception as error:
            details = log.isEnabledFor(logging.DEBUG)
            log.warning(
                "kernels are compiled at first use, not ahead: %s: %s", type(error).__name__, error, exc_info=details
            )
        else:
            self._mark.put("", MARK)
        finally:
            self._is_done = True


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
