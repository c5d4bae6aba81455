"""Two results files of one device side by side: what became faster, what slower. Knows nothing of how one measures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ffpa_hf.bench.results import Results, Row


@dataclass(frozen=True)
class Change:
    """A row that both files have. speed: new speed over old, above 1 is faster; None where one has no time.

    old_times_sdpa, new_times_sdpa: each within its own run, so that a cooler or busier machine shows in `speed` and not
    in these. worse: slower by more than the threshold, or timed before and failing now.
    """

    case: str
    direction: str
    provider: str
    old_ms: float | None
    new_ms: float | None
    speed: float | None
    old_times_sdpa: float | None
    new_times_sdpa: float | None
    worse: bool
    note: str


def compare(old: Results, new: Results, threshold: float) -> list[Change]:
    """The rows that both have and one has timed, in the new file's order. threshold: how many percent more time is
    still no regress.

    Raises ValueError where the devices differ, the threshold is negative, or no row is in both.
    """
    if not threshold >= 0:
        raise ValueError(f"threshold={threshold:g}; use a percentage, 0 or more.")
    if old.device != new.device:
        raise ValueError(f"the old results are of {old.device}, the new ones of {new.device}: compare one device.")
    before = {_key(row): row for row in old.rows}
    changes = [_change(before[_key(row)], row, threshold) for row in new.rows if _key(row) in before]
    changes = [each for each in changes if each.old_ms is not None or each.new_ms is not None]
    if not changes:
        raise ValueError("no case, direction and provider was timed in both results.")
    return changes


def changed_versions(old: Results, new: Results) -> dict[str, tuple[str | None, str | None]]:
    """name -> (old, new) of what is not the same."""
    names = sorted({*old.versions, *new.versions})
    both = {name: (old.versions.get(name), new.versions.get(name)) for name in names}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def _key(row: Row) -> tuple[str, str, str]:
    return row.case, row.direction, row.provider


def _change(old: Row, new: Row, threshold: float) -> Change:
    speed = old.ms / new.ms if old.ms and new.ms else None
    failed = old.ms is not None and new.ms is None
    worse = failed or (speed is not None and speed < 1.0 / (1.0 + threshold / 100.0))
    return Change(
        *_key(new), old.ms, new.ms, speed, old.speedup_vs_sdpa, new.speedup_vs_sdpa, worse, new.note if failed else ""
    )


def table(changes: Iterable[Change]) -> Any:
    """The changes as a rich table; what is worse is marked."""
    from rich.markup import escape
    from rich.table import Table

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    view = Table("case", "dir", "provider")
    for heading in ("old ms", "new ms", "new/old speed", "old x sdpa", "new x sdpa"):
        view.add_column(heading, justify="right")
    view.add_column("")
    for each in changes:
        view.add_row(
            each.case,
            each.direction,
            each.provider,
            number(each.old_ms, "{:.4g}"),
            number(each.new_ms, "{:.4g}"),
            number(each.speed, "{:.3f}"),
            number(each.old_times_sdpa, "{:.2f}"),
            number(each.new_times_sdpa, "{:.2f}"),
            " ".join(word for word in ("[red]WORSE[/red]" if each.worse else "", escape(each.note)) if word),
        )
    return view
