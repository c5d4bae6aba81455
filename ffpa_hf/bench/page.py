"""Results as one HTML page that needs nothing beside it: how they were made, plots where matplotlib is there, rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from ffpa_hf.bench import plots
from ffpa_hf.bench.results import Results

_STYLE = """
:root { color-scheme: light dark; font-family: system-ui, sans-serif; }
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
table { border-collapse: collapse; font-size: .85rem; display: block; overflow-x: auto; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid color-mix(in srgb, currentColor 20%, transparent); }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
pre { overflow-x: auto; padding: .6rem; border: 1px solid color-mix(in srgb, currentColor 20%, transparent); }
svg { max-width: 100%; height: auto; }
"""
_COLUMNS = (
    ("ms", "ms", "{:.4g}"),
    ("TFLOP/s", "tflops", "{:.1f}"),
    ("x SDPA", "speedup_vs_sdpa", "{:.2f}"),
    ("error", "relative_error", "{:.2e}"),
    ("GB", "peak_gb", "{:.2f}"),
    ("tokens/s", "tokens_per_s", "{:.0f}"),
)


def html(runs: Sequence[tuple[str, Results]]) -> str:
    """A page with a section for each (name, results)."""
    body = "\n".join(_section(name, run, index) for index, (name, run) in enumerate(runs))
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>ffpa-hf bench</title>"
        f"<meta name='viewport' content='width=device-width'><style>{_STYLE}</style></head>\n<body>\n"
        f"<h1>ffpa-hf bench</h1>\n{body}\n</body></html>\n"
    )


def _section(name: str, run: Results, index: int) -> str:
    commands = "\n".join(f"$ {line}" for line in run.command.splitlines())
    versions = ", ".join(f"{package} {version}" for package, version in run.versions.items())
    ceilings = ""
    if run.matmul_tflops and run.copy_tb_s:
        ceilings = f"<p>Plain matrix products {run.matmul_tflops:.1f} TFLOP/s, copies {run.copy_tb_s:.2f} TB/s.</p>"
    try:
        drawn = plots.draw(run)
        pictures = "\n".join(_inline(text, f"{index}-{kind}") for kind, text in drawn.items())
    except ImportError:
        pictures = "<p>No plots: matplotlib is not installed.</p>"
    return (
        f"<h2>{escape(name)}</h2>\n<p>{escape(run.device)}, {escape(run.date)}; {escape(versions)}</p>\n"
        f"<pre>{escape(commands)}</pre>\n{ceilings}\n{pictures}\n{_rows(run)}"
    )


def _inline(svg: str, prefix: str) -> str:
    """An SVG as an element of the page: without its prolog, its ids told apart from those of the others."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', element)
    return re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", element)


def _rows(run: Results) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("case", "direction", "provider"))
    head += "".join(f"<th>{title}</th>" for title, _, _ in _COLUMNS) + "<th>note</th>"
    lines = []
    for row in run.rows:
        cells = "".join(f"<td>{escape(text)}</td>" for text in (row.case, row.direction, row.provider))
        for _, field, form in _COLUMNS:
            value = getattr(row, field)
            cells += f"<td class='number'>{'' if value is None else form.format(value)}</td>"
        lines.append(f"<tr>{cells}<td>{escape(row.note)}</td></tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n" + "\n".join(lines) + "\n</tbody></table>"
