from __future__ import annotations

import json

import pytest

from tokenmill import cli
from tokenmill.bench import sched


def test_figures_of_the_scheduler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"ROWS": (4, 8), "STEPS": 10, "WARM_UP_STEPS": 2, "FINISHED": 20, "TREE_TOKENS": 10_000, "TRIALS": 5}
    for name, value in small.items():
        monkeypatch.setattr(sched, name, value)
    assert cli.main(["bench", "sched", "--json"]) == 0
    few, many, later, match, admission, memory = map(json.loads, capsys.readouterr().out.splitlines())
    assert [its["size"] for its in (few, many, later)] == ["4 rows", "8 rows", "4 rows"]
    assert all(its["us"] > 0 for its in (few, many, later, match, admission))
    assert match["size"] == "8192 tokens"
    assert 4 <= memory["bytes_a_token"] < 100, "ids alone take 4"
