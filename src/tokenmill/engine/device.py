"""The device: what it offers, and the order in which it runs things."""

from __future__ import annotations

import importlib.util
import os
import resource
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from tokenmill.config import ResolvedConfig
from tokenmill.errors import ConfigError
from tokenmill.spec import DTypeName, HardwareInfo

PROBE_ROWS = (1, 8, 128)
PROBE_SHAPE = (2048, 512)
PROBE_TRIALS = 5
COPY_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}


def measure_hardware(wanted: Literal["auto", "cpu", "cuda"] = "auto") -> HardwareInfo:
    """Look at this machine: device, threads allowed, memory free, and the faster dtype for products.

    Raises:
        ConfigError: CUDA is asked for and cannot be used.
    """
    threads = _allowed_threads()
    reason = why_not_cuda()
    if wanted == "cuda" and reason:
        raise ConfigError(f"--device cuda cannot be used: {reason}")
    if wanted != "cpu" and not reason:
        torch.set_num_threads(threads)
        return HardwareInfo("cuda", threads, torch.cuda.mem_get_info()[0], "bfloat16", device_name("cuda"))
    torch.set_num_threads(1)  # threads that wait for one another would measure what else runs
    fastest = _fastest_dtype()
    torch.set_num_threads(threads)
    return HardwareInfo("cpu", threads, _free_memory(), fastest, device_name("cpu"))


def why_not_cuda() -> str | None:
    """Why no CUDA device can be used; None when one can."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device (a CPU build of torch, no driver, or no GPU)"
    if torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than compute capability 8.0"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is missing"
    return None


def take_device(wanted: Literal["auto", "cpu", "cuda"], index: int, number: int) -> Literal["cpu", "cuda"]:
    """The kind of device that `number` processes of this host use; makes the `index`-th GPU this process's own.

    Raises:
        ConfigError: there are fewer GPUs, or none that can be used.
    """
    reason = why_not_cuda()
    if wanted == "cpu" or (reason and wanted == "auto"):
        return "cpu"
    if reason:
        raise ConfigError(f"--device cuda cannot be used: {reason}")
    if (there := torch.cuda.device_count()) < number:
        raise ConfigError(f"--tp needs {number} GPUs on this host, which has {there}: lower it, or use --device cpu")
    torch.cuda.set_device(index)
    return "cuda"


def taken_memory() -> int:
    """Bytes of memory that this process has taken at most: of its GPU, if it uses one."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def finish_cuda_work() -> None:
    """Wait for all streams: weights and tables are on their way on another than the engine's."""
    torch.cuda.synchronize()


def measure_bandwidth(device: Literal["cpu", "cuda"]) -> float:
    """Bytes a second that a plain copy reads and writes, the best of a few."""
    free = _free_memory() if device == "cpu" else torch.cuda.mem_get_info()[0]
    source = torch.ones(min(COPY_BYTES[device], free // 4), dtype=torch.uint8, device=device)
    target, best = torch.empty_like(source), 0.0
    for _ in range(PROBE_TRIALS):
        start = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        best = max(best, 2 * source.nbytes / (time.perf_counter() - start))
    return best


def free_cuda_memory() -> int:
    """Bytes free on the device once torch's cache is given back."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


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


def device_name(device: Literal["cpu", "cuda"]) -> str:
    """What the processor or the GPU calls itself."""
    if device == "cuda":
        return torch.cuda.get_device_name()
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


Work = Callable[[], Tensor | None]  # enqueues a step; the drawn ids [rows] on the device, if any


class Pending(Protocol):
    """Work given to a device."""

    def wait(self) -> list[int]:
        """Block until it is done; the ids it drew. Raises what it raised."""


class Device(Protocol):
    """Runs work in the order in which it is given."""

    torch_device: torch.device

    def upload(self, numbers: array[int]) -> Tensor:
        """Int32 numbers as a tensor on the device; nothing waits for the copy."""

    def submit(self, work: Work) -> Pending:
        """Queue work and return at once."""

    def fetch(self, ids: Tensor) -> Pending:
        """Integers on their way to the host, behind what is queued so far. Called from submitted work."""

    def close(self) -> None:
        """Finish what is queued."""


@dataclass(frozen=True, slots=True)
class Captured:
    """Work that can be enqueued again without its host time. `output` is the same tensor in every replay."""

    replay: Callable[[], None]
    output: Tensor
    num_bytes: int  # of device memory


@runtime_checkable
class GraphDevice(Device, Protocol):
    """A device that can capture work."""

    def stage(self, numbers: array[int]) -> Tensor:
        """Int32 numbers in host memory that the device copies from by itself."""

    def capture(self, work: Callable[[], Tensor]) -> Captured:
        """Do `work` once, then record what it enqueues. Called from submitted work.

        Raises:
            torch.OutOfMemoryError: there is no memory for it; nothing is left of it.
        """


class CpuTask:
    """Work on its way through a CpuDevice."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._done = threading.Event()
        self._ids: list[int] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work; called by the device's thread."""
        try:
            ids = self._work()
            self._ids = [] if ids is None else ids.tolist()
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self) -> list[int]:
        """See `Pending.wait`."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._ids


@dataclass(frozen=True, slots=True)
class CpuFetch:
    """Numbers that are there."""

    ids: Tensor

    def wait(self) -> list[int]:
        """See `Pending.wait`."""
        return self.ids.tolist()


class CpuDevice:
    """A thread that runs work in the order given, as a CUDA stream does."""

    def __init__(self, threads: int) -> None:
        self.torch_device = torch.device("cpu")
        self._tasks: SimpleQueue[CpuTask | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(threads,), name="cpu-stream", daemon=True)
        self._thread.start()

    def upload(self, numbers: array[int]) -> Tensor:
        """See `Device.upload`; the tensor shares the numbers' memory."""
        return torch.frombuffer(numbers, dtype=torch.int32) if numbers else torch.empty(0, dtype=torch.int32)

    def submit(self, work: Work) -> CpuTask:
        """See `Device.submit`."""
        task = CpuTask(work)
        self._tasks.put(task)
        return task

    def fetch(self, ids: Tensor) -> CpuFetch:
        """See `Device.fetch`."""
        return CpuFetch(ids)

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


@dataclass(frozen=True, slots=True)
class CudaTask:
    """Work on its way through a CUDA stream; `ids` is pinned memory that is filled when `event` has passed."""

    event: torch.cuda.Event
    ids: Tensor | None

    def wait(self) -> list[int]:
        """See `Pending.wait`."""
        self.event.synchronize()
        return [] if self.ids is None else self.ids.tolist()


class CudaDevice:
    """One CUDA stream. The host runs ahead of it; pinned buffers are torch's, which reuses none before its copy."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._graph_pool = torch.cuda.graph_pool_handle()
        self._keepers: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}  # by pool

    def upload(self, numbers: array[int]) -> Tensor:
        """See `Device.upload`."""
        return self.stage(numbers).to(self.torch_device, non_blocking=True)

    def stage(self, numbers: array[int]) -> Tensor:
        """See `GraphDevice.stage`."""
        if not numbers:
            return torch.empty(0, dtype=torch.int32)
        return torch.frombuffer(numbers, dtype=torch.int32).pin_memory()

    def submit(self, work: Work) -> CudaTask:
        """See `Device.submit`."""
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            return self.fetch(work())

    def fetch(self, ids: Tensor | None) -> CudaTask:
        """See `Device.fetch`."""
        if ids is not None:
            ids = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True).copy_(ids, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return CudaTask(event, ids)

    def capture(self, work: Callable[[], Tensor]) -> Captured:
        """See `GraphDevice.capture`. All graphs share one pool, so one replay must end before the next begins."""
        try:
            return self._capture(work)
        except RuntimeError as error:  # the driver's own, which is of another type than torch's
            if "out of memory" in str(error).lower() and not isinstance(error, torch.OutOfMemoryError):
                raise torch.OutOfMemoryError(str(error)) from error
            raise

    def _capture(self, work: Callable[[], Tensor]) -> Captured:
        work()  # loads kernels and makes library handles, which a capture must not
        self.stream.synchronize()
        free = torch.cuda.mem_get_info()[0]
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._graph_pool, capture_error_mode="thread_local")
        # Torch ends a pool with the last of its graphs, and takes its handle no more: one stays, captured or failed.
        self._keepers.setdefault(self._graph_pool, graph)
        try:
            output = work()
        except BaseException:
            try:
                graph.capture_end()
            except RuntimeError:  # the error broke the capture: torch holds on to graph and pool as if it went on
                self._keepers[self._graph_pool] = graph
                self._graph_pool = torch.cuda.graph_pool_handle()
            raise
        graph.capture_end()
        return Captured(graph.replay, output, free - torch.cuda.mem_get_info()[0])

    def close(self) -> None:
        """Finish what is enqueued."""
        self.stream.synchronize()


def open_device(config: ResolvedConfig) -> CpuDevice | CudaDevice:
    """The device of a resolved configuration."""
    return CudaDevice() if config.device == "cuda" else CpuDevice(config.threads)
