"""What every backend shares: the answers of `supports`, and the tensors a kernel is handed.

Imports torch only; knows no backend.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ffpa_hf.call import AttentionCall

#: Key-block length for which `RowIntervals.query_ranges` tells the query rows that can see it.
RANGE_BLOCK = 64


class Accepted(NamedTuple):
    """The backend can serve the call."""

    note: str = ""
    accepted: bool = True


class Refused(NamedTuple):
    """The backend cannot serve the call.

    kind: "error" (an explicit request raises), "fallback" (an explicit request goes to SDPA with a warning),
    "unqualified" (the kernel never ran on this kind of GPU). error: the exception an explicit request raises.
    """

    reason: str
    kind: Literal["error", "fallback", "unqualified"] = "error"
    error: type[Exception] = NotImplementedError
    rule: str = ""
    accepted: bool = False


Answer = Accepted | Refused


@dataclass(frozen=True)
class Capability:
    """What one backend's kernels can do: the row of the documentation table, and what `refusal` reads."""

    backend: str
    dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, int] = (64, 1024)
    head_dim_step: int = 8
    masks: tuple[str, ...] = ("none", "bool", "additive", "intervals")
    bias: bool = True
    bias_grad: bool = False
    dropout: bool = False
    softcap: bool = False
    sinks: bool = False
    lse: bool = True
    minimum_capability: tuple[int, int] = (8, 0)


def refuse(rule: str, kind: str, error: type[Exception], template: str, *values: object) -> Refused:
    """A refusal whose text is only formatted outside torch.compile (formatting a symbolic size would fix it)."""
    text = rule if torch.compiler.is_compiling() else template.format(*values)
    return Refused(text, kind, error, rule)  # type: ignore[arg-type]


def refusal(
    can: Capability, call: AttentionCall, *, interpreter: bool = False, backward: bool = False
) -> Refused | None:
    """The first rule of the contract that keeps a backend from a call, None where it can serve it.

    Errors in the arguments come first and never depend on size or device; fallbacks follow.
    """
    name = can.backend
    if call.dtype not in can.dtypes:
        return refuse(
            "dtype", "error", TypeError, "query dtype {}: the {} backend takes {}", _short(call.dtype), name,
            " or ".join(_short(dtype) for dtype in can.dtypes),
        )  # fmt: skip
    if call.mask_kind not in can.masks:
        return refuse(
            "mask kind", "error", NotImplementedError, "attn_mask of kind {!r}: the {} backend takes {}",
            call.mask_kind, name, ", ".join(can.masks),
        )  # fmt: skip
    if call.has_bias and not can.bias:
        return refuse(
            "bias", "error", NotImplementedError, "attn_mask with an additive bias: the {} backend has none", name
        )
    if backward and call.bias_needs_grad and not can.bias_grad:
        return refuse("bias gradient", "error", NotImplementedError,
                      "a gradient for the additive attn_mask: the {} backward has none", name)  # fmt: skip
    if call.dropout_p > 0 and not can.dropout:
        return refuse("dropout", "error", NotImplementedError,
                      "dropout_p={:g}: the {} backend has no dropout", call.dropout_p, name)  # fmt: skip
    if call.softcap is not None and not can.softcap:
        return refuse("softcap", "error", NotImplementedError,
                      "softcap={:g}: the {} backend has none", call.softcap, name)  # fmt: skip
    if call.has_sinks and not can.sinks:
        return refuse("sinks", "error", NotImplementedError, "sinks: the {} backend has none", name)
    if call.return_lse and not can.lse:
        return refuse("lse", "error", NotImplementedError, "return_lse=True: the {} backend has none", name)
    if not (call.device_type == "cuda" or (interpreter and call.device_type == "cpu")):
        return refuse("device", "fallback", RuntimeError,
                      "tensors on {}: the {} backend needs a CUDA or ROCm GPU", call.device_type, name)  # fmt: skip
    if call.capability is not None and not call.is_rocm and call.capability < can.minimum_capability:
        return refuse("target", "fallback", RuntimeError, "sm_{}{}: the {} backend needs sm_{}{} or newer",
                      *call.capability, name, *can.minimum_capability)  # fmt: skip
    if call.rank != 4:
        return refuse("rank", "fallback", ValueError,
                      "query has {} dimensions: the {} backend takes [B, H, N, D]", call.rank, name)  # fmt: skip
    if call.value_dim != call.head_dim:
        return refuse("value width", "fallback", ValueError, "value is {} wide and query {}: the {} backend needs one",
                      call.value_dim, call.head_dim, name)  # fmt: skip
    low, high = can.head_dims
    if call.head_dim < low or call.head_dim > high or call.head_dim % can.head_dim_step:
        return refuse("head dim", "fallback", ValueError, "head_dim {}: the {} backend takes multiples of {}, {} to {}",
                      call.head_dim, name, can.head_dim_step, low, high)  # fmt: skip
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass
class AttentionInputs:
    """Canonical tensors of one call, as kernels receive them.

    query [B, Hq, Nq, D], key and value [B, Hkv, Nkv, D]: strided views (stride 0 allowed on B and H), last dim
    contiguous, base and strides multiples of 16 bytes. mask bool and bias (query's dtype or fp32):
    [B|1, Hq|1, Nq|1, Nkv|1]. row_start, row_end int32 [B|1, Nq]. key_mask bool [B|1, Nkv]. block_start, block_end
    int32 [B|1, ceil(Nkv/64)]: rows that can see each 64-key block (backward only). sinks fp32 [Hq], dense.
    rng_state int64 [2]: seed and offset, on the device.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    is_causal: bool = False
    mask: Tensor | None = None
    bias: Tensor | None = None
    row_start: Tensor | None = None
    row_end: Tensor | None = None
    key_mask: Tensor | None = None
    block_start: Tensor | None = None
    block_end: Tensor | None = None
    sinks: Tensor | None = None
    rng_state: Tensor | None = None
    dropout_p: float = 0.0
    softcap: float | None = None

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.query.shape[1] // self.key.shape[1]


@functools.lru_cache(maxsize=4096)
def _rows_align(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    if strides[-1] != 1 or (strides[-2] == 0 and shape[-2] != 1):
        return False
    return all(size <= 1 or stride * itemsize % 16 == 0 for size, stride in zip(shape[:-1], strides[:-1], strict=True))


def aligned(tensor: Tensor) -> Tensor:
    """`tensor` itself, or one dense copy when its last dim, address or a stride breaks 16-byte access.

    A dim of size 1 may have any stride; stride 0 is allowed (broadcast) except on the sequence dim.
    """
    itemsize = tensor.element_size()
    if tensor.data_ptr() % 16 == 0 and _rows_align(tensor.shape, tensor.stride(), itemsize):
        return tensor
    if tensor.shape[-1] * itemsize % 16 == 0:
        return tensor.clone(memory_format=torch.contiguous_format)
    raise ValueError(f"head_dim {tensor.shape[-1]} of {tensor.dtype} rows is no multiple of 16 bytes.")


def empty_stats(query: Tensor) -> Tensor:
    """The row statistics of a forward that needs none beyond the log-sum-exp."""
    return torch.empty(0, dtype=torch.float32, device=query.device)
