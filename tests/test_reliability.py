"""docs/reliability.md names tests that exist; the scripts that need a GPU for real do their work on a CPU too."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
sys.path.insert(0, str(ROOT / "scripts"))


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True, text=True,
    )  # fmt: skip


# --- the page ---------------------------------------------------------------------------------------------------------


def names_of(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)}


def named() -> list[tuple[str, str]]:
    """(file below tests/, test) of everything that the page names as `file.py::test`."""
    return re.findall(r"`([\w/]+\.py)::(test_\w+)`", PAGE.read_text("utf-8"))


def test_every_test_that_the_page_names_exists():
    found = named()
    assert len(found) > 40
    missing = [f"{file}::{test}" for file, test in found if test not in names_of(ROOT / "tests" / file)]
    assert not missing


def test_every_trap_has_its_row_with_a_test():
    rows = re.findall(r"^\| (\d+) \|.*?\|(.*)\|$", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    traps = {1, 4, 5, 6, 7, 8, 9, 11, 13, 14, 15, 17, 19, 21, 23, 24, 25, 26, 27, 29, 30, 32, 33, 34, 37, 38, 39, 42}
    traps |= {44, 45, 46, 49, 51, 52, 53, 57, 58, 59}
    assert {int(number) for number, _ in rows} == traps
    assert all("::test_" in tests for _, tests in rows)


# --- scripts ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="the memory of a process is watched on a CPU")
def test_two_hundred_mixed_calls_leave_memory_flat():
    done = run("scripts/soak.py", "--calls", "200")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["calls"] >= 200 and found["faults"] == [] and found["served"] == ["sdpa"]


def test_the_soak_notices_a_leak_a_changed_result_and_a_late_compilation(monkeypatch):
    import torch

    soak = importlib.import_module("soak")
    kept = []

    def leaking():
        kept.append(torch.ones(2**20))
        return [torch.ones(1) * len(kept)]

    class Late(soak.Compilations):
        def count(self):
            return len(kept)

    monkeypatch.setattr(soak, "kinds", lambda: [("leaking", leaking)])
    monkeypatch.setattr(soak, "Compilations", Late)
    faults = " ".join(soak.soak(40)["faults"])
    assert "another result" in faults and "compiled after" in faults
    if not torch.cuda.is_available():
        assert "memory grew" in faults


FAKE = """#!/bin/sh
echo "$@" >> "{log}"
while [ "$1" != "{python}" ]; do shift; done
"$@" || exit 1
{end}
"""


@pytest.mark.parametrize(
    "end, code, word",
    [
        ("echo 'ERROR SUMMARY: 0 errors'", 0, "clean"),
        ("echo 'ERROR SUMMARY: 3 errors'; exit 99", 1, "ERRORS"),
        ("echo 'Internal error'; exit 0", 1, "FAILED"),
    ],
    ids=["clean", "errors", "no verdict"],
)
def test_the_sanitizers_verdict_is_read(tmp_path, monkeypatch, capsys, end, code, word):
    sanitize = importlib.import_module("sanitize")
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(FAKE.format(log=tmp_path / "log", python=sys.executable, end=end))
    tool.chmod(0o755)
    (tmp_path / "work.py").write_text("print('7 calls done')")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(sanitize, "__file__", str(tmp_path / "work.py"))
    assert sanitize.main(["--tools", "memcheck,racecheck", "--backends", "triton"]) == code
    said = capsys.readouterr().out
    assert re.search(rf"triton +memcheck +{word}", said), said
    assert "--tool memcheck" in (tmp_path / "log").read_text()


def test_without_the_sanitizer_it_is_said(tmp_path, monkeypatch, capsys):
    sanitize = importlib.import_module("sanitize")
    monkeypatch.setattr(sanitize.shutil, "which", lambda *_, **__: None)
    assert sanitize.main([]) == 2 and "not found" in capsys.readouterr().err


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="the sizes of a CPU are meant")
def test_the_sanitized_calls_run():
    done = run("scripts/sanitize.py", "--work", "triton", TRITON_INTERPRET="1")
    assert done.returncode == 0 and "12 calls done" in done.stdout, done.stdout + done.stderr


def random_calls_script():
    """The script, which has the name of the strategies."""
    spec = importlib.util.spec_from_file_location("run_random_calls", ROOT / "scripts" / "random_calls.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_random_calls_are_resumed_where_they_stopped(tmp_path, monkeypatch, capsys):
    script = random_calls_script()
    ran = []

    def run_chunk(backend, dtype, seed, cases):
        ran.append(seed)
        wrong = ["AssertionError: out"] if seed == 2 and len(ran) < 5 else []
        return {"backend": backend, "dtype": dtype, "seed": seed, "cases": cases, "failures": wrong}

    monkeypatch.setattr(script, "run_chunk", run_chunk)
    monkeypatch.setattr(script, "HAS_GPU", False)
    arguments = ["--cases", "40", "--chunk", "10", "--output", str(tmp_path / "found.json")]
    assert script.main([*arguments, "--seconds", "0"]) == 2 and ran == []
    assert script.main(arguments) == 1 and ran == [0, 1, 2, 3]
    assert script.main(arguments) == 0 and ran == [0, 1, 2, 3, 2]  # the chunk with a fault alone
    assert script.main(arguments) == 0 and len(ran) == 5
    assert "40 calls right, 0 chunks with a fault, 0 chunks left" in capsys.readouterr().out


def test_random_calls_of_two_workers_are_those_of_one(tmp_path):
    rows = []
    for workers in ("1", "2"):
        found = tmp_path / f"{workers}.json"
        sizes = ["--cases", "6", "--chunk", "2", "--workers", workers]
        done = run("scripts/random_calls.py", *sizes, "--output", str(found))
        assert done.returncode == 0, done.stdout + done.stderr
        rows.append(
            sorted(json.loads(found.read_text())["rows"], key=lambda row: (row["seed"], row["backend"], row["dtype"]))
        )
    assert rows[0] == rows[1] and [row["cases"] for row in rows[0]] == [2, 2, 2]


def end_the_process(*_):
    os._exit(1)


def test_a_worker_that_dies_is_a_fault_and_what_is_left_is_told(tmp_path, monkeypatch, capsys):
    script = random_calls_script()
    monkeypatch.setattr(script, "run_chunk", end_the_process)
    found = tmp_path / "found.json"
    assert script.main(["--cases", "40", "--chunk", "10", "--workers", "2", "--output", str(found)]) == 1
    assert "0 calls right, 2 chunks with a fault, 2 chunks left" in capsys.readouterr().out
