"""The CUDA C++ kernels without a GPU: they compile, use the promised instructions, spill nothing, fit the device."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
import torch

from ffpa_hf.kernels.cuda import configs

pytest.importorskip("cuda.bindings.nvrtc", reason="pip install 'ffpa-hf[cuda]' brings NVRTC")

from ffpa_hf.kernels.cuda import launch, program  # noqa: E402

HALVES = (torch.bfloat16, torch.float16)
TARGETS = ((8, 0), (8, 9), (9, 0), (12, 0))
EVERYTHING = {"intervals": True, "mask": True, "key_mask": True, "bias": torch.float32}


def tool(name: str) -> str:
    """NVIDIA's disassemblers come with Triton."""
    found = importlib.util.find_spec("triton")
    assert found is not None and found.origin is not None, "these tests need Triton's disassemblers"
    return str(Path(found.origin).parent / "backends/nvidia/bin" / name)


def inspect(cubin: bytes, tmp_path: Path) -> tuple[str, int, int]:
    """(assembly, registers per thread, bytes of stack, which hold what was spilled)."""
    path = tmp_path / "kernel.cubin"
    path.write_bytes(cubin)
    listing = subprocess.run([tool("nvdisasm"), str(path)], capture_output=True, text=True, check=True).stdout
    usage = subprocess.run([tool("cuobjdump"), "-res-usage", str(path)], capture_output=True, text=True).stdout
    registers, stack = re.search(r"REG:(\d+)", usage), re.search(r"STACK:(\d+)", usage)
    assert registers and stack, usage
    return listing, int(registers[1]), int(stack[1])


def check_native(head_dim: int, dtype: torch.dtype, capability: tuple[int, int], tmp_path: Path, **features) -> None:
    variant = launch.native_variant(head_dim, dtype, capability, **features)
    listing, registers, stack = inspect(program.compile_variant(variant), tmp_path)
    assert stack == 0, f"{variant} spills {stack} bytes"
    assert registers <= 255
    for instruction in ("HMMA.16816.F32", "LDSM.16.M88.4", "LDSM.16.MT88.4", "LDGSTS.E.BYPASS.128"):
        assert instruction in listing, f"{variant} has no {instruction}"
    assert ("HMMA.16816.F32.BF16" in listing) == (dtype == torch.bfloat16)


@pytest.fixture(autouse=True)
def kept(tmp_path_factory, monkeypatch):
    """One cache for the whole run: compiling is what takes the time."""
    folder = tmp_path_factory.getbasetemp() / "compiled"
    monkeypatch.setattr("ffpa_hf.kernels.compile_cache.directory", lambda: folder)


@pytest.mark.parametrize(
    "head_dim, dtype, capability, features",
    [
        (64, torch.float16, (8, 0), {"causal": True}),
        (512, torch.bfloat16, (9, 0), {}),
        (512, torch.bfloat16, (8, 9), {**EVERYTHING, "dropout": True}),
        (1024, torch.float16, (12, 0), {"causal": True}),
    ],
)
def test_native_kernels_compile_for_every_target(head_dim, dtype, capability, features, tmp_path):
    check_native(head_dim, dtype, capability, tmp_path, **features)


@pytest.mark.slow
@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("head_dim", [64, 72, 128, 200, 256, 320, 384, 448, 512, 576, 640, 768, 1024])
def test_every_native_kernel_compiles_without_spills(head_dim, capability, tmp_path):
    for dtype in HALVES:
        check_native(head_dim, dtype, capability, tmp_path, causal=True)
        check_native(head_dim, dtype, capability, tmp_path, **EVERYTHING, dropout=True)


@pytest.mark.parametrize("dtype", HALVES, ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"causal": True},
        {"mask": True},
        {"bias": torch.float32},
        {"intervals": True, "key_mask": True},
        {"intervals": True, "key_mask": True, "bias": torch.float32},
    ],
    ids=["plain", "causal", "bool mask", "bias", "intervals", "intervals with a bias"],
)
def test_the_twin_kernel_uses_hoppers_units(dtype, features, tmp_path):
    listing, _, stack = inspect(program.compile_variant(launch.twin_variant(dtype, **features)), tmp_path)
    assert stack <= (32 if {"intervals", "bias"} <= features.keys() else 0)
    kind = ".BF16" if dtype == torch.bfloat16 else ""
    assert f"HGMMA.64x64x16.F32{kind}" in listing  # scores
    assert f"HGMMA.64x256x16.F32{kind}" in listing  # values
    assert "UTMALDG.5D" in listing and "USETMAXREG" in listing
    assert "HMMA.16816" not in listing


def test_a_compiled_kernel_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("ffpa_hf.kernels.compile_cache.directory", lambda: tmp_path / "compiled")
    variant = launch.native_variant(64, torch.float16, (8, 0))
    first = program.compile_variant(variant)
    monkeypatch.setattr(program, "_compile", lambda variant: pytest.fail("compiled again"))
    assert program.compile_variant(variant) == first


def test_what_does_not_compile_says_why():
    variant = launch.native_variant(64, torch.float16, (8, 0))
    broken = variant._replace(macros=tuple(macro for macro in variant.macros if macro[0] != "BN"))
    with pytest.raises(RuntimeError, match="native_forward sm_80 head_dim 64 fp16 did not compile"):
        program.compile_variant(broken)


def test_host_and_device_agree_on_the_argument():
    """The same names in the same order, and the same sizes according to the device's compiler."""
    import ctypes

    from cuda.core import Program, ProgramOptions

    source = (program.SOURCES / "call.cuh").read_text("utf-8")
    body = re.sub(r"//.*", "", source.split("struct Call {")[1].split("};")[0])
    declared = [re.sub(r".*[ *]", "", name.strip()) for line in body.split(";") for name in line.split(",")]
    assert [name for name in declared if name] == [name for name, *_ in launch.Call._fields_]

    macros = [
        (name, "0") for name in ("CAUSAL", "INTERVALS", "MASK", "KEY_MASK", "BIAS", "DROPOUT", "BFLOAT16", "STATS")
    ]
    options = ProgramOptions(arch="sm_90a", std="c++17", include_path=[str(program.SOURCES)], define_macro=macros)
    sizes = {"View": launch._View, "Pairs": launch._Pairs, "Vector": launch._Vector, "Call": launch.Call}
    asserts = [f"static_assert(sizeof({name}) == {ctypes.sizeof(kind)});" for name, kind in sizes.items()]
    # Its alignment of 64 bytes rounds TwinCall up; the host's copy must not end before that.
    asserts.append(f"static_assert(sizeof(TwinCall) <= {ctypes.sizeof(launch._TwinCall)});")
    asserts.append(
        f"static_assert(sizeof(TwinCall) > {launch._TwinCall.call.offset + ctypes.sizeof(launch.Call) - 1});"
    )
    twin = (program.SOURCES / "twin_forward.cu").read_text("utf-8")
    Program(twin + "\n".join(asserts), "c++", options).compile("cubin")


@pytest.mark.parametrize("smem_limit", [99 * 1024, 163 * 1024, 227 * 1024])
def test_every_head_dim_has_a_legal_tile_on_every_device(smem_limit):
    for head_dim in range(64, 1025, 8):
        config = configs.choose_native(head_dim, smem_limit)
        assert configs.is_legal(config, head_dim, smem_limit)
        slices, width = configs.slices_of(head_dim)
        assert slices * width * configs.CHUNK >= head_dim
    assert configs.twin_smem(512) <= 227 * 1024


def test_no_tile_fits_where_there_is_no_room():
    with pytest.raises(ValueError, match="head_dim 512 in 1024 bytes"):
        configs.choose_native(512, 1024)
