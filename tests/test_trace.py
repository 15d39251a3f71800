"""Tracers, with clocks that tests turn themselves."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.sched.support import make_config
from tokenmill.engine.fake import FakeEngine
from tokenmill.sched.scheduler import Scheduler
from tokenmill.trace import DEVICE, Clock, Span, Tracer
from tokenmill.types import SamplingParams
from tokenmill.wire.channel import MemoryChannel
from tokenmill.wire.messages import GenerateJob, TextOptions, pack_ids
from tokenmill.worker.core import Core
from tokenmill.worker.loop import make_loop


class DelayedClock(Clock):
    """A device that comes to each mark ten nanoseconds after the host set it."""

    def __init__(self, ticks: count[int]) -> None:
        self.ticks = ticks

    def stamp(self) -> int:
        return next(self.ticks)

    def nanoseconds(self, stamps: Sequence[int]) -> list[int]:
        return [stamp + 10 for stamp in stamps]


def make_tracer() -> Tracer:
    ticks = count(100)
    return Tracer(DelayedClock(ticks), lambda: next(ticks))


def test_phases_follow_one_another_and_take_the_step_of_the_next_when_they_have_none() -> None:
    tracer = make_tracer()
    tracer.enter("plan")
    tracer.launch(7, rows=2, tokens=5)
    tracer.enter("wait", 6)
    tracer.leave()
    host = threading.current_thread().name
    assert tracer.spans() == [
        Span(host, "plan", 7, 100, 101),
        Span(host, "launch", 7, 101, 102),
        Span(host, "wait", 6, 102, 103),
    ]
    assert tracer.sizes == {7: (2, 5)}


def test_what_is_watched_lies_inside_the_phase_that_is_open_and_marks_the_device() -> None:
    tracer = make_tracer()

    def work() -> str:
        tracer.forward(3)
        tracer.enter("sample", 3)
        return "ids"

    tracer.launch(3, rows=1, tokens=1)
    assert tracer.watch(3, work)() == "ids"
    tracer.enter("commit", 3)
    spans = {span.name: span for span in tracer.spans()}
    launch = spans["launch"]
    inner = [spans[name] for name in ("stage", "forward", "sample")]
    assert [span.step for span in inner] == [3, 3, 3]
    assert launch.begin < inner[0].begin
    assert [span.end for span in inner[:2]] == [span.begin for span in inner[1:]]
    assert inner[2].end < launch.end
    device = spans["step"]
    assert device.track == DEVICE
    assert (device.begin, device.end) == (inner[1].begin + 11, inner[2].end + 11)
    assert "commit" not in spans, "it has not ended"


def test_work_that_fails_is_closed_and_marks_no_device() -> None:
    tracer = make_tracer()

    def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        tracer.watch(1, fail)()
    assert [span.name for span in tracer.spans()] == ["stage"]


def test_threads_have_tracks_of_their_own() -> None:
    tracer = make_tracer()
    tracer.enter("launch", 1)
    thread = threading.Thread(target=tracer.watch(1, lambda: tracer.forward(1)), name="other")
    thread.start()
    thread.join()
    tracer.leave()
    tracks = {span.name: span.track for span in tracer.spans()}
    assert tracks == {
        "launch": threading.current_thread().name,
        "stage": "other",
        "forward": "other",
        "step": DEVICE,
    }


def assert_nested(events: Sequence[dict[str, Any]]) -> None:
    """Spans of one track lie one after the other or one inside the other."""
    for track in {event["tid"] for event in events}:
        open_until: list[float] = []
        for event in sorted((e for e in events if e["tid"] == track), key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= event["ts"] + 1e-6:
                open_until.pop()
            end = event["ts"] + event["dur"]
            assert not open_until or end <= open_until[-1] + 1e-6, event
            open_until.append(end)


@pytest.mark.parametrize("loop", ["serial", "overlap"])
def test_a_traced_run_is_written_as_a_trace_file(loop: str, tmp_path: Path) -> None:
    config = make_config(loop=loop)
    inbox: MemoryChannel[Any] = MemoryChannel()
    turning = make_loop(Core(Scheduler(config), inbox, MemoryChannel(), MemoryChannel()), FakeEngine(config))
    turning.steps.tracer = tracer = Tracer(Clock())
    params = SamplingParams(temperature=0)
    prompt = pack_ids([5, 6, 7])
    inbox.send(GenerateJob(uid=1, token_ids=prompt, params=params, max_tokens=4, end_ids=[], text=TextOptions()))
    for _ in range(8):
        turning.turn()
    tracer.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert_nested(spans)
    for name in ("plan", "launch", "wait", "commit"):
        assert {0, 1, 2, 3} <= {span["args"]["step"] for span in spans if span["name"] == name}
    counters = [event["args"] for event in events if event["ph"] == "C"]
    assert counters[:2] == [{"rows": 1, "tokens": 3}, {"rows": 1, "tokens": 1}]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {spans[0]["tid"]: threading.current_thread().name}
