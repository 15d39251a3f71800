"""`tokenmill simulate` as a command, and its figures."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from tests.sched.support import make_config
from tokenmill import cli
from tokenmill.bench import plot
from tokenmill.bench.options import Compared
from tokenmill.bench.simulate import DEFAULT_COSTS, Timeline, combinations, jain, quantiles, sorted_counts
from tokenmill.sched.scheduler import Scheduler

FEW = ("--requests", "40", "--rate", "20", "--prompt", "16", "64", "--output", "4", "16", "--prefix", "32")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert cli.main(["simulate", *arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_settings_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("--batch-policy", "mixed", "prefill-first", "--num-pages", "30", "4096")
    lines = run(capsys, "shared-prefixes", *FEW, *settings)
    assert [(its["batch_policy"], its["num_pages"]) for its in lines] == [
        ("mixed", 30),
        ("mixed", 4096),
        ("prefill-first", 30),
        ("prefill-first", 4096),
    ]
    for its in lines:
        assert its["setup"]["trace"] == "shared-prefixes"
        assert (its["requests"], its["refused"], its["ended_early"]) == (40, 0, 0)
        assert 0 < its["ttft_p50_ms"] <= its["ttft_p90_ms"] <= its["ttft_p99_ms"] <= 1000 * its["e2e_p99_s"]
        assert 0 < its["itl_p50_ms"] <= its["itl_p99_ms"]
        assert its["fairness"] is None, "it is over in less than a minute"
        assert its["goodput_request_s"] <= its["request_s"]
    assert lines[0]["ttft_mean_ms"] > lines[1]["ttft_mean_ms"]
    assert lines[0]["hit_rate"] < lines[1]["hit_rate"]
    assert run(capsys, "shared-prefixes", *FEW, *settings) == lines


def test_the_table_has_a_column_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *FEW, "--batch-policy", "mixed", "prefill-first"]) == 0
    setup, *table = capsys.readouterr().out.splitlines()
    assert setup.startswith("trace poisson, costs default, tokenmill ")
    words = [line.split() for line in table if line.strip() and "──" not in line]
    assert words[:2] == [["policy", "fcfs", "fcfs"], ["batch", "policy", "mixed", "prefill-first"]]
    assert ["requests", "40", "40"] in words


def test_targets_speed_and_costs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace, costs = tmp_path / "trace.csv", tmp_path / "costs.json"
    trace.write_text("arrival,prompt,output\n" + "".join(f"{at},16,8\n" for at in range(10)))
    costs.write_bytes(msgspec.json.encode(msgspec.structs.replace(DEFAULT_COSTS, step=1e5, request=5e5)))
    (slow,) = run(capsys, str(trace))
    (fast,) = run(capsys, str(trace), "--speed", "10", "--ttft-target", "0.001")
    (dear,) = run(capsys, str(trace), "--costs", str(costs))
    assert slow["goodput_request_s"] == pytest.approx(slow["request_s"])
    assert fast["goodput_request_s"] == 0
    assert fast["request_s"] > 3 * slow["request_s"]
    assert dear["ttft_mean_ms"] > slow["ttft_mean_ms"] + 500


def test_an_html_plot_needs_nothing_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plot.html"
    run(capsys, "agents", *FEW, "--turns", "2", "--batch-policy", "mixed", "prefill-first", "--plot", str(path))
    text = path.read_text()
    assert not re.search(r"<script|<link|src=|url\(|href=", text)
    charts = [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text)]
    assert len(charts) == 6
    for chart in charts:
        lines = [each.attrib["points"].split() for each in chart if each.tag.endswith("polyline")]
        assert len(lines) == 2
        for x, y in (map(float, point.split(",")) for line in lines for point in line):
            assert plot.LEFT <= x <= plot.WIDTH
            assert 0 <= y <= plot.HEIGHT - plot.BOTTOM
    assert text.count("<tr>") == 3


def test_a_png_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(capsys, *FEW, "--plot", str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "there is no trace 'none': name a file, or one of poisson, bursts, shared-prefixes, agents"),
        (["--rate", "0"], "--rate must be over 0, not 0.0"),
        (["--speed", "-1"], "--speed must be over 0, not -1.0"),
        (["--requests", "0"], "--requests must be at least 1, not 0"),
        (["--prompt", "5", "4"], "--prompt must be a least and a most number of tokens, not 5 4"),
        (["--num-pages", "0"], "--num-pages must be at least 1, not 0"),
        (["--costs", "/no/costs.json"], "--costs /no/costs.json cannot be read: No such file"),
        (["--plot", "plot.pdf"], "--plot plot.pdf must end in .html or .png"),
        (["--plot", "/no/folder/plot.html"], "--plot /no/folder/plot.html cannot be written: there is no folder"),
    ],
)
def test_what_cannot_work_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"tokenmill: {message}")


@pytest.mark.parametrize("text", ["{", '{"step": -1, "prompt_token": 1, "decode_row": 1}', '{"stp": 1}'])
def test_a_cost_model_that_is_none_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    assert cli.main(["simulate", *FEW, "--costs", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"tokenmill: --costs {path}: ")


def test_without_matplotlib_png_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    assert cli.main(["simulate", *FEW, "--plot", "plot.png"]) == 2
    assert "needs matplotlib" in capsys.readouterr().err


def test_no_torch_is_loaded() -> None:
    script = (
        f"import sys; from tokenmill import cli; cli.main(['simulate', *{FEW}]);"
        "sys.exit(str([name for name in ('torch', 'fastapi', 'zmq', 'matplotlib') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == "[]\n"


def test_quantiles_are_the_least_values_that_enough_do_not_exceed() -> None:
    values = [3.0, 1.0, 2.0, 2.0, 9.0]
    shares = [at / 20 for at in range(21)]
    expected = [next(v for v in sorted(values) if sum(x <= v for x in values) >= share * 5 - 1e-9) for share in shares]
    assert quantiles(sorted_counts(values), shares) == expected
    assert quantiles([(1, 99), (2, 1)], (0.5, 0.99, 1.0)) == [1, 1, 2]
    assert quantiles([(value, 1) for value in range(1000)], (0.5,)) == [statistics.median_low(range(1000))]
    assert quantiles([], shares) == []


def test_jains_index() -> None:
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1)
    assert jain([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([]) == 1


def test_a_timeline_keeps_all_tokens_in_few_intervals() -> None:
    timeline, scheduler = Timeline(), Scheduler(make_config())
    for step in range(5000):
        timeline.add(0.01 * step, 3, scheduler)
    points = timeline.points(0)
    assert len(points) <= 400
    width = points[1][0] - points[0][0]
    assert sum(rate * width for _, rate in points) == pytest.approx(15000)
    assert all(rate == pytest.approx(300, rel=0.1) for _, rate in points[:-1])


def test_combinations_take_the_devices_defaults_for_what_is_left_open() -> None:
    ((label, config),) = combinations(Compared(), "cuda")
    assert (label, config.max_running, config.prefill_budget) == ({"policy": "fcfs"}, 256, 8192)
    both = list(combinations(Compared(max_running=(3, 5)), "cpu"))
    assert [(label["max_running"], config.max_running) for label, config in both] == [(3, 3), (5, 5)]


def test_fair_shares_are_fairer_than_first_come(capsys: pytest.CaptureFixture[str]) -> None:
    flood = ("--requests", "300", "--rate", "2", "--tenants", "3", "--max-running", "8", "--output", "16", "64")
    first, fair = run(capsys, "poisson", *flood, "--policy", "fcfs", "fair")
    assert (first["policy"], fair["policy"]) == ("fcfs", "fair")
    assert 1 / 3 < first["fairness"] < fair["fairness"] <= 1
