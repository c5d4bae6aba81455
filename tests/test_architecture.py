"""Who may import whom, read from the sources: the arrows of the design, and what no file may use at all."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import ffpa_hf

ROOT = Path(ffpa_hf.__file__).parent
SOURCES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8")) for path in sorted(ROOT.rglob("*.py"))}
KERNELS = ("sdpa", "triton", "cuda", "cute")


def typing_only(tree: ast.Module) -> set[int]:
    """Nodes under `if TYPE_CHECKING:`, which no interpreter runs."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            found |= {id(inner) for statement in node.body for inner in ast.walk(statement)}
    return found


def imports(file: str, *, at_import: bool = False) -> set[str]:
    """Absolute names of the modules that a file imports; with `at_import` only outside functions."""
    tree = SOURCES[file]
    skipped = typing_only(tree)
    if at_import:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                skipped |= {id(inner) for inner in ast.walk(node)}
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide the arrows"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.add(inner if file_of(inner) else node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "import_module"):
            names.add(ast.unparse(node.args[0]))
    return names


def file_of(module: str) -> str | None:
    """The file of one of our modules, None for anything else."""
    if module == "ffpa_hf":
        return "__init__.py"
    path = module.removeprefix("ffpa_hf.").replace(".", "/")
    if not module.startswith("ffpa_hf."):
        return None
    return next((file for file in (f"{path}.py", f"{path}/__init__.py") if file in SOURCES), None)


def ours(file: str, **options: bool) -> set[str]:
    """The files of ours that a file imports."""
    return {found for name in imports(file, **options) if (found := file_of(name))}


def others(file: str, **options: bool) -> set[str]:
    """Top-level packages that a file imports besides ours and the standard library."""
    top = {name.split(".")[0] for name in imports(file, **options) if not name.startswith(("ffpa_hf", "f'"))}
    return top - set(sys.stdlib_module_names)


def files(*prefixes: str) -> list[str]:
    return [file for file in SOURCES if file.startswith(prefixes)]


def test_the_files_that_the_design_names_exist():
    for name in ("functional", "call", "masks", "backends", "dispatch", "ops", "settings", "report", "cli"):
        assert f"{name}.py" in SOURCES
    assert all(f"kernels/{name}/__init__.py" in SOURCES for name in KERNELS) and "kernels/reference.py" in SOURCES
    assert imports("functional.py") and ours("functional.py") and others("kernels/triton/launch.py")


#: file -> the only files of ours that it may import.
ARROWS = {
    "settings.py": (),
    "backends.py": (),
    "report.py": (),
    "kernels/common.py": (),
    "kernels/building.py": (),
    "kernels/reference.py": (),
    "kernels/philox.py": (),
    "masks.py": ("kernels/common.py",),
    "call.py": ("masks.py",),
    "dispatch.py": (
        "settings.py", "backends.py", "call.py", "kernels/common.py", "kernels/qualification.py", "kernels/tuning/",
    ),
    "ops.py": ("backends.py", "kernels/common.py"),
    "functional.py": (
        "ops.py", "settings.py", "backends.py", "call.py", "dispatch.py", "masks.py", "report.py", "kernels/common.py",
        "kernels/building.py", "kernels/sdpa/",
    ),
    "joint.py": (
        "ops.py", "settings.py", "call.py", "kernels/reference.py", "kernels/qualification.py", "kernels/tuning/",
        "kernels/triton/__init__.py",
    ),
}  # fmt: skip


@pytest.mark.parametrize("file", ARROWS)
def test_the_core_imports_only_what_lies_below_it(file):
    wrong = {found for found in ours(file) if not found.startswith(ARROWS[file] or "-")}
    assert not wrong, f"{file} imports {sorted(wrong)}"


@pytest.mark.parametrize("backend", KERNELS)
def test_kernels_know_neither_each_other_nor_the_planner(backend):
    allowed = (
        f"kernels/{backend}/", "kernels/common.py", "kernels/compile_cache.py", "kernels/philox.py", "kernels/tuning/",
        "settings.py", "backends.py", *(("kernels/reference.py",) if backend == "sdpa" else ()),
    )  # fmt: skip
    for file in files(f"kernels/{backend}/"):
        wrong = {found for found in ours(file) if not found.startswith(allowed)}
        assert not wrong, f"{file} imports {sorted(wrong)}"


@pytest.mark.parametrize("file", files("processors/", "patches/"))
def test_processors_and_patches_reach_kernels_only_through_the_public_doors(file):
    allowed = (
        "functional.py", "joint.py", "masks.py", "settings.py", "report.py", "ops.py", "dispatch.py", "backends.py",
        "processors/", "patches/",
    )  # fmt: skip
    wrong = {found for found in ours(file) if not found.startswith(allowed)}
    assert not wrong, f"{file} imports {sorted(wrong)}"


def test_processors_do_not_know_patches_nor_transformers():
    for file in files("processors/"):
        assert not [found for found in ours(file) if found.startswith("patches/")], file
        assert "transformers" not in others(file), file


@pytest.mark.parametrize("file", ["ops.py", "dispatch.py", "call.py", "masks.py", "functional.py", "report.py"])
def test_the_core_needs_torch_alone(file):
    assert others(file) <= {"torch"}
    assert others("settings.py") == others("backends.py") == set()


def test_only_the_triton_folder_imports_triton():
    users = {file for file in SOURCES if "triton" in others(file)}
    assert users and all(file.startswith("kernels/triton/") for file in users), users


def test_no_module_imports_itself_in_a_circle():
    graph = {file: ours(file, at_import=True) - {file} for file in SOURCES}
    done: set[str] = set()

    def visit(file: str, path: tuple[str, ...]) -> None:
        assert file not in path, " -> ".join((*path, file))
        if file in done:
            return
        for found in graph[file]:
            # The package itself is loading whenever one of its modules is.
            if found != "__init__.py":
                visit(found, (*path, file))
        done.add(file)

    for file in SOURCES:
        visit(file, ())


#: Code from outside must never run because a file was read, and nothing is fetched from anywhere.
FORBIDDEN = {
    "pickle", "shelve", "marshal", "dill", "cloudpickle", "joblib", "socket", "urllib", "http", "requests", "httpx",
    "aiohttp", "ftplib", "smtplib", "huggingface_hub",
}  # fmt: skip


@pytest.mark.parametrize("file", SOURCES)
def test_nothing_is_pickled_fetched_or_evaluated(file):
    used = {name.split(".")[0] for name in imports(file)} & FORBIDDEN
    assert not used, f"{file} imports {used}"
    for node in ast.walk(SOURCES[file]):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in ("eval", "exec", "compile", "__import__", "torch.load", "os.system"), f"{file}: {name}"
            if name.startswith("subprocess."):
                assert not any(keyword.arg == "shell" for keyword in node.keywords), f"{file}: a shell"


def test_our_environment_variables_are_read_in_one_place():
    for file, tree in SOURCES.items():
        if file == "settings.py":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
                assert "FFPA" not in ast.unparse(node), f"{file}:{node.lineno}"
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
                assert "FFPA" not in ast.unparse(node), f"{file}:{node.lineno}"


@pytest.mark.parametrize("file", SOURCES)
def test_every_file_says_what_it_is_and_can_be_read_in_one_go(file):
    assert ast.get_docstring(SOURCES[file]), f"{file} has no docstring"
    assert len((ROOT / file).read_text("utf-8").splitlines()) <= 900, f"{file} is long: split it by idea"


def test_torchs_own_attention_is_nowhere_replaced():
    for file, tree in SOURCES.items():
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                assert not ast.unparse(target).endswith((".scaled_dot_product_attention", ".softmax")), file
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and len(node.args) > 1:
                assert "scaled_dot_product_attention" not in ast.unparse(node.args[1]), file
