"""Run the sweep of tests/patches/transformers_sweep.py on the installed transformers and say what changed.

    python scripts/transformers_sweep.py              # compare with the record of this release, or of the newest one
    python scripts/transformers_sweep.py --update     # and record it, and write the table in docs/transformers.md
    python scripts/transformers_sweep.py --table      # run nothing: write the table from the record

For another release: pip install --target DIR transformers==X.Y, and PYTHONPATH=DIR. Exits with 1, and records nothing,
where "ffpa" is not what it has to be. A whole run takes a few minutes on one CPU core; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD, PAGE = ROOT / "docs" / "transformers-sweep.json", ROOT / "docs" / "transformers.md"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "patches")]

Result = dict[str, Any]


def run(families: list[str]) -> tuple[Result, bool]:
    """Outcomes of "ffpa" and "sdpa" on the installed release, and whether those of "ffpa" are what they have to be."""
    import transformers_structure
    import transformers_sweep as sweep
    from transformers.utils import logging

    import ffpa_hf

    ffpa_hf.register()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    cases: dict[str, dict[str, dict[str, str]]] = {}
    right = True
    for family in families:
        if not sweep.FAMILIES[family].exists():
            continue
        print(family, end=" ", flush=True)
        cases[family] = {}
        for way in sweep.ways_of(family):
            given = {name: sweep.outcome(family, way, name) for name in ("ffpa", "sdpa")}
            if not sweep.is_right(family, way, given["ffpa"]):
                right = False
                print(f'\n  WRONG: {family}, {way}: "ffpa" {given["ffpa"]}')
            if given["ffpa"].startswith("not compared"):
                cases[family][way] = {"why": given["ffpa"].partition(": ")[2]}
            else:
                cases[family][way] = {name: sweep.short(outcome) for name, outcome in given.items()}
    print()
    return {**sweep.versions(), "structure": transformers_structure.structure(), "cases": cases}, right


def changes(before: Result, now: Result) -> list[str]:
    """What differs between two results, a line each."""
    lines = []
    for what in sorted(before["structure"].keys() | now["structure"].keys()):
        old, new = set(before["structure"].get(what, [])), set(now["structure"].get(what, []))
        lines += [f"{what}: + {name}" for name in sorted(new - old)]
        lines += [f"{what}: - {name}" for name in sorted(old - new)]
    for family in sorted(before["cases"].keys() | now["cases"].keys()):
        old, new = before["cases"].get(family), now["cases"].get(family)
        if old is None or new is None:
            lines.append(f"{family}: {'new' if old is None else 'gone'}")
            continue
        ways: dict[str, list[str]] = {}
        for way in sorted(old.keys() | new.keys()):
            if old.get(way) != new.get(way):
                ways.setdefault(f"{_words(old.get(way))} -> {_words(new.get(way))}", []).append(way)
        lines += [f"{family}: {change} ({'; '.join(where)})" for change, where in ways.items()]
    return lines


def _words(cell: dict[str, str] | None) -> str:
    return "nothing" if cell is None else ", ".join(f"{name} {outcome}" for name, outcome in cell.items())


# --- the table --------------------------------------------------------------------------------------------------------

MARKS = ("<!-- sweep: made by scripts/transformers_sweep.py from transformers-sweep.json -->", "<!-- /sweep -->")
_HEADS = {
    "no padding": "none", "left padding": "left", "right padding": "right", "holes": "holes", "checkpointing": "ckpt",
    "4-D additive mask": "4-D float", "4-D bool mask": "4-D bool", "packed, position_ids": "positions",
    "packed, cu_seq_lens": "lengths", "packed, cu_seq_lens, cache": "lengths, cache",
    "generate, dynamic cache": "dynamic", "generate, static cache": "static",
    "generate, dynamic cache, chunked prefill": "dynamic, chunks",
    "generate, static cache, chunked prefill": "static, chunks", "generate, beam search": "beams",
}  # fmt: skip


def table(record: dict[str, Result]) -> str:
    """The part of docs/transformers.md between the marks."""
    newest = max(record, key=_order)
    lines = [MARKS[0], ""]
    for release in sorted(record, key=_order, reverse=True):
        lines.append(f"- {_summary(record[release])}")
    lines += ["", f"transformers {newest}:", "", "| family | " + " | ".join(_HEADS.values()) + " |"]
    lines.append("|---|" + "---|" * len(_HEADS))
    notes: list[str] = []
    for family, cells in record[newest]["cases"].items():
        lines.append(f"| {family} | " + " | ".join(_cell(cells.get(way), notes) for way in _HEADS) + " |")
    lines.append("")
    lines += [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    for release in sorted(record, key=_order, reverse=True):
        if release != newest:
            lines += ["", f"In transformers {release}, against that:", ""]
            pair = ({**record[each], "structure": {}} for each in (newest, release))
            lines += [f"- {line}" for line in changes(*pair)] or ["- nothing"]
    return "\n".join([*lines, "", MARKS[1]])


def _order(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".") if part.isdigit())


def _summary(result: Result) -> str:
    cells = [cell for ways in result["cases"].values() for cell in ways.values() if "ffpa" in cell]
    compared = [cell for cell in cells if not cell["ffpa"].startswith("eager raises")]
    equal = {name: sum(cell[name] == "ok" for cell in compared) for name in ("ffpa", "sdpa")}
    refused = sum(cell["ffpa"].startswith("raises: NotImplementedError") for cell in compared)
    other = sum(cell["sdpa"] == "differs" for cell in compared)
    return (
        f"transformers {result['transformers']}, torch {result['torch']}: {len(compared)} cases of "
        f"{len(result['cases'])} families. Under `ffpa` {equal['ffpa']} equal eager and {refused} are refused with an "
        f"error that says what to do. Under `sdpa` {equal['sdpa']} equal eager, {other} give other numbers, "
        f"{len(compared) - equal['sdpa'] - other} raise."
    )


def _cell(cell: dict[str, str] | None, notes: list[str]) -> str:
    if cell is None:
        return ""
    if "why" in cell:
        return _note(f"Not compared: {cell['why']}.", notes)
    if cell["ffpa"].startswith("eager raises"):
        return _note(f"transformers' own eager raises {cell['ffpa'].partition(': ')[2]}.", notes)
    if cell["ffpa"] == "ok":
        return "=" if cell["sdpa"] == "ok" else "**=**"
    return "no" if cell["ffpa"].startswith("raises: NotImplementedError") else "WRONG"


def _note(text: str, notes: list[str]) -> str:
    if text not in notes:
        notes.append(text)
    return f"({notes.index(text) + 1})"


def written(page: str, record: dict[str, Result]) -> str:
    """The page with the table of the record in it."""
    before, _, rest = page.partition(MARKS[0])
    return before + table(record) + rest.partition(MARKS[1])[2]


# --- command ----------------------------------------------------------------------------------------------------------


def main() -> int:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--update", action="store_true", help="record the result and write the table")
    parser.add_argument("--table", action="store_true", help="run nothing; write the table from the record")
    parser.add_argument("--families", help="comma-separated; all by default (then nothing can be recorded)")
    arguments = parser.parse_args()
    record: dict[str, Result] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if arguments.table:
        PAGE.write_text(written(PAGE.read_text(), record))
        return 0
    if arguments.update and arguments.families:
        parser.error("--update records all families")
    import transformers_sweep as sweep

    families = arguments.families.split(",") if arguments.families else list(sweep.FAMILIES)
    now, right = run(families)
    release = now["transformers"]
    print(_summary(now))
    known = release if release in record else max(record, key=_order, default=None)
    if known is not None:
        before = record[known]
        if arguments.families:
            before = {**before, "cases": {name: cells for name, cells in before["cases"].items() if name in families}}
        lines = changes(before, now)
        print(f"Against the record of {known}: " + ("nothing changed." if not lines else ""))
        print("\n".join(f"  {line}" for line in lines))
    if arguments.update and right:
        record[release] = now
        text = json.dumps(dict(sorted(record.items(), key=lambda item: _order(item[0]))), indent=1)
        text = re.sub(r"\{\s+([^{}]*?)\s+\}", lambda cell: "{" + " ".join(cell[1].split()) + "}", text)  # a cell a line
        RECORD.write_text(text + "\n")
        PAGE.write_text(written(PAGE.read_text(), record))
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
