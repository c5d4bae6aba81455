"""The CUDA C++ backend: what it serves, and the door to its forward. It has no backward of its own.

Importing this needs no CUDA package: NVRTC and the driver are met when the first call runs.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ffpa_hf.backends import CUDABackend
from ffpa_hf.kernels.common import Accepted, Answer, AttentionInputs, Capability, Refused, refusal, refuse
from ffpa_hf.kernels.cuda import configs
from ffpa_hf.kernels.tuning import constant_under_compile

if TYPE_CHECKING:
    from ffpa_hf.call import AttentionCall

CAPABILITY = Capability(
    backend="cuda",
    dtypes=(torch.float16, torch.bfloat16),
    dropout=True,
)
QUANTISED = replace(CAPABILITY, dropout=False)


def supports(call: AttentionCall, config: CUDABackend | None = None, *, backward: bool = False) -> Answer:
    """Accepted, or Refused with the rule that keeps the CUDA kernels from this call."""
    config = config or CUDABackend()
    if config.acc == "f16" and call.dtype != torch.float16:
        return refuse("acc", "error", ValueError, "acc='f16' with query dtype {}: it takes float16", call.dtype)
    can = QUANTISED if config.quantised else CAPABILITY
    refused = refusal(can, call, backward=backward)
    if refused is not None:
        return refused
    missing = _not_built(config)
    if missing:
        return refuse(
            "not built", "unqualified", NotImplementedError, "{} of the CUDA backend is not built yet", missing
        )
    if config.family == "tma":
        refused = _no_hopper(call)
        if refused is not None:
            return refused
    if call.is_rocm:
        return refuse("target", "fallback", RuntimeError, "ROCm: the CUDA backend needs an NVIDIA GPU")
    problem = _import_problem()
    if problem is not None:
        return refuse(
            "package", "error", RuntimeError,
            "NVRTC cannot be used here: {}; pip install 'ffpa-hf[cuda]' brings it", problem,
        )  # fmt: skip
    return Accepted()


def forward(inputs: AttentionInputs, config: CUDABackend) -> tuple[Tensor, Tensor, Tensor]:
    """(out like query, lse fp32 [B, Hq, Nq], row_stats fp32 [2, B, Hq, Nq] or empty where there is no bias)."""
    from ffpa_hf.kernels.cuda import launch

    return launch.forward(inputs, config.family)


def describe(call: AttentionCall, config: CUDABackend | None = None) -> str:
    """The kernel and tile of a call, in one sentence."""
    is_hopper = call.capability is not None and call.capability[0] == 9
    family = (config or CUDABackend()).family
    if configs.takes_hopper(family, call.head_dim, call.q_len, call.dropout_p > 0, is_hopper):
        if call.head_dim > configs.WIDEST_TMA:
            keys = 2 * configs.choose_twin(call.head_dim, call.is_causal).keys
            return f"twin_forward: 128 x {keys} tiles, two blocks of a cluster share the rows; TMA and wgmma."
        one = configs.choose_tma(call.head_dim, call.is_causal)
        warpgroups = f"{one.groups} warpgroups, {one.stages} stages"
        return f"tma_forward: {one.block_m} x {one.block_n} tiles, {warpgroups}; TMA and wgmma."
    tile = configs.choose_native(call.head_dim, configs.smem_limit_of(call.capability or (8, 0)))
    slices, width = configs.slices_of(call.head_dim)
    return (
        f"native_forward: {tile.block_m} x {tile.block_n} tiles, {slices} x {width * configs.CHUNK} output columns, "
        f"{tile.threads // 32} warps, {tile.stages} stages."
    )


def _no_hopper(call: AttentionCall) -> Refused | None:
    """Why the kernels for Hopper's own instructions cannot serve a call, None where they can."""
    if call.dropout_p > 0:
        return refuse("dropout", "error", NotImplementedError,
                      "dropout_p={:g}: family='tma' has no dropout; family='native' has", call.dropout_p)  # fmt: skip
    if call.capability is None or call.capability[0] != 9:
        return refuse("target", "fallback", RuntimeError, "family='tma' needs sm_90")
    if call.head_dim > configs.WIDEST_TWIN:
        return refuse("head dim", "fallback", ValueError, "head_dim {}: family='tma' is built up to {}",
                      call.head_dim, configs.WIDEST_TWIN)  # fmt: skip
    return None


def _not_built(config: CUDABackend) -> str:
    """What a config asks for that does not exist yet; empty where all of it does."""
    if config.quantised:
        return "FP8 and FP4"
    if config.family == "cute":
        return f"family={config.family!r}"
    return "acc='f16'" if config.acc == "f16" else ""


@constant_under_compile
def _import_problem() -> str | None:
    """Why kernels cannot be compiled here, None where they can."""
    return _try_import()


@functools.lru_cache(maxsize=1)
def _try_import() -> str | None:
    """A broken package may raise anything."""
    try:
        from cuda.bindings import driver, nvrtc  # noqa: F401
        from cuda.core import Program  # noqa: F401
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
