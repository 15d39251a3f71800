from __future__ import annotations

import json

import pytest

from tokenmill.bench.report import Report


@pytest.mark.parametrize("as_json", [False, True])
def test_lines_are_json_or_a_table_with_a_column_a_figure(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report({"model": "tiny"}, as_json=as_json)
    report.line(shape="one", tok_s=[12345.6, 12000.0, 12999.9], us={"plan": 1.25})
    report.line(shape="two", rows=[2, 8], us={"plan": None})
    report.table()
    out, err = capsys.readouterr()
    first, *table = (err if as_json else out).splitlines()
    assert first == "model tiny"
    rows = [line.split() for line in table if line.strip() and "──" not in line]
    assert rows == [
        ["shape", "tok", "s", "plan", "rows"],
        ["one", "12346", "12000–13000", "1.25", "-"],
        ["two", "-", "-", "2–8"],
    ]
    setup = {"model": "tiny"}
    lines = [
        {"shape": "one", "tok_s": [12345.6, 12000.0, 12999.9], "us": {"plan": 1.25}, "setup": setup},
        {"shape": "two", "rows": [2, 8], "us": {"plan": None}, "setup": setup},
    ]
    assert not as_json or [json.loads(line) for line in out.splitlines()] == lines
