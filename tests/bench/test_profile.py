"""Summaries of traces that are made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenmill.bench.profile import check_file, idle_share, profiled, step_times
from tokenmill.bench.report import Report
from tokenmill.errors import ConfigError
from tokenmill.trace import DEVICE, Span

US = 1000


def host_spans(step: int, *, plan: int, launch: int, stage: int, commit: int) -> list[Span]:
    times = {"plan": plan, "launch": launch, "stage": stage, "commit": commit}
    return [Span("host", name, step, 0, time * US) for name, time in times.items()]


def test_host_time_is_plan_stage_the_rest_of_launch_and_commit() -> None:
    spans = [*host_spans(0, plan=10, launch=50, stage=30, commit=7), Span(DEVICE, "step", 0, 100 * US, 400 * US)]
    (times,) = step_times(spans, {0: (3, 3)})
    assert times.phases == {"plan": 10, "stage": 30, "launch": 20, "commit": 7, "host": 67, "device": 300}
    assert (times.rows, times.gap, times.is_decode) == (3, None, True)


def test_phases_of_other_threads_are_not_the_hosts() -> None:
    spans = [
        Span("host", "launch", 0, 0, 5 * US),
        Span("cpu-stream", "stage", 0, 0, 90 * US),
        Span("host", "commit", 0, 5 * US, 6 * US),
        Span(DEVICE, "step", 0, 0, 1),
    ]
    (times,) = step_times(spans, {0: (1, 1)})
    assert (times.phases["stage"], times.phases["launch"]) == (0, 5)


def test_steps_that_are_not_committed_are_left_out() -> None:
    spans = [Span("host", "launch", 0, 0, 5), Span(DEVICE, "step", 0, 0, 1)]
    assert step_times(spans, {0: (1, 1)}) == []


def test_idle_is_the_gaps_between_decode_steps_that_follow_one_another() -> None:
    begins_and_ends = [(0, 90), (100, 190), (195, 300), (900, 990), (1000, 1090)]
    sizes = dict(enumerate([(2, 2), (2, 2), (2, 9), (2, 2), (2, 2)]))
    spans = [Span(DEVICE, "step", step, begin * US, end * US) for step, (begin, end) in enumerate(begins_and_ends)]
    for step in range(5):
        spans += host_spans(step, plan=1, launch=1, stage=0, commit=1)
    found = step_times(spans, sizes)
    assert [its.gap for its in found] == [None, 10, None, None, 10]
    assert idle_share(found) == pytest.approx(20 / (20 + 90 + 90))
    assert idle_share(found[:1]) is None


def test_a_profile_is_written_and_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    check_file(path)
    report = Report({"model": "m"}, as_json=True)
    with profiled(path, "cpu", report) as tracer:
        assert tracer is not None
        for step, (rows, tokens) in enumerate([(1, 5), (1, 1), (300, 300)]):
            tracer.enter("plan")
            tracer.launch(step, rows, tokens)
            tracer.watch(step, lambda step=step: tracer.forward(step))()
            tracer.enter("commit", step)
            tracer.leave()
    assert {event["ph"] for event in json.loads(path.read_text())["traceEvents"]} == {"M", "X", "C"}
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(its["profile"], its["rows"], its["steps"]) for its in lines] == [
        ("decode", [1, 1], 1),
        ("decode", [257, 300], 1),
        ("mixed", [1, 1], 1),
    ]
    assert all(set(its["us"]) == {"plan", "stage", "launch", "commit", "host", "device"} for its in lines)


def test_without_a_file_there_is_no_tracer(capsys: pytest.CaptureFixture[str]) -> None:
    with profiled(None, "cpu", Report({}, as_json=True)) as tracer:
        assert tracer is None
    assert capsys.readouterr().out == ""


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--profile .*/none/trace\.json cannot be written: No such file"):
        check_file(tmp_path / "none" / "trace.json")
