"""The CPU's stream: order, errors, and an end that loses nothing."""

from __future__ import annotations

import threading

import pytest
import torch

from tokenmill.engine.device import CpuStream, measure_hardware


@pytest.fixture
def stream():
    stream = CpuStream(threads=1)
    yield stream
    stream.close()


def test_tasks_run_one_after_another_while_the_caller_goes_on(stream):
    gate, seen = threading.Event(), []

    def first():
        gate.wait(30)
        seen.append("first")
        return 1

    tasks = [stream.submit(first), stream.submit(lambda: seen.append("second"))]
    assert seen == []
    gate.set()
    assert tasks[0].wait() == 1
    assert tasks[1].wait() is None
    assert seen == ["first", "second"]


def test_an_error_reaches_who_waits_and_only_him(stream):
    broken, fine = stream.submit(lambda: 1 // 0), stream.submit(lambda: 5)
    assert fine.wait() == 5
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            broken.wait()


def test_closing_finishes_what_is_queued():
    stream = CpuStream(threads=1)
    tasks = [stream.submit(lambda index=index: index) for index in range(100)]
    stream.close()
    assert [task.wait() for task in tasks] == list(range(100))


def test_work_runs_without_gradients_and_with_its_own_threads(stream):
    assert stream.submit(torch.is_inference_mode_enabled).wait()
    assert stream.submit(torch.get_num_threads).wait() == 1
    assert not torch.is_inference_mode_enabled()


def test_the_machine_is_measured_and_its_threads_left_as_allowed():
    hardware = measure_hardware()
    assert hardware.device == "cpu"
    assert hardware.num_threads == torch.get_num_threads() >= 1
    assert hardware.memory_bytes > 0
    assert hardware.fastest_dtype in ("float32", "bfloat16")
