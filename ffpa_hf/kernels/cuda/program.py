"""From CUDA C++ to a kernel that can be launched: NVRTC through cuda-core, the cubin cache, loading through the driver.

No nvcc, no torch ABI, and compiling needs no GPU. The sources include nothing but each other, so neither do they need
CUDA's headers. Imported when the first kernel is built.
"""

from __future__ import annotations

import functools
import logging
import threading
from pathlib import Path
from typing import Any, NamedTuple

from ffpa_hf.kernels import compile_cache

SOURCES = Path(__file__).parent / "src"
_log = logging.getLogger("ffpa_hf")
_lock = threading.Lock()


class Variant(NamedTuple):
    """What one cubin is compiled from: file and entry point of this name, target such as "sm_90", and macros."""

    name: str
    arch: str
    macros: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        given = dict(self.macros)
        on = " ".join(name.lower() for name, value in self.macros if value and name.isupper() and name in _FEATURES)
        width = f" head_dim {given['D']}" if "D" in given else ""
        return f"{self.name} {self.arch}{width} {'bf16' if given['BFLOAT16'] else 'fp16'} {on}".rstrip()


_FEATURES = ("CAUSAL", "INTERVALS", "MASK", "KEY_MASK", "BIAS", "DROPOUT", "STATS")


@functools.cache
def _sources() -> str:
    """All sources as one text, which the cache key holds."""
    return "\0".join(f"{path.name}\0{path.read_text('utf-8')}" for path in sorted(SOURCES.iterdir()) if path.is_file())


@functools.cache
def compiler_version() -> str:
    """The NVRTC that compiles, as "nvrtc 13.0"."""
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"nvrtc {major}.{minor}"


def compile_variant(variant: Variant) -> bytes:
    """The cubin of a variant, from the cache or freshly compiled. Raises RuntimeError with the compiler's log."""
    key = compile_cache.key_of("cuda", variant.name, variant.arch, repr(variant.macros), _sources(), compiler_version())
    return compile_cache.get(key, functools.partial(_compile, variant))


def _compile(variant: Variant) -> bytes:
    from cuda.core import Program, ProgramOptions

    _log.info("ffpa_hf compiles a CUDA kernel, once for this machine: %s", variant)
    options = ProgramOptions(
        name=f"{variant.name}.cu",
        arch=variant.arch,
        std="c++17",
        include_path=[str(SOURCES)],
        define_macro=[(name, str(value)) for name, value in variant.macros],
    )
    try:
        program = Program((SOURCES / f"{variant.name}.cu").read_text("utf-8"), "c++", options)
        return bytes(program.compile("cubin").code)
    except Exception as error:
        raise RuntimeError(f"the CUDA kernel {variant} did not compile: {error}") from error


class Kernel:
    """A loaded kernel; `launch` puts it on a stream with one structure as its argument."""

    def __init__(self, cubin: bytes, name: str) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._library = checked(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
        self._kernel = checked(driver.cuLibraryGetKernel(self._library, name.encode()))
        self._function = driver.CUfunction(int(self._kernel))
        self._prepared: set[int] = set()

    def launch(self, device: int, stream: int, grid: int, threads: int, smem: int, arguments: Any) -> None:
        """arguments: array of addresses of the kernel's arguments, read before this returns."""
        import ctypes

        if device not in self._prepared:
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(self._driver.cuKernelSetAttribute(attribute, smem, self._kernel, self._driver.CUdevice(device)))
            self._prepared.add(device)
        checked(
            self._driver.cuLaunchKernel(
                self._function, grid, 1, 1, threads, 1, 1, smem, stream, ctypes.addressof(arguments), 0
            )
        )


@functools.lru_cache(maxsize=512)
def _load(variant: Variant) -> Kernel:
    return Kernel(compile_variant(variant), variant.name)


def load(variant: Variant) -> Kernel:
    """The kernel of a variant, compiled and loaded at most once per process."""
    with _lock:
        return _load(variant)


def checked(result: tuple[Any, ...]) -> Any:
    """The value of a driver call. Raises RuntimeError naming the driver's error."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"the CUDA driver refused a kernel: {status.name}")
    return values[0] if values else None
