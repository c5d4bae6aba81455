"""What `ffpa-hf bench` does with results files that exist already: merge. Times nothing.

Parses, calls, prints. Heavy imports stay inside the functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ffpa_hf.bench.results import Results


def load(paths: Sequence[Path]) -> list[Results]:
    """The files' results; a wrong one is named as a wrong argument."""
    from ffpa_hf.bench import results as records

    found = []
    for path in paths:
        try:
            found.append(records.load(path))
        except OSError as problem:
            raise typer.BadParameter(f"{path}: {problem.strerror or problem}.", param_hint="FILES") from None
        except ValueError as problem:
            raise typer.BadParameter(str(problem), param_hint="FILES") from None
    return found


def merge(paths: Sequence[Path], name: str, output: Path) -> None:
    """`bench --merge A.json B.json`: one file from runs that measured parts, in `output`."""
    from ffpa_hf.bench import results as records

    if len(paths) < 2:
        raise typer.BadParameter("--merge takes two or more results files.", param_hint="FILES")
    try:
        merged = records.merge(load(paths))
    except ValueError as problem:
        raise typer.BadParameter(str(problem), param_hint="FILES") from None
    path = output / records.file_name(merged, name)
    merged.write(path)
    print(f"{len(merged.rows)} rows of {len(paths)} files: {path}")
