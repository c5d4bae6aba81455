"""The CuTe-DSL backend. Its kernels are not built yet: it refuses every call, after the checks any backend makes."""

from __future__ import annotations

import torch

from ffpa_hf.kernels.common import Answer, Capability, refusal, refuse

CAPABILITY = Capability(
    backend="cute",
    dtypes=(torch.float16, torch.bfloat16),
    masks=("none", "bool", "intervals"),
    bias=False,
    softcap=True,
    sinks=True,
)


def supports(call, config=None, *, backward: bool = False) -> Answer:
    """Refuse with the first rule that applies; where none does, say that the kernels are not built yet."""
    return refusal(CAPABILITY, call, backward=backward) or refuse(
        "not built", "unqualified", NotImplementedError, "the CuTe-DSL backend is not built yet"
    )
