"""What a benchmark leaves behind: rows, the file they are kept in, and the table that is printed.

Knows nothing of how a number was measured.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ffpa_hf.kernels.tuning.store import slug, write_json

#: Distributions whose versions a result names, where installed.
_DISTRIBUTIONS = ("triton", "ffpa-attn", "flash-attn-4", "fa3-fwd", "nvidia-cutlass-dsl", "transformers", "diffusers")


@dataclass
class Row:
    """One provider on one case and direction. Fields that were not measured are None; `note` says why."""

    case: str
    direction: str
    provider: str
    ms: float | None = None
    tflops: float | None = None
    relative_error: float | None = None
    speedup_vs_sdpa: float | None = None
    peak_gb: float | None = None
    tokens_per_s: float | None = None
    attention_ms: float | None = None
    note: str = ""


@dataclass
class Results:
    """Everything one run measured. date: ISO, UTC. command: one line, or of merged runs one line each. matmul_tflops
    and copy_tb_s: what this device reaches in plain matrix products and copies (bytes read plus written), the ceilings
    to read the rows against."""

    device: str
    date: str
    command: str
    versions: dict[str, str]
    matmul_tflops: float | None = None
    copy_tb_s: float | None = None
    rows: list[Row] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Replace the file at `path` in one step."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(self))


def load(path: Path) -> Results:
    """Read a results file. Raises ValueError naming what is missing or unknown, OSError where it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = [Row(**row) for row in content.pop("rows")]
        return Results(rows=rows, **content)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is no results file of `ffpa-hf bench`: {error}") from None


#: What marks a merged row whose ratio is against another run's SDPA than the one that stands beside it.
OTHER_RUN = "its ratio is within its own run"


def merge(runs: Sequence[Results]) -> Results:
    """One set of results from runs on one device with the same versions, each of which measured a part.

    Rows are told apart by case, direction and provider; one that several runs have is the first run's that timed it.
    Every ratio stays the one measured within its run; where the SDPA row beside it is of another run, its note says so.
    All commands are kept, the date is the last, the ceilings are the highest.

    Raises ValueError where there is nothing to merge, or device or versions differ, naming what does.
    """
    if not runs:
        raise ValueError("no results to merge.")
    first = runs[0]
    for run in runs[1:]:
        if run.device != first.device:
            raise ValueError(f"results of {first.device} and of {run.device} are no one run; merge takes one device.")
        changed = [
            f"{name} {first.versions.get(name, 'missing')} and {run.versions.get(name, 'missing')}"
            for name in sorted({*first.versions, *run.versions})
            if first.versions.get(name) != run.versions.get(name)
        ]
        if changed:
            raise ValueError(f"versions differ ({'; '.join(changed)}); merge takes runs of the same versions.")
    found: dict[tuple[str, str, str], tuple[int, Row]] = {}
    for index, run in enumerate(runs):
        for row in run.rows:
            key = row.case, row.direction, row.provider
            if key not in found or (found[key][1].ms is None and row.ms is not None):
                found[key] = index, row
    blocks: dict[tuple[str, str], list[Row]] = {}
    for (case, direction, _), (index, row) in found.items():
        base, _ = found.get((case, direction, "sdpa"), (index, row))
        if index != base and row.speedup_vs_sdpa is not None and OTHER_RUN not in row.note:
            row = replace(row, note=f"{row.note}; {OTHER_RUN}" if row.note else OTHER_RUN)
        blocks.setdefault((case, direction), []).append(row)
    return Results(
        device=first.device,
        date=max(run.date for run in runs),
        command="\n".join(dict.fromkeys(line for run in runs for line in run.command.splitlines())),
        versions=dict(first.versions),
        matmul_tflops=max((run.matmul_tflops for run in runs if run.matmul_tflops is not None), default=None),
        copy_tb_s=max((run.copy_tb_s for run in runs if run.copy_tb_s is not None), default=None),
        rows=[row for block in blocks.values() for row in block],
    )


def file_name(results: Results, name: str) -> str:
    """`<date>-<gpu>-<name>.json`."""
    return f"{results.date[:10]}-{slug(results.device).removeprefix('nvidia-')}-{slug(name)}.json"


def now() -> str:
    """The time, ISO 8601, UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Versions of everything a number can depend on."""
    import torch

    import ffpa_hf

    found = {"ffpa_hf": ffpa_hf.__version__, "python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.version.hip:
        found["hip"] = torch.version.hip
    if torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def table(results: Results) -> Any:
    """The rows as a rich table, one block per case and direction."""
    from rich.markup import escape
    from rich.table import Table

    view = Table(title=f"{results.device}, {results.date}", title_justify="left", expand=False)
    view.add_column("case")
    view.add_column("dir")
    view.add_column("provider")
    whole_models = any(row.tokens_per_s or row.attention_ms for row in results.rows)
    for heading in ("ms", *(("attention", "tokens/s") if whole_models else ("TFLOP/s",)), "x sdpa", "error", "GB"):
        view.add_column(heading, justify="right")
    view.add_column("note", overflow="fold")
    previous = None
    for row in results.rows:
        block = (row.case, row.direction)
        if previous is not None and block != previous:
            view.add_section()
        first = block != previous
        previous = block
        view.add_row(
            row.case if first else "",
            row.direction if first else "",
            row.provider,
            _number(row.ms, "{:.3f}"),
            *(
                (_number(row.attention_ms, "{:.3f}"), _number(row.tokens_per_s, "{:.0f}"))
                if whole_models
                else (_number(row.tflops, "{:.1f}"),)
            ),
            _number(row.speedup_vs_sdpa, "{:.2f}"),
            _number(row.relative_error, "{:.2e}"),
            _number(row.peak_gb, "{:.2f}"),
            escape(row.note),
        )
    return view


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
