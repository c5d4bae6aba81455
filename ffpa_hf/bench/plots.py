"""Plots of a results file: speed-up over SDPA, TFLOP/s under the ceiling of matrix products, memory and error.

Drawn as SVG on nothing, in greys and colours that read on a light and on a dark page. The same results give the same
bytes with the same matplotlib. Knows nothing of how a number was measured.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ffpa_hf.bench import cases
from ffpa_hf.bench.results import Results, Row
from ffpa_hf.bench.summary import TITLES, provider_order

#: Text, axes and grid: as far from white as from a dark page.
_INK = "#7d8590"
_COLOURS = {
    "sdpa": "#8c959f",
    "ffpa-attn/triton": "#4aa3df",
    "ffpa-attn/cute": "#3b6fb6",
    "fa4": "#b07cc6",
    "fa3": "#8a63d2",
    "ffpa_hf/auto": "#e0703a",
    "ffpa_hf/triton": "#e8912d",
    "ffpa_hf/cuda": "#2da44e",
    "ffpa_hf/cute": "#d1477a",
}
_OTHERS = ("#a8852f", "#4d9f9f", "#c2607a", "#7a8f3c")
_BAR = 0.2  # inches


@dataclass(frozen=True)
class Kind:
    """One plot: which number of a row it shows, and how. log: the axis; baseline: SDPA has bars of its own."""

    name: str
    title: str
    value: Callable[[Row], float | None]
    label: Callable[[float], str]
    log: bool = False
    baseline: bool = True


def _tflops(row: Row) -> float | None:
    """Where arithmetic decides: not where a cache is read once, nor where a mask leaves most of the square out."""
    case = _KNOWN.get(row.case)
    bound_by_bytes = case is not None and (case.graph or case.host or case.mask == "window")
    return None if bound_by_bytes else row.tflops


_KNOWN = {case.id: case for case in (*cases.KERNEL, *cases.PACKED, *cases.VAE, *cases.OVERHEAD)}

KINDS: tuple[Kind, ...] = (
    Kind("speedup", "times the speed of PyTorch SDPA", lambda row: row.speedup_vs_sdpa, "{:.2f}x".format, True, False),
    Kind("tflops", "TFLOP/s; the line is a plain matrix product", _tflops, "{:.0f}".format),
    Kind("memory", "peak memory, GB", lambda row: row.peak_gb, "{:.2f}".format),
    Kind("error", "relative error against float64", lambda row: row.relative_error, "{:.1e}".format, True),
)


def draw(results: Results) -> dict[str, str]:
    """Kind of plot -> SVG text; a kind of which the results have no number is left out.

    Raises ImportError where matplotlib is missing.
    """
    found = {}
    for kind in KINDS:
        groups = _groups(results, kind)
        if any(groups.values()):
            found[kind.name] = _svg(results, kind, groups)
    return found


def write(results: Results, stem: str, folder: Path) -> list[Path]:
    """`<stem>-<kind>.svg` for each kind in `folder`; the paths written."""
    drawn = draw(results)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in drawn.items():
        path = folder / f"{stem}-{name}.svg"
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def _groups(results: Results, kind: Kind) -> dict[tuple[str, str], dict[str, float]]:
    """(case, direction) -> provider -> number, in the file's order; blocks without a number are left out."""
    groups: dict[tuple[str, str], dict[str, float]] = {}
    for row in results.rows:
        value = kind.value(row) if row.ms is not None else None
        if value is None or (row.provider == "sdpa" and not kind.baseline) or not 0 < value < math.inf:
            continue
        groups.setdefault((row.case, row.direction), {})[row.provider] = value
    return groups


def _svg(results: Results, kind: Kind, groups: dict[tuple[str, str], dict[str, float]]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    names = sorted({name for values in groups.values() for name in values}, key=provider_order)
    others = iter(_OTHERS * len(names))
    colours = {name: _COLOURS.get(name) or next(others) for name in names}
    style = {"svg.fonttype": "none", "svg.hashsalt": "ffpa_hf", "font.family": "sans-serif", "font.size": 9.0}
    style |= {"text.color": _INK, "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK}
    with matplotlib.rc_context(style):
        count = sum(len(values) + 1 for values in groups.values())
        figure = Figure(figsize=(8.0, 1.1 + _BAR * (count + len(names) / 4)), layout="constrained")
        axes = figure.add_subplot()
        place, ticks = 0.0, []
        seen: dict[str, Any] = {}
        numbers = [value for values in groups.values() for value in values.values()]
        start = min(numbers) / 2 if kind.log and kind.baseline else 0.0
        for (case, direction), values in groups.items():
            ticks.append((place + (len(values) - 1) / 2, f"{case} {direction}"))
            for name in sorted(values, key=provider_order):
                left = 1.0 if kind.log and not kind.baseline else start
                bar = axes.barh(place, values[name] - left, 0.9, left=left, color=colours[name])
                seen.setdefault(name, bar)
                ahead = values[name] >= left
                text = kind.label(values[name])
                axes.annotate(
                    text, (values[name], place), (3 if ahead else -3, 0), textcoords="offset points",
                    ha="left" if ahead else "right", va="center", fontsize=8,
                )  # fmt: skip
                place += 1
            place += 1
        _dress(axes, results, kind, ticks, max(numbers))
        axes.legend(
            [seen[name] for name in names], [TITLES.get(name, name) for name in names], loc="lower left",
            bbox_to_anchor=(0.0, 1.0), ncols=4, frameon=False,
        )  # fmt: skip
        axes.set_xlabel(f"{kind.title} ({results.device}, {results.date[:10]})")
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


def _dress(axes: Any, results: Results, kind: Kind, ticks: list[tuple[float, str]], largest: float) -> None:
    """Axes, grid and the line that the bars are read against."""
    if kind.log:
        axes.set_xscale("log")
        axes.minorticks_off()
    if kind.name == "speedup":
        axes.axvline(1.0, color=_INK, linewidth=1.0)
        shown = [
            mark for mark in (0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128) if axes.get_xlim()[0] <= mark <= 2 * largest
        ]
        axes.set_xticks(shown, [f"{mark:g}x" for mark in shown])
    if kind.name == "tflops" and results.matmul_tflops:
        axes.axvline(results.matmul_tflops, color=_INK, linewidth=1.0, linestyle="--")
        axes.annotate(
            f"{results.matmul_tflops:.0f}", (results.matmul_tflops, 0.0), (3, 3), xycoords=("data", "axes fraction"),
            textcoords="offset points", fontsize=8,
        )  # fmt: skip
    axes.set_yticks([at for at, _ in ticks], [text for _, text in ticks])
    axes.invert_yaxis()
    axes.margins(x=0.12, y=0.01)
    axes.grid(axis="x", color=_INK, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_INK)
