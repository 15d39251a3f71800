"""How figures are shown: one JSON line each, or a table; and what they were measured on."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tokenmill import __version__
from tokenmill.config import ResolvedConfig
from tokenmill.engine.device import device_name

Cell = float | str | None


class Report:
    """Prints lines of figures below a line that tells what was measured.

    As JSON each line goes to stdout as soon as it is there, with the setup in it, and the tables to stderr.
    """

    def __init__(self, setup: dict[str, str], *, as_json: bool) -> None:
        self._setup, self._as_json = setup, as_json
        self._console = Console(file=sys.stderr if as_json else sys.stdout)
        self._console.print(", ".join(f"{name} {value}" for name, value in setup.items()), highlight=False)

    def line(self, **figures: Any) -> None:
        """Print one JSON line, if JSON is asked for; numbers to six digits."""
        if self._as_json:
            print(json.dumps({**_rounded(figures), "setup": self._setup}), flush=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Print a table."""
        table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for row in rows:
            table.add_row(*(_words(value) for value in row))
        self._console.print(table)


def describe(model: str, config: ResolvedConfig) -> dict[str, str]:
    """What decides the figures: model, type, device, attention, and versions."""
    threads = {"threads": str(config.threads)} if config.device == "cpu" else {}
    found = {"model": model, "dtype": config.dtype, "device": device_name(config.device), **threads}
    found |= {"attention": config.attention, "tokenmill": __version__, "python": platform.python_version()}
    for package in ("torch", "triton"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def spread(values: Sequence[float]) -> list[float]:
    """Median, least and greatest."""
    return [pick(values) for pick in (statistics.median, min, max)]


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that at least `share` of the values do not exceed. `values` must not be empty."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _words(value: Cell) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
