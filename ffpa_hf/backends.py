"""The four backends as users name them: small frozen values, no behaviour.

Nothing here imports a kernel or asks a device; what a backend can do is answered by `kernels/<name>.supports`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


def _one_of(field: str, value: object, allowed: tuple[str, ...], config: object) -> None:
    if value not in allowed:
        choices = ", ".join(map(repr, allowed))
        raise ValueError(f"{type(config).__name__}: {field}={value!r} is not allowed; use one of {choices}.")


def _switches(config: object, *fields: str, unset: tuple[str, ...] = ()) -> None:
    """A text would count as true, "no" as well. unset: fields that may be None."""
    for field in fields + unset:
        value = getattr(config, field)
        if not isinstance(value, bool) and not (value is None and field in unset):
            allowed = "True, False or None" if field in unset else "True or False"
            raise ValueError(f"{type(config).__name__}: {field}={value!r} is not allowed; use {allowed}.")


def _positive(field: str, value: int, config: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{type(config).__name__}: {field}={value!r} is not allowed; use a whole number from 1 up.")


@dataclass(frozen=True)
class SDPABackend:
    """`torch.nn.functional.scaled_dot_product_attention`, and plain torch for what that cannot express."""

    name: ClassVar[str] = "sdpa"
    kernels: ClassVar[str] = "sdpa"


@dataclass(frozen=True)
class TritonBackend:
    """Triton kernels, forward and backward, fp16 and bf16, head dims 64 to 1024.

    autotune: time several tiles when a new bucket of shapes comes first (seconds to a minute, said once) and keep the
        fastest in this user's table, which later runs read with autotune=False too. Never inside torch.compile, a CUDA
        graph or a checkpoint's second forward. `ffpa-hf autotune` does it ahead of time.
    autotune_mode: "fast" tries a short list, "max" the whole legal grid.
    workspace_mb: most MiB of scratch that one call may hold, forward (wide heads) or backward.
    """

    autotune: bool = False
    autotune_mode: Literal["fast", "max"] = "fast"
    workspace_mb: int = 1024
    name: ClassVar[str] = "triton"
    kernels: ClassVar[str] = "triton"

    def __post_init__(self) -> None:
        _switches(self, "autotune")
        _one_of("autotune_mode", self.autotune_mode, ("fast", "max"), self)
        _positive("workspace_mb", self.workspace_mb, self)


@dataclass(frozen=True)
class CUDABackend:
    """CUDA C++ kernels, forward only (a Triton or CuTe-DSL backward stands behind them).

    Not built yet, so that a call raises NotImplementedError: family="cute", acc="f16", enable_fp4, qk="int8".

    family: "native" (any sm_80+), "tma" (sm_90, head dims up to 512, no dropout), "cute" (CuTe C++); "auto" picks.
    acc: accumulator of the matrix products, "f32", or "f16" for fp16 inputs.
    enable_fp8: quantise query, key, value and probabilities to e4m3 (sm_90, head dims 64 to 512). About 5% error on
        normal inputs instead of 0.3%; no gradient unless a backward backend is named, which then works in the input
        dtype.
    enable_fp4: the same in NVFP4.
    smooth_k: take the mean token off the keys before quantising, which changes no result but for its error: needed
        where a channel has a large mean.
    smooth_v: the same for the values; their mean is added to the output again.
    fast_accum: FP8 sums over the keys stay in the tensor core, which keeps about 14 bits and drops the rest: 10 to 15%
        faster, and short by up to a quarter where thousands of values have one sign.
    qk: "fp8" or "int8" for the first product under FP8.
    hybrid: the first rows of a causal call, which see few keys, stay in the input dtype; None means yes.
    """

    family: Literal["auto", "native", "tma", "cute"] = "auto"
    acc: Literal["f32", "f16"] = "f32"
    enable_fp8: bool = False
    enable_fp4: bool = False
    smooth_k: bool = True
    smooth_v: bool = False
    fast_accum: bool = False
    qk: Literal["fp8", "int8"] = "fp8"
    hybrid: bool | None = None
    name: ClassVar[str] = "cuda"

    def __post_init__(self) -> None:
        _one_of("family", self.family, ("auto", "native", "tma", "cute"), self)
        _one_of("acc", self.acc, ("f32", "f16"), self)
        _one_of("qk", self.qk, ("fp8", "int8"), self)
        _switches(self, "enable_fp8", "enable_fp4", "smooth_k", "smooth_v", "fast_accum", unset=("hybrid",))
        if self.enable_fp8 and self.enable_fp4:
            raise ValueError("CUDABackend: enable_fp8 and enable_fp4 exclude each other; give one of them.")

    @property
    def quantised(self) -> bool:
        """True where query, key and value are quantised, so that no gradient comes by default."""
        return self.enable_fp8 or self.enable_fp4

    @property
    def kernels(self) -> str:
        """The module under `ffpa_hf.kernels` that answers for this config, as for every backend."""
        return "cuda.fp8" if self.quantised else "cuda"


@dataclass(frozen=True)
class CuTeDSLBackend:
    """CuTe-DSL kernels, forward and backward.

    target: instruction set to build for; "auto" takes the device's.
    workspace_mb: most MiB of scratch that one backward call may hold.
    """

    target: Literal["auto", "sm_80", "sm_90a", "sm_100a"] = "auto"
    workspace_mb: int = 1024
    name: ClassVar[str] = "cute"
    kernels: ClassVar[str] = "cute"

    def __post_init__(self) -> None:
        _one_of("target", self.target, ("auto", "sm_80", "sm_90a", "sm_100a"), self)
        _positive("workspace_mb", self.workspace_mb, self)


Backend = SDPABackend | TritonBackend | CUDABackend | CuTeDSLBackend

#: Every name accepted as a string. "auto" stands for None: the planner chooses.
NAMES: dict[str, Backend | None] = {
    "auto": None,
    "sdpa": SDPABackend(),
    "cuda": CUDABackend(),
    "cuda-fp8": CUDABackend(enable_fp8=True),
    "cuda-fp4": CUDABackend(enable_fp4=True),
    "triton": TritonBackend(),
    "cute": CuTeDSLBackend(),
    "cutedsl": CuTeDSLBackend(),
}


def resolve_backend(backend: Backend | str | None, argument: str = "backend") -> Backend | None:
    """Turn what a user gave into a config; None (or "auto") leaves the choice to the planner.

    Raises ValueError for an unknown name and TypeError for anything that is no backend.
    """
    if backend is None:
        return None
    if isinstance(backend, str):
        if backend not in NAMES:
            raise ValueError(f"{argument}={backend!r} names no backend; use one of {', '.join(map(repr, NAMES))}.")
        return NAMES[backend]
    if isinstance(backend, (SDPABackend, TritonBackend, CUDABackend, CuTeDSLBackend)):
        return backend
    raise TypeError(
        f"{argument} must be None, a backend name or a backend config, not {type(backend).__name__}; "
        f"for instance {argument}='triton' or {argument}=TritonBackend()."
    )
