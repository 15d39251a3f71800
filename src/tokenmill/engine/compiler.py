"""Kernels compiled before they are needed, in the process that `warm_up` starts.

An engine of a few layers without memory ("meta" tensors have a shape only) launches steps of every kind. Triton's hook
for kernels that are not loaded keeps them from being launched and notes them; then a forked process compiles each, and
the C code that launches it, into Triton's cache folder. So no kernel is listed anywhere: what the engine would launch
is what is compiled. None of these processes uses the GPU.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tokenmill.attention.base import AttentionBackend
from tokenmill.config import ResolvedConfig
from tokenmill.engine.device import Captured, Work
from tokenmill.engine.engine import ModelEngine
from tokenmill.models.load import build_model
from tokenmill.ops.api import Ops
from tokenmill.parallel.group import Group
from tokenmill.procs import end_with_parent
from tokenmill.sched.plan import Row, SlotOpening, StepPlan
from tokenmill.spec import ModelSpec
from tokenmill.types import SamplingParams

META = torch.device("meta")
FIRST_PROMPTS = (8, 16, 32, 64)
PROMPTS = tuple(sorted({2**power + more for power in range(1, 10) for more in (0, 1)}))  # kernels differ by these
LONG_PROMPT = 1024  # many of which take other kernels than few
MAX_PROCESSES = 16

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The engine whose steps are rehearsed, on a GPU of this compute capability; prompts of so many tokens."""

    spec: ModelSpec
    group: Group
    config: ResolvedConfig
    ops: Ops
    attention: Sequence[AttentionBackend]
    capability: tuple[int, int]
    first_prompts: tuple[int, ...] = FIRST_PROMPTS
    prompts: tuple[int, ...] = PROMPTS

    def launch(self) -> Iterator[None]:
        """Launch the steps of a first request, then those of every kind; yields after each of the two."""
        spec = replace(self.spec, num_layers=self.spec.num_telling_layers)
        config = replace(self.config, debug_checks=False)
        model, _ = build_model(spec, getattr(torch, config.dtype), self.group, self.attention, self.ops, META)
        may_capture = threading.Event()
        engine = ModelEngine(model, self.ops, self.attention, config, _MetaDevice(), may_capture=may_capture.is_set)
        for plan in _plans(self.first_prompts, 1):
            engine.launch(plan)
        yield
        for plan in _plans(self.prompts, config.max_running):
            engine.launch(plan)
        may_capture.set()
        while engine.prepare():
            pass
        yield


def _plans(prompts: tuple[int, ...], slots: int) -> Iterator[StepPlan]:
    """Steps without and with filters: a prompt, many prompts, a prompt beside decode rows; then a decode row alone."""
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9)):
        openings = tuple(SlotOpening(slot, slot, params, 1, ()) for slot in range(slots))
        for tokens in prompts:
            yield StepPlan(0, (_row(0, tokens),), openings)
        for rows in (rows for rows in prompts if rows < slots):
            yield StepPlan(0, tuple(_row(slot, 2) for slot in range(rows)))
            yield StepPlan(0, tuple(_row(slot, 1 + (slot == 0)) for slot in range(rows)))
        if slots > 1:
            yield StepPlan(0, tuple(_row(slot, LONG_PROMPT) for slot in range(min(slots, 16))))
        yield StepPlan(0, (_row(0, 1),), is_decode=True)


def _row(slot: int, length: int) -> Row:
    return Row(slot, slot, 0, length, (0,) * length, True)


class _MetaDevice:
    """A device that computes shapes. What is submitted is done at once; what is captured is done once."""

    torch_device = META

    def upload(self, numbers: array[int]) -> Tensor:
        return torch.empty(len(numbers), dtype=torch.int32, device=META)

    stage = upload

    def submit(self, work: Work) -> _MetaDevice:
        with torch.inference_mode(), _QuickShapes():
            work()
        return self

    def fetch(self, ids: Tensor) -> _MetaDevice:
        return self

    def wait(self) -> list[int]:
        return []

    def capture(self, work: Callable[[], Tensor]) -> Captured:
        return Captured(lambda: None, work(), 0)

    def close(self) -> None:
        return


class _QuickShapes(TorchFunctionMode):
    """Shapes of operations for which torch would first import its compiler, in seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.add_, Tensor.mul_, Tensor.div_, Tensor.tanh_, Tensor.addmm_, Tensor.index_copy_):
            return args[0]
        if func is Tensor.sum and args[1:] == (0,):
            return args[0][0].new_empty(args[0].shape[1:], **(kwargs or {}))
        if func is F.embedding:
            return args[1].new_empty((*args[0].shape, args[1].shape[1]))
        if func is F.linear:
            return args[0].new_empty((*args[0].shape[:-1], args[1].shape[0]))
        return func(*args, **(kwargs or {}))


def serve_rehearsal(pipe: Connection) -> None:
    """Import all that compiling needs, take a `Rehearsal`, and compile: "" is sent when a first request can be served.

    The last message says what was done.

    Raises:
        EOFError: no rehearsal comes.
        RuntimeError: kernels do not compile.
    """
    from triton import knobs
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver
    from triton.runtime.cache import triton_key

    import tokenmill.attention.triton
    import tokenmill.ops.triton.ops
    import tokenmill.sampling.triton  # noqa: F401

    triton_key()  # reads all of Triton: once, for all forked processes
    gpu = CudaDriver()
    gpu.get_current_device = gpu.get_current_stream = lambda *_: 0
    rehearsal: Rehearsal = pipe.recv()
    began = time.perf_counter()
    gpu.get_device_capability = lambda _: rehearsal.capability
    driver.set_active(gpu)
    found: dict[tuple[str, str], tuple[str, Callable[[], None]]] = {}
    num_compiled = 0

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        name = f"{fn.module}.{fn.name}"
        found.setdefault((name, key), (name, partial(_compile, fn.jit_function, compile)))
        return True  # neither compiled here nor launched

    knobs.runtime.jit_cache_hook = note
    for _ in rehearsal.launch():
        compile_all(list(found.values())[num_compiled:], min(rehearsal.config.threads, MAX_PROCESSES))
        num_compiled = len(found)
        pipe.send("")
        os.nice(10)  # requests come first
    pipe.send(f"{num_compiled} kernels compiled in {time.perf_counter() - began:.1f} s")


def _compile(function: Any, given: dict[str, Any]) -> None:
    """What Triton does for a kernel that is not loaded, but load it; `given` is what the hook was told."""
    from triton.compiler import compile
    from triton.runtime import driver

    options = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in json.loads(given["specialization_data"])["options"].items()
    }
    source = function.ASTSource(function, given["signature"], given["constants"], given["configs"][0])
    driver.active.launcher_cls(source, compile(source, driver.active.get_current_target(), options).metadata)


def compile_all(kernels: Iterable[tuple[str, Callable[[], None]]], num_processes: int) -> None:
    """Compile kernels, each in a forked process, so many at a time.

    Raises:
        RuntimeError: some do not compile.
    """
    waiting, failed = deque(kernels), []
    running: dict[int, str] = {}
    while waiting or running:
        if waiting and len(running) < num_processes:
            name, kernel = waiting.popleft()
            running[_fork(kernel)] = name
        else:
            process, status = os.wait()
            name = running.pop(process)
            failed += [name] if status else []
    if failed:
        raise RuntimeError(f"{', '.join(failed)} did not compile")


def _fork(kernel: Callable[[], None]) -> int:
    parent = os.getpid()
    process = os.fork()
    if process == 0:
        try:
            end_with_parent("kernel", parent)
            kernel()
            os._exit(0)
        except Exception:
            log.exception("a kernel does not compile")
        finally:
            os._exit(1)
    return process
