"""How kernels are launched, read from the sources: one grid axis, on the tensors' own device and stream."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "ffpa_hf" / "kernels"
LAUNCHERS = [file for file in sorted((KERNELS / "triton").glob("*.py")) if "[(" in file.read_text("utf-8")]


def launches(file: Path) -> list[ast.Call]:
    """Calls of the form kernel[grid](...)."""
    return [
        node
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and any(keyword.arg == "num_warps" for keyword in node.keywords)
    ]


@pytest.mark.parametrize("file", [file for file in LAUNCHERS if launches(file)], ids=lambda file: file.name)
def test_every_grid_has_one_axis(file):
    """The first axis holds 2^31 - 1 blocks, the others 65,535: too few for batches, heads or tiles."""
    for call in launches(file):
        grid = call.func.slice
        assert isinstance(grid, ast.Tuple) and len(grid.elts) == 1, f"{file.name}:{call.lineno}"


def test_launches_are_found():
    assert sum(len(launches(file)) for file in LAUNCHERS) > 8


def test_the_cuda_launch_has_one_axis_too():
    tree = ast.parse((KERNELS / "cuda" / "program.py").read_text("utf-8"))
    (call,) = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and "cuLaunchKernel" in ast.dump(node.func)
    ]
    assert [ast.literal_eval(axis) for axis in call.args[2:4]] == [1, 1]


@pytest.mark.parametrize(
    "file, doors", [("triton/launch.py", {"forward", "backward"}), ("triton/qkv_kernels.py", {"join_streams"}),
                    ("cuda/launch.py", {"forward"})]
)  # fmt: skip
def test_every_door_makes_the_tensors_device_current(file, doors):
    tree = ast.parse((KERNELS / file).read_text("utf-8"))
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in doors}
    assert found.keys() == doors
    for name, function in found.items():
        entered = [
            ast.unparse(item.context_expr)
            for node in ast.walk(function)
            if isinstance(node, ast.With)
            for item in node.items
        ]
        assert any("_on(" in one or "cuda.device(" in one for one in entered), name
