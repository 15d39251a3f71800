"""The device: what it offers, and the order in which it runs things."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from tokenmill.spec import DTypeName, HardwareInfo

T = TypeVar("T")

PROBE_ROWS = (1, 8, 128)
PROBE_SHAPE = (2048, 512)
PROBE_TRIALS = 5


def measure_hardware() -> HardwareInfo:
    """Look at this machine (a tenth of a second): threads allowed, memory free, the faster dtype for products."""
    threads = _allowed_threads()
    torch.set_num_threads(1)  # threads that wait for one another would measure what else runs
    fastest = _fastest_dtype()
    torch.set_num_threads(threads)
    return HardwareInfo(
        device="cpu",
        num_threads=threads,
        memory_bytes=_free_memory(),
        fastest_dtype=fastest,
        name=_processor_name(),
    )


def _allowed_threads() -> int:
    """Cores that this process may use: its affinity, and its control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores


def _free_memory() -> int:
    """Bytes that can be taken without swapping: the system's figure, and the control group's limit."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(free, 0)


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return "CPU"


def _fastest_dtype() -> DTypeName:
    """bfloat16 if products with few and with many rows take less time than in float32, taken together."""
    ratio = 1.0
    for rows in PROBE_ROWS:
        least = {torch.bfloat16: float("inf"), torch.float32: float("inf")}
        for _ in range(PROBE_TRIALS):  # in turns, so that other load meets both
            for dtype in least:
                least[dtype] = min(least[dtype], _product_seconds(rows, dtype))
        ratio *= least[torch.bfloat16] / least[torch.float32]
    return "bfloat16" if ratio < 1.0 else "float32"


def _product_seconds(rows: int, dtype: torch.dtype) -> float:
    """The least time of a few products of [rows, k] and [n, k]."""
    weight = torch.ones(PROBE_SHAPE, dtype=dtype)
    inputs = torch.ones(rows, PROBE_SHAPE[1], dtype=dtype)
    least = float("inf")
    for _ in range(PROBE_TRIALS):
        start = time.perf_counter()
        torch.nn.functional.linear(inputs, weight)
        least = min(least, time.perf_counter() - start)
    return least


class Task(Generic[T]):
    """Work given to a stream; `wait` returns its result or raises its error."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._done = threading.Event()
        self._result: T
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work; called by the stream."""
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self) -> T:
        """Block until done."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class CpuStream:
    """A thread that runs tasks in the order given: the CPU's counterpart of a CUDA stream."""

    def __init__(self, threads: int) -> None:
        self._tasks: SimpleQueue[Task[Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(threads,), name="cpu-stream", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Task[T]:
        """Queue work and return at once."""
        task = Task(work)
        self._tasks.put(task)
        return task

    def close(self) -> None:
        """Run what is queued and end the thread."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)  # per thread: a new thread starts with the default
        with torch.inference_mode():
            while (task := self._tasks.get()) is not None:
                task.run()
                del task
