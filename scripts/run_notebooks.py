"""Execute notebooks/*.py (jupytext's percent form) and keep each with its outputs as .ipynb beside it.

    python scripts/run_notebooks.py [NAME ...]     # all of them, or those named

The .py file is the source; edit that. Needs `pip install ffpa-hf[notebooks]`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"


def execute(source: Path, timeout: int = 1200) -> Any:
    """The notebook of a percent script with the outputs of a run in its own folder; raises where a cell does."""
    notebook = jupytext.read(source)
    NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": FOLDER}}).execute()
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index:02d}"  # the same in every run
        cell["metadata"].pop("execution", None)  # when it ran
    notebook.metadata.pop("language_info", None)
    return notebook


def main() -> None:
    wanted = set(sys.argv[1:])
    for source in sorted(FOLDER.glob("*.py")):
        if not wanted or source.stem in wanted:
            print(source.name)
            nbformat.write(execute(source), source.with_suffix(".ipynb"))


if __name__ == "__main__":
    main()
