"""The CPU as a device: order, errors, and an end that loses nothing."""

from __future__ import annotations

import threading
from array import array

import pytest
import torch

from tokenmill.engine.device import CpuDevice, CudaDevice, measure_hardware, why_not_cuda
from tokenmill.errors import ConfigError


@pytest.fixture
def device():
    device = CpuDevice(threads=1)
    yield device
    device.close()


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def test_work_runs_one_after_another_while_the_caller_goes_on(device):
    gate, seen = threading.Event(), []

    def first():
        gate.wait(30)
        seen.append("first")
        return ids(1)

    tasks = [device.submit(first), device.submit(lambda: seen.append("second"))]
    assert seen == []
    gate.set()
    assert tasks[0].wait() == [1]
    assert tasks[1].wait() == []
    assert seen == ["first", "second"]


def test_an_error_reaches_who_waits_and_only_him(device):
    broken, fine = device.submit(lambda: 1 // 0), device.submit(lambda: ids(5))
    assert fine.wait() == [5]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            broken.wait()


def test_closing_finishes_what_is_queued():
    device = CpuDevice(threads=1)
    tasks = [device.submit(lambda index=index: ids(index)) for index in range(100)]
    device.close()
    assert [task.wait() for task in tasks] == [[index] for index in range(100)]


def test_work_runs_without_gradients_and_with_its_own_threads(device):
    assert device.submit(lambda: ids(torch.is_inference_mode_enabled(), torch.get_num_threads())).wait() == [1, 1]
    assert not torch.is_inference_mode_enabled()


def test_numbers_are_uploaded(device):
    assert device.upload(array("i", [3, -1])).tolist() == [3, -1]
    assert device.upload(array("i")).shape == (0,)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_error_only_when_asked_for():
    assert why_not_cuda()
    assert measure_hardware("cpu").device == "cpu"
    with pytest.raises(ConfigError, match="--device cuda cannot be used: torch finds no CUDA device"):
        measure_hardware("cuda")


def test_the_machine_is_measured_and_its_threads_left_as_allowed():
    hardware = measure_hardware("cpu")
    assert hardware.device == "cpu"
    assert hardware.num_threads == torch.get_num_threads() >= 1
    assert hardware.memory_bytes > 0
    assert hardware.fastest_dtype in ("float32", "bfloat16")


def test_the_drivers_lack_of_memory_in_a_capture_is_torchs():
    class Device(CudaDevice):
        def __init__(self, error):
            self._error = error

        def _capture(self, work):
            raise self._error

    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        Device(RuntimeError("CUDA error: out of memory")).capture(lambda: torch.empty(0))
    with pytest.raises(RuntimeError, match="invalid"):
        Device(RuntimeError("CUDA error: invalid argument")).capture(lambda: torch.empty(0))
