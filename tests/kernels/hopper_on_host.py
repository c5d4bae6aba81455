"""The FP8 kernels' own sources on a CPU: the host compiler instead of NVRTC, `hopper_on_host.h` instead of a GPU.

Inline PTX is replaced statement by statement; a statement that this file does not know stops the build.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ffpa_hf.kernels.cuda import launch, program

HEADER = Path(__file__).with_name("hopper_on_host.h")
COMPILER = shutil.which("g++") or shutil.which("clang++")
_ARGUMENTS = {"fp8_forward": "Fp8Call"}  # the passes of the quantiser take a Quantise

#: (what is in a source, what stands for it here)
_REPLACED = (
    (r'asm volatile\("fence\.[^;]*;" ::: "memory"\);', ";"),
    (r'asm volatile\("bar\.arrive %0, 256;" ::"r"\((.*?)\) : "memory"\);', r"barrier_arrive_named(\1, 256);"),
    (r'asm\("max\.NaN\.f32 %0, %0, 0fC2FC0000;" : "\+f"\(x\)\);', "x = not_below(x, -126.f);"),
    (r"extern __shared__ __align__\(1024\) u8 memory\[\];", "u8* const memory = host::shared;"),
    (r"extern __shared__ float sums\[\];", "float* const sums = reinterpret_cast<float*>(host::shared);"),
    (r"(?s)__device__ __forceinline__ u16 e4m3_pair\(.*?\n}\n", ""),
)


def _text(name: str) -> str:
    """One source with its includes in place."""
    if name in ("ptx.cuh", "hopper.cuh", "wgmma.cuh"):
        return ""
    text = (program.SOURCES / name).read_text("utf-8").replace("#pragma once", "")
    if name == "fp8_hopper.cuh":  # the descriptor is the kernel's own; copies and products are the model's
        text = text.split("// One linear copy of a tile")[0]
    return re.sub(r'#include "(.*?)"', lambda found: _once(found[1]), text)


def _once(name: str) -> str:
    guard = name.replace(".", "_")
    return f"#ifndef {guard}\n#define {guard}\n{_text(name)}\n#endif\n"


def source(name: str) -> str:
    """A kernel as C++ for the host."""
    text = _text(f"{name}.cu")
    for pattern, instead in _REPLACED:
        text = re.sub(pattern, instead, text)
    left = re.search(r"\basm\b.*", text)
    assert left is None, f"{name}: no stand-in for {left[0]}"
    argument = _ARGUMENTS.get(name, "Quantise")
    return (
        f'#include "{HEADER}"\n{text}\n'
        f'extern "C" const char* host_run(const {argument}* call, int grid, int threads, int smem, int seed) {{\n'
        f"    return host::run([=] {{ {name}(*call); }}, grid, threads, smem, seed);\n}}\n"
    )


class Machine:
    """Builds and runs variants. seed: of the order in which threads and copies get on."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder, self.seed = folder, seed
        self.ran: list[str] = []

    @functools.cache  # noqa: B019
    def _build(self, variant: program.Variant) -> ctypes.CDLL:
        assert COMPILER is not None
        stem = self.folder / f"{variant.name}{abs(hash(variant))}"
        stem.with_suffix(".cpp").write_text(source(variant.name))
        macros = [f"-D{name}={value}" for name, value in variant.macros]
        # No contraction: the device code asks for it by name where it wants it.
        options = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-fPIC", "-shared"]
        subprocess.run(
            [COMPILER, *options, *macros, str(stem.with_suffix(".cpp")), "-o", str(stem.with_suffix(".so"))], check=True
        )
        return ctypes.CDLL(str(stem.with_suffix(".so")))

    def start(
        self, variant: program.Variant, device: int, grid: int, threads: int, smem: int, argument: ctypes.Structure
    ) -> None:
        """What `launch._start` does, here."""
        self.ran.append(variant.name)
        run = self._build(variant).host_run
        run.restype = ctypes.c_char_p
        fault = run(ctypes.byref(argument), grid, threads, smem, self.seed)
        if fault:
            raise RuntimeError(f"{variant}: {fault.decode()}")


@contextlib.contextmanager
def running_on(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the launchers start kernels on `machine`, and take CPU tensors."""
    with monkeypatch.context() as patched:
        patched.setattr(launch, "_start", machine.start)
        patched.setattr(launch, "_on", lambda index: contextlib.nullcontext())
        patched.setattr(torch.cuda, "current_device", lambda: 0)
        yield
