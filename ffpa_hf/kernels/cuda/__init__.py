"""The CUDA backend. Its kernels are not built yet: it refuses every call, after the checks that any backend makes."""

from __future__ import annotations

from dataclasses import replace

import torch

from ffpa_hf.backends import CUDABackend
from ffpa_hf.kernels.common import Answer, Capability, refusal, refuse

CAPABILITY = Capability(
    backend="cuda",
    dtypes=(torch.float16, torch.bfloat16),
    dropout=True,
)


QUANTISED = replace(CAPABILITY, dropout=False)


def supports(call, config=None, *, backward: bool = False) -> Answer:
    """Refuse with the first rule that applies; where none does, say that the kernels are not built yet."""
    config = config or CUDABackend()
    if config.acc == "f16" and call.dtype != torch.float16:
        return refuse("acc", "error", ValueError, "acc='f16' with query dtype {}: it takes float16", call.dtype)
    can = QUANTISED if config.quantised else CAPABILITY
    return refusal(can, call, backward=backward) or refuse(
        "not built", "unqualified", NotImplementedError, "the CUDA backend is not built yet"
    )
