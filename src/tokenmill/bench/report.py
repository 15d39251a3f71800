"""How figures are shown: one JSON line each, or a table; and what they were measured on."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from contextlib import suppress
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tokenmill import __version__
from tokenmill.config import ResolvedConfig


class Report:
    """Collects lines of figures for tables, below a line that tells what was measured.

    As JSON each line goes to stdout as soon as it is there, with the setup in it, and the tables to stderr.
    """

    def __init__(self, setup: dict[str, str], *, as_json: bool) -> None:
        self._setup, self._as_json = setup, as_json
        self._lines: list[dict[str, Any]] = []
        self._console = Console(file=sys.stderr if as_json else sys.stdout)
        self._console.print(", ".join(f"{name} {value}" for name, value in setup.items()), highlight=False)

    def line(self, **figures: Any) -> None:
        """Add a line. Of a list the last two are the least and the greatest; figures in a dict get columns each."""
        flat: dict[str, Any] = {}
        for name, value in figures.items():
            flat |= value if isinstance(value, dict) else {name: value}
        self._lines.append(flat)
        if self._as_json:
            print(json.dumps({**figures, "setup": self._setup}), flush=True)

    def table(self, *, side_by_side: bool = False) -> None:
        """Print the lines since the last table, in columns named like the figures; or side by side, a column each."""
        names = dict.fromkeys(name for line in self._lines for name in line)
        cells = [[name.replace("_", " "), *(_words(line.get(name)) for line in self._lines)] for name in names]
        head, *rows = cells if side_by_side else zip(*cells, strict=True)
        table = Table(*head, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for row in rows:
            table.add_row(*row)
        self._console.print(table)
        self._lines = []


def describe(model: str, config: ResolvedConfig) -> dict[str, str]:
    """What decides the figures: model, type, device, attention, and versions."""
    from tokenmill.engine.device import device_name  # brings torch

    threads = {"threads": str(config.threads)} if config.device == "cpu" else {}
    found = {"model": model, "dtype": config.dtype, "device": device_name(config.device), **threads}
    found |= {"attention": config.attention, "tokenmill": __version__, "python": platform.python_version()}
    for package in ("torch", "triton"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _words(value: Any) -> str:
    if isinstance(value, list):
        *middle, least, greatest = map(_words, value)
        return " ".join([*middle, least if least == greatest else f"{least}–{greatest}"])
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "-" if value is None else str(value)
