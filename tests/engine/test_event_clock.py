from __future__ import annotations

import time

import pytest
import torch

from tokenmill.engine.event_clock import EventClock

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_marks_are_in_the_order_of_the_stream_on_the_hosts_scale() -> None:
    began = time.perf_counter_ns()
    clock = EventClock()
    product = torch.ones(2048, 2048, device="cuda")
    stamps = []
    for _ in range(3):
        stamps.append(clock.stamp())
        product = product @ product / 2048
    stamps.append(clock.stamp())
    times = clock.nanoseconds(stamps)
    slack = 1_000_000  # an event's time is known to half a microsecond, the origin's to the length of a call
    assert times == sorted(times)
    assert times[0] < times[-1]
    assert began - slack < times[0]
    assert times[-1] < time.perf_counter_ns() + slack
