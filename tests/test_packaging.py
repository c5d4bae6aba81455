"""What a newcomer installs, types and reads: the package's metadata and contents, make targets, CI script, README."""

from __future__ import annotations

import ast
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import ffpa_hf

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

#: import name -> distribution, where the two differ
DISTRIBUTION = {
    "PIL": "pillow",
    "cutlass": "nvidia-cutlass-dsl",
    "cuda": "cuda-bindings",
}
#: what `ffpa-hf bench` imports only where it is there; scripts/install-peers.sh installs these
PEERS = {"ffpa_attn", "flash_attn", "flash_attn_interface", "fa3_fwd"}


def _requirements(*extras: str) -> dict[str, Requirement]:
    """Distribution -> requirement, with extras of our own unfolded."""
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    found: dict[str, Requirement] = {}
    for line in lines:
        requirement = Requirement(line)
        if requirement.name == PROJECT["name"]:
            found |= _requirements(*requirement.extras)
        else:
            found[requirement.name] = requirement
    return found


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_version_is_the_package_metadata_version():
    assert ffpa_hf.__version__ == PROJECT["version"]


def test_every_import_is_declared():
    declared = set(_requirements(*PROJECT["optional-dependencies"]))
    imported = {name: path for path in (ROOT / "ffpa_hf").rglob("*.py") for name in _imports(path)}
    undeclared = {
        name: str(path)
        for name, path in imported.items()
        if name not in sys.stdlib_module_names | PEERS | {"ffpa_hf"} and DISTRIBUTION.get(name, name) not in declared
    }
    assert not undeclared


def test_plain_import_needs_only_the_plain_dependencies():
    """`import ffpa_hf` and the command line in a process where every optional package is blocked."""
    optional = set(_requirements(*PROJECT["optional-dependencies"])) - set(_requirements())
    blocked = sorted({name.replace("-", "_") for name in optional} | {"PIL", "cutlass", "cuda"})
    code = (
        "import sys\n"
        f"for name in {blocked!r}: sys.modules[name] = None\n"
        "import ffpa_hf, ffpa_hf.cli, ffpa_hf.demo\n"
        "print(ffpa_hf.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    # numpy may be missed by torch itself, which warns and works
    assert done.returncode == 0 and done.stdout.strip() == ffpa_hf.__version__, done.stderr


def test_all_brings_every_extra_a_user_may_want():
    everything = set(_requirements("all"))
    for extra in PROJECT["optional-dependencies"]:
        if extra not in ("dev", "docs"):  # for working on this repository
            assert set(_requirements(extra)) <= everything, extra


def test_constraints_are_within_what_the_package_allows():
    allowed = _requirements(*PROJECT["optional-dependencies"])
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            requirement = Requirement(line)
            pinned[requirement.name] = requirement.specifier
    assert {"torch", "triton", "transformers", "diffusers", "accelerate"} <= set(pinned)
    for name, specifier in pinned.items():
        lowest = next(part.version for part in specifier if part.operator in ("==", ">="))
        assert allowed[name].specifier.contains(Version(lowest)), name
    torch = next(iter(pinned["torch"])).version
    series = {"2.11": "3.6", "2.13": "3.7", "2.14": "3.8"}[".".join(torch.split(".")[:2])]
    assert pinned["triton"].contains(f"{series}.0")
    assert not pinned["triton"].contains(f"{series[:-1]}{int(series[-1]) + 1}.0")


def test_wheel_holds_the_package_with_its_data_and_licences(tmp_path):
    pytest.importorskip("hatchling")
    build = "from hatchling.build import build_wheel; import sys; print(build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        inside = set(opened.namelist())
        info = f"ffpa_hf-{PROJECT['version']}.dist-info"
        entry_points = opened.read(f"{info}/entry_points.txt").decode()
        assert b"Apache License" in opened.read(f"{info}/licenses/LICENSE")
    assert "ffpa-hf = ffpa_hf.cli:main" in entry_points
    sources = [path for path in (ROOT / "ffpa_hf").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.suffix for path in sources} >= {".py", ".json", ".txt"}
    assert "ffpa_hf/py.typed" in inside
    for path in sources:
        assert path.relative_to(ROOT).as_posix() in inside, path
    assert not [name for name in inside if name.startswith(("tests/", "examples/", "benchmarks/"))]


def test_the_source_archive_builds_the_same_wheel(tmp_path):
    """Everything that git knows of and the tests read is in it, and a wheel built from it holds what ours holds."""
    pytest.importorskip("hatchling")
    build = "import sys; from hatchling.build import build_sdist, build_wheel; print(vars()[sys.argv[1]](sys.argv[2]))"

    def built(kind: str, source: Path, name: str) -> Path:
        folder = tmp_path / name
        done = subprocess.run(
            [sys.executable, "-c", build, kind, str(folder)], cwd=source, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        (made,) = folder.iterdir()
        return made

    archive = built("build_sdist", ROOT, "sdist")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    for needed in (
        "tests/conftest.py",
        "benchmarks/results",
        "docs/performance.md",
        "mkdocs.yml",
        ".ci/run",
        "Makefile",
    ):
        assert (source / needed).exists(), needed
    names = []
    for kind, place in (("of the archive", source), ("of the checkout", ROOT)):
        with zipfile.ZipFile(built("build_wheel", place, kind)) as opened_wheel:
            names.append(sorted(name for name in opened_wheel.namelist() if "__pycache__" not in name))
    assert names[0] == names[1]


def test_the_wheel_works_where_nothing_of_this_checkout_is(tmp_path):
    """Installed by pip into an environment of its own; this one lends what it depends on, so nothing is fetched."""
    pytest.importorskip("hatchling")
    pytest.importorskip("pip")
    build = "from hatchling.build import build_wheel; import sys; print(build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FFPA", "TRITON"))
    }
    install = ["pip", "--python", str(python), "install", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", *install, str(wheel)], cwd=tmp_path, env=environment, check=True, capture_output=True
    )
    lent = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "lent.pth").write_text("\n".join(lent) + "\n")

    def output(*command: str | Path) -> str:
        done = subprocess.run(
            [str(part) for part in command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where, difference = output(
        python,
        "-c",
        "import torch, ffpa_hf, torch.nn.functional as F\n"
        "q = torch.randn(1, 4, 40, 96)\n"
        "print(ffpa_hf.__file__)\n"
        "print(float((ffpa_hf.ffpa_attn_func(q, q, q, is_causal=True)\n"
        "  - F.scaled_dot_product_attention(q, q, q, is_causal=True)).abs().max()))",
    ).split()
    assert Path(where).is_relative_to(site) and float(difference) < 1e-5
    command = python.with_name("ffpa-hf")
    assert "explain" in output(command, "--help")
    assert "forward" in output(command, "explain", "--shape", "1,8,1024,512", "--device", "cpu")
    smoke = ("bench", "--cases", "cpu_self", "--providers", "sdpa,ffpa_hf/auto", "--device", "cpu", "--seconds", "0.01")
    assert "cpu_self" in output(command, *smoke, "--output", tmp_path / "results")


def test_shipped_text_is_free_and_says_so():
    data = ROOT / "ffpa_hf" / "demo" / "data"
    licence = (data / "LICENCE.md").read_text(encoding="utf-8")
    for path in data.iterdir():
        assert path.name == "LICENCE.md" or f"`{path.name}`" in licence
    assert "public domain" in licence


def test_every_make_target_named_in_the_readme_exists():
    named = set(re.findall(r"(?:`|\$ )make ([a-z][a-z-]*)", README))
    targets = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, flags=re.MULTILINE))
    assert {"demo", "test", "lint", "test-gpu"} <= named
    assert named <= targets


def test_every_command_named_in_the_readme_exists():
    import typer

    from ffpa_hf.cli import app

    named = set(re.findall(r"\bffpa-hf ([a-z]+)", README))
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert {"info", "explain", "demo"} <= named
    assert named <= commands


def test_every_name_in_the_readme_snippets_exists():
    snippets = "".join(re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL))
    named = set(re.findall(r"\bffpa_hf\.([A-Za-z_]+)", snippets))
    assert {"FFPAAttnProcessor", "enable", "explain", "ffpa_attn_func"} <= named
    assert named <= set(ffpa_hf.__all__)
    ast.parse(snippets)


def test_every_link_in_readme_and_docs_leads_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize(("broken", "code"), [("none", 0), ("lint", 1), ("test", 1)])
def test_ci_runs_both_parts_and_fails_when_either_does(tmp_path, broken, code):
    fake = tmp_path / "make"
    fake.write_text(f'#!/bin/sh\necho "ran $1 in $PWD"\n[ "$1" != {broken} ]\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    environment = dict(os.environ, PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    done = subprocess.run(
        ["bash", str(script)], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["lint", "test"]
    assert all(line.endswith(f"in {ROOT}") for line in done.stdout.splitlines())


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
def test_an_old_python_is_refused_in_words(tmp_path):
    """Install with a stand-in for a Python that is too old: the version check fails, and says what is needed."""
    old = tmp_path / "python-old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = subprocess.run(
        ["make", "-C", str(ROOT), "install", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "needs Python 3.10 to 3.13" in done.stdout
    assert not (tmp_path / "venv").exists()
