"""The cost model fitted to steps, and `tokenmill bench steps` on a tiny model."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest

from tests.support.tiny_models import make_tiny_llama
from tokenmill import cli
from tokenmill.bench.steps import Measured, fit
from tokenmill.sched.simulate import CostModel, Work

COSTS = CostModel(
    step=900, prompt_token=70, prompt_row=400, decode_row=30, kv_token=2, pair=0.5, host_step=50, host_row=3
)


def steps(costs: CostModel, noise: float = 0.0) -> list[Measured]:
    draw = random.Random(3)
    found = []
    for _ in range(200):
        rows, chunk = draw.randint(1, 64), draw.choice((0, 0, draw.randint(2, 500)))
        work = Work(
            1,
            chunk,
            draw.randint(1, 9) if chunk else 0,
            rows,
            rows * draw.randint(10, 900),
            chunk * draw.randint(1, 900),
        )
        factor = 1 + noise * draw.uniform(-1, 1)
        found.append(Measured(work, rows, costs.device_seconds(work) * factor, costs.host_seconds(rows)))
    found[0].host = None
    return found


def test_a_fit_finds_what_steps_cost() -> None:
    found = msgspec.structs.asdict(fit(steps(COSTS)))
    assert found == pytest.approx(msgspec.structs.asdict(COSTS))
    noisy = fit(steps(COSTS, noise=0.2))
    work = Work(1, 100, 3, 20, 9000, 20000)
    assert noisy.device_seconds(work) == pytest.approx(COSTS.device_seconds(work), rel=0.1)


def test_nothing_costs_less_than_nothing() -> None:
    measured = steps(msgspec.structs.replace(COSTS, kv_token=0, pair=0))
    for step in measured:
        step.device -= 1e-9 * step.work.kv_tokens
    found = fit(measured)
    assert found.kv_token == 0
    assert min(msgspec.structs.astuple(found)) >= 0


def test_steps_are_measured_saved_and_simulated_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny, costs = make_tiny_llama(tmp_path, max_position=256), tmp_path / "costs.json"
    given = ["--model", str(tiny), "--dtype", "float32", "--device", "cpu", "--max-running", "4", "--json"]
    shape = ["--prompt", "8", "600", "--output", "2", "9", "--prefill-budget", "64"]
    assert cli.main(["bench", "steps", *given, *shape, "--save", str(costs)]) == 0
    first, *lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    saved = json.loads(costs.read_text())
    assert {name: value for name, value in saved.items() if value} == {
        name: value for name, value in first.items() if name not in ("costs", "setup")
    }
    assert {its["steps"] for its in lines} == {"decode", "mixed"}
    assert sum(its["count"] for its in lines) >= 3 * 2
    assert all(its["measured_ms"] > 0 for its in lines)
    assert cli.main(["simulate", "--costs", str(costs), "--requests", "5"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "0", "5"], "--output must be a least and a most number of tokens, not 0 5"),
        (["--prompt", "9", "3"], "--prompt must be a least and a most number of tokens, not 9 3"),
    ],
)
def test_what_cannot_work_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "steps", *arguments, "--model", "/no/such/model"]) == 2
    assert capsys.readouterr().err.startswith(f"tokenmill: {message}")
