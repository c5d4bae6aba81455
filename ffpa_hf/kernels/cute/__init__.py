"""The CuTe-DSL backend: what it serves, and the door to its forward. It has no backward of its own yet.

Importing this needs no DSL: it is met when the first call runs.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ffpa_hf.backends import CuTeDSLBackend
from ffpa_hf.kernels.common import Accepted, Answer, AttentionInputs, Capability, refusal, refuse
from ffpa_hf.kernels.cute import configs
from ffpa_hf.kernels.tuning import constant_under_compile

if TYPE_CHECKING:
    from ffpa_hf.call import AttentionCall

CAPABILITY = Capability(
    backend="cute",
    dtypes=(torch.float16, torch.bfloat16),
    masks=("none", "bool", "intervals"),
    bias=False,
    softcap=True,
    sinks=True,
)


def supports(call: AttentionCall, config: CuTeDSLBackend | None = None, *, backward: bool = False) -> Answer:
    """Accepted, or Refused with the first rule that applies; "not built" is what the design has and the code not."""
    refused = refusal(CAPABILITY, call, backward=backward)
    if refused is not None:
        return refused
    target = (config or CuTeDSLBackend()).target
    missing = _not_built(call, target, backward)
    if missing:
        return refuse(
            "not built", "unqualified", NotImplementedError, "{} of the CuTe-DSL backend is not built yet", missing
        )
    if call.is_rocm or call.capability is None or call.capability[0] != 9:
        return refuse("target", "fallback", RuntimeError, "the CuTe-DSL forward is built for sm_90 alone so far")
    if call.head_dim > configs.HEAD_DIMS[1]:
        return refuse("head dim", "fallback", ValueError, "head_dim {}: the CuTe-DSL forward takes {} to {} so far",
                      call.head_dim, *configs.HEAD_DIMS)  # fmt: skip
    if not _installed():
        return refuse("package", "unqualified", RuntimeError,
                      "CuTe-DSL is not installed; pip install 'ffpa-hf[cute]' brings it")  # fmt: skip
    return Accepted()


def forward(inputs: AttentionInputs, config: CuTeDSLBackend) -> tuple[Tensor, Tensor, Tensor]:
    """(out like query, lse fp32 [B, Hq, Nq], row statistics, empty: there is no bias)."""
    from ffpa_hf.kernels.cute import launch

    return launch.forward(inputs)


def describe(call: AttentionCall, config: CuTeDSLBackend | None = None) -> str:
    """The kernel and tile of a call, in one sentence."""
    chosen = configs.choose(call.head_dim, "float16", call.is_causal)
    return (
        f"forward_sm90: {configs.ROWS} x {chosen.block_n} tiles, {chosen.k_stages} stages of keys, {chosen.v_stages} "
        "of values; TMA and wgmma."
    )


def _not_built(call: AttentionCall, target: str, backward: bool) -> str:
    """What the contract has and no kernel serves yet; empty where all is there."""
    if backward:
        return "the backward"
    if target in ("sm_80", "sm_100a"):
        return f"target={target!r}"
    if call.varlen or call.mask_kind != "none":
        return f"attn_mask of kind {call.mask_kind!r}"
    if call.softcap is not None:
        return "softcap"
    return "sinks" if call.has_sinks else ""


@constant_under_compile
def _installed() -> bool:
    """Whether the DSL and the runtime of its exported functions can be found; whether they work is met later."""
    return all(importlib.util.find_spec(name) is not None for name in ("cutlass", "tvm_ffi"))
