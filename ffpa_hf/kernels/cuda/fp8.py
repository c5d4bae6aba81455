"""FP8 attention of the CUDA backend on Hopper: what it serves, and the door to its forward. It has no backward.

A module of its own beside the fp16 and bf16 kernels, qualified on its own. Importing this needs no CUDA package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ffpa_hf.backends import CUDABackend
from ffpa_hf.kernels import cuda
from ffpa_hf.kernels.common import Accepted, Answer, AttentionInputs, Capability, refusal, refuse

if TYPE_CHECKING:
    from ffpa_hf.call import AttentionCall

CAPABILITY = Capability(
    backend="cuda",
    dtypes=(torch.float16, torch.bfloat16),
    head_dims=(64, 512),
    minimum_capability=(9, 0),
)


def supports(call: AttentionCall, config: CUDABackend | None = None, *, backward: bool = False) -> Answer:
    """Accepted, or Refused with the rule that keeps the FP8 kernels from this call."""
    config = config or CUDABackend(enable_fp8=True)
    if config.acc == "f16" and call.dtype != torch.float16:
        return refuse("acc", "error", ValueError, "acc='f16' with query dtype {}: it takes float16", call.dtype)
    refused = refusal(CAPABILITY, call, backward=backward)
    if refused is not None:
        return refused
    missing = _not_built(config)
    if missing:
        return refuse(
            "not built", "unqualified", NotImplementedError, "{} of the CUDA backend is not built yet", missing
        )
    if call.is_rocm:
        return refuse("target", "fallback", RuntimeError, "ROCm: the CUDA backend needs an NVIDIA GPU")
    if call.capability is not None and call.capability[0] != 9:
        return refuse("target", "fallback", RuntimeError,
                      "sm_{}{}: the FP8 kernels are built for sm_90", *call.capability)  # fmt: skip
    problem = cuda._import_problem()
    if problem is not None:
        return refuse(
            "package", "error", RuntimeError,
            "NVRTC cannot be used here: {}; pip install 'ffpa-hf[cuda]' brings it", problem,
        )  # fmt: skip
    return Accepted()


def forward(inputs: AttentionInputs, config: CUDABackend) -> tuple[Tensor, Tensor, Tensor]:
    """(out like query, lse fp32 [B, Hq, Nq], row_stats fp32 [2, B, Hq, Nq] or empty where there is no bias)."""
    from ffpa_hf.kernels.cuda import fp8_launch

    hybrid = keeps_early_rows(config, inputs.is_causal)
    return fp8_launch.forward(inputs, config.smooth_k, config.smooth_v, hybrid, config.fast_accum)


def keeps_early_rows(config: CUDABackend, is_causal: bool) -> bool:
    """Whether the early rows of a call, which see few keys, stay in the input dtype: `hybrid`, on where causal."""
    return is_causal and config.hybrid is not False


def describe(call: AttentionCall, config: CUDABackend | None = None) -> str:
    """The kernel, its tile and what is quantised how, in one paragraph."""
    from ffpa_hf.kernels.cuda.fp8_configs import choose

    config = config or CUDABackend(enable_fp8=True)
    reads_masks = call.has_bias or call.mask_kind == "bool"
    tile = choose(call.head_dim, reads_masks, config.fast_accum)
    means = [name for name, on in (("keys", config.smooth_k), ("values", config.smooth_v)) if on]
    smoothing = f", less the mean token of {' and '.join(means)}" if means else ""
    sums = "summed in the tensor core's 14 bits" if config.fast_accum else "summed in fp32"
    early = (
        f" The first {tile.block_m} rows stay in the input dtype." if keeps_early_rows(config, call.is_causal) else ""
    )
    return (
        f"fp8_forward: {tile.block_m} x 128 tiles, head dim {tile.head_dim} in {tile.slices} part"
        f"{'s' if tile.slices > 1 else ''}; query, key, value and probabilities in e4m3 (scales per row, 64 keys and "
        f"channel{smoothing}), {sums}; TMA and wgmma.{early}"
    )


def _not_built(config: CUDABackend) -> str:
    """What a config asks for that does not exist; empty where all of it does."""
    if config.enable_fp4:
        return "FP4"
    if config.qk != "fp8":
        return f"qk={config.qk!r}"
    if config.family not in ("auto", "tma"):
        return f"FP8 with family={config.family!r}"
    return "FP8 with acc='f16'" if config.acc == "f16" else ""
