"""Notebooks: the .py is the source, the .ipynb beside it holds the outputs of a run of it, and it still runs."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "notebooks").glob("*.py"))
named = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def kept(source: Path) -> dict:
    return json.loads(source.with_suffix(".ipynb").read_text(encoding="utf-8"))


def test_there_are_notebooks_and_each_has_its_pair():
    assert SOURCES
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == {path.stem for path in SOURCES}


def cells_of(script: str) -> list[tuple[str, str]]:
    """(kind, text) of each cell of a percent script."""
    body = re.sub(r"\A# ---\n.*?\n# ---\n", "", script, flags=re.DOTALL)
    found = []
    for header, text in re.findall(r"^# %%(.*)\n((?:(?!# %%).*\n?)*)", body, flags=re.MULTILINE):
        markdown = "[markdown]" in header
        if markdown:
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
        found.append(("markdown" if markdown else "code", text.strip()))
    return found


@named
def test_outputs_are_of_this_very_source(source):
    notebook = kept(source)
    cells = [(cell["cell_type"], "".join(cell["source"]).strip()) for cell in notebook["cells"]]
    assert cells == cells_of(source.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))  # one run, from top to bottom


@named
def test_kept_outputs_show_something_and_nothing_private(source):
    outputs = [output for cell in kept(source)["cells"] for output in cell.get("outputs", ())]
    kinds = [output["output_type"] for output in outputs]
    assert "error" not in kinds and "stream" in kinds and "display_data" in kinds
    assert not [output for output in outputs if output.get("name") == "stderr"], "warnings in a notebook"
    text = "".join("".join(output.get("text", ())) for output in outputs)
    assert not re.search(r"/(?:tmp|home|root|usr|work)/", text)


@pytest.mark.slow
@named
def test_it_runs_from_top_to_bottom_and_ends_where_the_kept_run_did(source, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # as a user has it
    spec = importlib.util.spec_from_file_location("run_notebooks", ROOT / "scripts" / "run_notebooks.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    made = script.execute(source)  # raises where a cell does
    shown = ["".join(o.get("output_type", "") for o in cell.get("outputs", ())) for cell in made.cells]
    assert [bool(text) for text in shown] == [bool(cell.get("outputs")) for cell in kept(source)["cells"]]


def test_losses_of_packed_padded_and_apart_agree_in_the_kept_run():
    notebook = kept(ROOT / "notebooks" / "03_finetune_gemma4_with_accelerate.py")
    text = "".join("".join(o.get("text", ())) for cell in notebook["cells"] for o in cell.get("outputs", ()))
    (numbers,) = re.findall(r"packed ([\d.]+) +padded ([\d.]+) +apart ([\d.]+)", text)
    losses = [float(number) for number in numbers]
    assert max(losses) - min(losses) < 5e-3 * losses[0]
    for name in ("eager", "sdpa", "ffpa"):
        (first, last) = re.findall(rf"{name} *: ([\d.]+) to ([\d.]+) nats", text)[0]
        assert float(last) < 0.8 * float(first)
