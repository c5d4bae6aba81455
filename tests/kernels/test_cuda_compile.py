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


def check_roles(variant: program.Variant, listing: str, registers: int, stack: int) -> None:
    """Registers that the roles trade exist, and the computing ones spill nothing.

    A warpgroup that asks for more registers than the block was launched with, less what others gave back, waits
    forever: nothing but this arithmetic says so ahead of a hang. The code of the computing role lies between the two
    instructions of the trade. Words that both roles need may be stored before it (`steps`), and the loading one, which
    keeps 24 registers, may keep some of a tile's in memory.
    """
    macros = dict(variant.macros)
    computing = macros.get("GROUPS", 2)
    taken, given = (
        int(re.search(rf"USETMAXREG\.{kind}[^;]*(0x[0-9a-f]+)", listing)[1], 16)  # type: ignore[index]
        for kind in ("TRY_ALLOC", "DEALLOC")
    )
    assert given + computing * taken <= (computing + 1) * registers, f"{variant} asks for registers that do not exist"
    role = listing[listing.index("USETMAXREG.TRY_ALLOC") : listing.index("USETMAXREG.DEALLOC")]
    assert "HGMMA" in role and "UTMALDG" not in role
    assert " STL" not in role and role.count(" LDL") <= 4, f"{variant} spills where it computes"
    assert stack <= (24 if macros["INTERVALS"] else 8), f"{variant} spills {stack} bytes"


def check_hopper(head_dim: int, dtype: torch.dtype, tmp_path: Path, **features) -> None:
    """Products of the promised shapes, none serialised, nothing spilled, loads through TMA."""
    variant = launch.hopper_variant(head_dim, dtype, **features)
    listing, registers, stack = inspect(program.compile_variant(variant), tmp_path)
    check_roles(variant, listing, registers, stack)
    kind = ".BF16" if dtype == torch.bfloat16 else ""
    products = re.findall(rf"HGMMA\.64x(\d+)x16\.F32{kind} ", listing)
    macros = dict(variant.macros)
    keys = macros.get("KEYS") or macros["BN"]
    assert str(keys) in products  # scores
    assert len(products) == listing.count("HGMMA.64x")
    # Products that the compiler takes for dependent each get a WARPGROUP.ARRIVE and a wait of their own.
    assert listing.count("WARPGROUP.ARRIVE") < len(products) / 2, f"{variant}: products are serialised"
    assert "UTMALDG.5D" in listing and "USETMAXREG" in listing
    assert "HMMA.16816" not in listing


HOPPER_FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "bool mask": {"mask": True},
    "bias": {"bias": torch.float32},
    "intervals": {"intervals": True, "key_mask": True},
    "intervals with a bias": {"intervals": True, "key_mask": True, "bias": torch.float32},
}


@pytest.mark.parametrize(
    "head_dim, features",
    [
        (512, "plain"),
        (448, "causal"),
        (384, "intervals"),
        (320, "plain"),
        (256, "causal"),
        (128, "plain"),
        (128, "bias"),
        (64, "intervals"),
        (72, "plain"),
    ],
)
def test_kernels_for_hopper_use_its_units(head_dim, features, tmp_path):
    check_hopper(head_dim, torch.bfloat16, tmp_path, **HOPPER_FEATURES[features])


@pytest.mark.slow
@pytest.mark.parametrize("features", HOPPER_FEATURES)
@pytest.mark.parametrize("head_dim", [64, 72, 96, 128, 160, 192, 200, 256, 320, 328, 384, 448, 504, 512])
def test_every_kernel_for_hopper_compiles_without_spills(head_dim, features, tmp_path):
    for dtype in HALVES:
        check_hopper(head_dim, dtype, tmp_path, **HOPPER_FEATURES[features])


def test_a_trade_of_registers_that_do_not_exist_is_seen():
    """The arithmetic at work: 32 registers left to the loading warpgroup are 1024 too many for two that take 240."""
    variant = launch.hopper_variant(512, torch.bfloat16)
    listing = "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0 ; HGMMA ; USETMAXREG.DEALLOC.CTAPOOL 0x{:x} ;"
    check_roles(variant, listing.format(24), 168, 0)
    with pytest.raises(AssertionError, match="do not exist"):
        check_roles(variant, listing.format(32), 168, 0)


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
    source += (program.SOURCES / "tma_call.cuh").read_text("utf-8")
    for kind in (launch.Call, launch.TmaCall):
        body = re.sub(r"//.*", "", source.split(f"struct {kind.__name__} {{")[1].split("};")[0])
        declared = [re.sub(r".*[ *]", "", name.strip()) for line in body.split(";") for name in line.split(",")]
        given = [name for name, *_ in kind._fields_ if name != "tail"]
        assert [name for name in declared if name] == given

    macros = [
        (name, "0") for name in ("CAUSAL", "INTERVALS", "MASK", "KEY_MASK", "BIAS", "DROPOUT", "BFLOAT16", "STATS")
    ]
    options = ProgramOptions(arch="sm_90a", std="c++17", include_path=[str(program.SOURCES)], define_macro=macros)
    sizes = {"View": launch._View, "Pairs": launch._Pairs, "Vector": launch._Vector, "Call": launch.Call}
    asserts = [f"static_assert(sizeof({name}) == {ctypes.sizeof(kind)});" for name, kind in sizes.items()]
    # Its alignment of 64 bytes rounds TmaCall up; the host's copy must not end before that.
    asserts.append(f"static_assert(sizeof(TmaCall) <= {ctypes.sizeof(launch.TmaCall)});")
    asserts.append(f"static_assert(sizeof(TmaCall) > {launch.TmaCall.call.offset + ctypes.sizeof(launch.Call) - 1});")
    Program('#include "tma_call.cuh"\n' + "\n".join(asserts), "c++", options).compile("cubin")


@pytest.mark.parametrize("smem_limit", [99 * 1024, 163 * 1024, 227 * 1024])
def test_every_head_dim_has_a_legal_tile_on_every_device(smem_limit):
    for head_dim in range(64, 1025, 8):
        config = configs.choose_native(head_dim, smem_limit)
        assert configs.is_legal(config, head_dim, smem_limit)
        slices, width = configs.slices_of(head_dim)
        assert slices * width * configs.CHUNK >= head_dim


def test_every_head_dim_up_to_512_has_a_tile_that_fits_hopper():
    for head_dim in range(64, 513, 8):
        if head_dim > configs.WIDEST_TMA:
            for causal in (False, True):
                twin = configs.choose_twin(head_dim, causal)
                assert configs.twin_smem(twin, head_dim) <= 227 * 1024
            assert configs.half_of(head_dim) * 2 >= head_dim
        else:
            for causal, masked in ((False, False), (True, False), (False, True)):
                one = configs.choose_tma(head_dim, causal, masked)
                assert configs.tma_smem(one, head_dim) <= 227 * 1024
                assert one.stages >= 2 * -(-configs.chunks_of(head_dim) // one.piece)


def test_no_tile_fits_where_there_is_no_room():
    with pytest.raises(ValueError, match="head_dim 512 in 1024 bytes"):
        configs.choose_native(512, 1024)
