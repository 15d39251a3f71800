"""Plots of lines: an HTML file that needs nothing else, or a PNG file by matplotlib where that is installed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenmill.errors import ConfigError

Points = list[tuple[float, float]]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")  # Okabe and Ito's
WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 30, 44
STYLE = """body{font:14px system-ui,sans-serif;margin:24px;color:#222}svg{margin:0 16px 16px 0;font-size:11px}
table{border-collapse:collapse;margin:12px 0}td,th{padding:3px 10px;text-align:right;border-bottom:1px solid #ddd}
span{margin-right:20px;font-weight:600}"""


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines by name over one scale; with `is_log` the x axis is logarithmic, and points not over 0 are left out."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Points]
    is_log: bool = False


def check_plot(path: Path | None) -> None:
    """Refuse a file that could not be written.

    Raises:
        ConfigError: neither .html nor .png, or matplotlib is missing, or there is no such folder.
    """
    if path is None:
        return
    if path.suffix not in (".html", ".png"):
        raise ConfigError(f"--plot {path} must end in .html or .png")
    if path.suffix == ".png" and find_spec("matplotlib") is None:
        raise ConfigError("--plot as .png needs matplotlib: pip install '.[plot]', or name a file that ends in .html")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path} cannot be written: there is no folder {path.parent}")


def write_plot(path: Path, title: str, rows: Sequence[Mapping[str, Any]], charts: Sequence[Chart]) -> None:
    """Write charts, in HTML above a table of `rows`. `path` must have passed `check_plot`."""
    if path.suffix == ".png":
        _write_png(path, title, charts)
        return
    names = list(charts[0].lines) if charts else []
    legend = "".join(f'<span style="color:{_colour(at)}">{escape(name)}</span>' for at, name in enumerate(names))
    columns = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{escape(name.replace('_', ' '))}" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(_words(row.get(name)))}" for name in columns) for row in rows)
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
        f"<h1>{escape(title)}</h1><p>{legend}</p>{''.join(map(_svg, charts))}<table><tr>{head}{body}</table></html>\n",
        encoding="utf-8",
    )


def ticks(least: float, most: float, *, is_log: bool) -> list[float]:
    """A few round numbers from `least` to `most`."""
    if is_log:
        powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
        found = [digit * 10.0**power for power in powers for digit in ((1, 2, 5) if len(powers) < 5 else (1,))]
    else:
        step = 10.0 ** math.floor(math.log10(max(most - least, 1e-9)))
        step *= next(factor for factor in (0.2, 0.5, 1, 2) if (most - least) / (step * factor) <= 6)
        found = [step * at for at in range(math.ceil(least / step), math.floor(most / step) + 1)]
    return [value for value in found if least <= value <= most]


def _svg(chart: Chart) -> str:
    lines = {name: [at for at in line if at[0] > 0 or not chart.is_log] for name, line in chart.lines.items()}
    xs, ys = ([at[axis] for line in lines.values() for at in line] or [1.0] for axis in (0, 1))
    x_least, x_most, y_most = (min(xs) if chart.is_log else 0.0), max(xs), max(*ys, 1e-9)
    x_most = max(x_most, x_least * 1.01, 1e-9)
    scale = math.log if chart.is_log else float

    def across(x: float) -> float:
        low, high = scale(x_least), scale(x_most)
        return LEFT + (WIDTH - LEFT - RIGHT) * (scale(x) - low) / (high - low)

    def down(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / y_most

    parts = [f'<text x="{LEFT}" y="18" font-weight="600" font-size="13">{escape(chart.title)}</text>']
    for x in ticks(x_least, x_most, is_log=chart.is_log):
        at = f"{across(x):.1f}"
        parts.append(f'<path d="M{at} {TOP}V{HEIGHT - BOTTOM}" stroke="#eee"/>')
        parts.append(f'<text x="{at}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{x:g}</text>')
    for y in ticks(0, y_most, is_log=False):
        at = f"{down(y):.1f}"
        parts.append(f'<path d="M{LEFT} {at}H{WIDTH - RIGHT}" stroke="#eee"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at}" dy="4" text-anchor="end">{y:g}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(chart.x_label)}</text>')
    parts.append(
        f'<text transform="translate(14 {HEIGHT / 2})rotate(-90)" text-anchor="middle">{escape(chart.y_label)}</text>'
    )
    for index, line in enumerate(lines.values()):
        points = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{_colour(index)}" stroke-width="1.6"/>')
    return f'<svg width="{WIDTH}" height="{HEIGHT}" xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'


def _write_png(path: Path, title: str, charts: Sequence[Chart]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(18, 9), layout="constrained")
    figure.suptitle(title)
    for axes, chart in zip(figure.subplots(2, -(-len(charts) // 2)).flat, charts, strict=False):
        for index, (name, line) in enumerate(chart.lines.items()):
            axes.plot([x for x, _ in line], [y for _, y in line], label=name, color=_colour(index))
        axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
        axes.set_xscale("log" if chart.is_log else "linear")
        axes.legend()
    figure.savefig(path)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _words(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
