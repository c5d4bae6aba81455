"""What `ffpa-hf bench` makes of results, just measured or read from files: merge, compare, plots, a page, JSON.

Parses, calls, prints; times nothing. Heavy imports stay inside the functions.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from ffpa_hf.bench.results import Results


@dataclass(frozen=True)
class Wanted:
    """What is made of results beside the table. plot: a folder; html: a file; compare: an older results file."""

    plot: Path | None = None
    html: Path | None = None
    compare: Path | None = None
    threshold: float = 5.0
    json: bool = False

    def check(self) -> None:
        """What can be wrong is found before anything is timed."""
        if self.compare is not None:
            load([self.compare], "--compare")
        if not self.threshold >= 0:
            raise typer.BadParameter("use a percentage, 0 or more.", param_hint="--threshold")
        if self.html is not None and self.html.is_dir():
            raise typer.BadParameter(f"{self.html} is a folder; name a file.", param_hint="--html")
        if self.plot is not None:
            if self.plot.exists() and not self.plot.is_dir():
                raise typer.BadParameter(f"{self.plot} is no folder.", param_hint="--plot")
            import importlib.util

            if importlib.util.find_spec("matplotlib") is None:
                print("Plots need matplotlib: pip install 'ffpa-hf[demo]'", file=sys.stderr)
                raise typer.Exit(2)


def load(paths: Sequence[Path], hint: str = "FILES") -> list[Results]:
    """The files' results; a wrong one is named as a wrong argument."""
    from ffpa_hf.bench import results as records

    found = []
    for path in paths:
        try:
            found.append(records.load(path))
        except OSError as problem:
            raise typer.BadParameter(f"{path}: {problem.strerror or problem}.", param_hint=hint) from None
        except ValueError as problem:
            raise typer.BadParameter(str(problem), param_hint=hint) from None
    return found


def merge(paths: Sequence[Path], name: str, output: Path) -> Path:
    """`bench --merge A.json B.json`: one file from runs that measured parts, in `output`; its path."""
    from ffpa_hf.bench import results as records

    if len(paths) < 2:
        raise typer.BadParameter("--merge takes two or more results files.", param_hint="FILES")
    try:
        merged = records.merge(load(paths))
    except ValueError as problem:
        raise typer.BadParameter(str(problem), param_hint="FILES") from None
    path = output / records.file_name(merged, name)
    merged.write(path)
    print(f"{len(merged.rows)} rows of {len(paths)} files: {path}", file=sys.stderr)
    return path


def show(paths: Sequence[Path], wanted: Wanted, console: Any) -> None:
    """`bench FILES`: what is wanted of results that exist; without anything wanted, their tables."""
    from ffpa_hf.bench import results as records

    runs = load(paths)
    if wanted.compare is not None and len(runs) != 1:
        raise typer.BadParameter("--compare takes one new results file.", param_hint="FILES")
    if wanted.plot is None and wanted.html is None and wanted.compare is None:
        for run in runs:
            console.print(records.table(run))
    finish([(path.stem, run) for path, run in zip(paths, runs, strict=True)], wanted, console)


def finish(runs: Sequence[tuple[str, Results]], wanted: Wanted, console: Any) -> None:
    """Plots, page, comparison, JSON of some (name, results). Exits 1 where the comparison finds a regress."""
    from ffpa_hf.bench import page, plots

    if wanted.plot is not None:
        for name, run in runs:
            written = plots.write(run, name, wanted.plot)
            words = ", ".join(map(str, written)) or f"nothing to draw of {name}"
            console.print(f"plots: {words}", soft_wrap=True)
    if wanted.html is not None:
        wanted.html.parent.mkdir(parents=True, exist_ok=True)
        wanted.html.write_text(page.html(runs), encoding="utf-8")
        console.print(f"page: {wanted.html}", soft_wrap=True)
    contents: list[dict[str, Any]] = [asdict(run) for _, run in runs]
    worse = False
    if wanted.compare is not None:
        contents[0]["compare"], worse = _compare(runs[0][1], wanted, console)
    if wanted.json:
        print(json.dumps(_finite(contents[0] if len(contents) == 1 else contents), indent=1, allow_nan=False))
    if worse:
        raise typer.Exit(1)


def _finite(content: Any) -> Any:
    """JSON has neither infinity nor NaN, and a wrong kernel's error is one of them: null."""
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def _compare(new: Results, wanted: Wanted, console: Any) -> tuple[dict[str, Any], bool]:
    from ffpa_hf.bench import compare

    assert wanted.compare is not None
    (old,) = load([wanted.compare], "--compare")
    try:
        changes = compare.compare(old, new, wanted.threshold)
    except ValueError as problem:
        raise typer.BadParameter(str(problem), param_hint="--compare") from None
    versions = compare.changed_versions(old, new)
    console.print(compare.table(changes))
    for name, (before, now) in versions.items():
        console.print(f"{name}: {before or 'missing'} then, {now or 'missing'} now")
    worse = [each for each in changes if each.worse]
    console.print(f"{len(worse)} of {len(changes)} rows are worse by more than {wanted.threshold:g}%")
    content = {
        "old": str(wanted.compare),
        "threshold_percent": wanted.threshold,
        "versions": versions,
        "worse": len(worse),
        "rows": [asdict(each) for each in changes],
    }
    return content, bool(worse)
