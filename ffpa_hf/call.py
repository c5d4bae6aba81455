"""`AttentionCall`: everything about one attention call except its data.

Rules, errors, documentation and `explain` all read this; it holds no tensor and asks no device twice.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch

from ffpa_hf.masks import MaskKind


@dataclass(frozen=True)
class AttentionCall:
    """One call, described.

    Shapes follow `[B, H, N, D]`; `rank` is the query's own. `capability` is CUDA's compute capability, None elsewhere.
    """

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device_type: str = "cuda"
    capability: tuple[int, int] | None = None
    is_rocm: bool = False
    device_name: str = ""
    rank: int = 4
    mask_kind: MaskKind = "none"
    has_bias: bool = False
    bias_dtype: torch.dtype | None = None
    bias_needs_grad: bool = False
    is_causal: bool = False
    dropout_p: float = 0.0
    softcap: float | None = None
    has_sinks: bool = False
    return_lse: bool = False
    needs_grad: bool = False
    varlen: bool = False

    @property
    def facts(self) -> tuple[Any, ...]:
        """The fields in order: `AttentionCall(*call.facts) == call`. By name, which torch.compile traces in torch 2.11;
        `vars` it does not."""
        return tuple(getattr(self, name) for name in _FIELDS)

    def sdpa_expresses(self) -> str | None:
        """None where one `F.scaled_dot_product_attention` call can give this result, else what it lacks."""
        if self.return_lse:
            return "the log-sum-exp"
        if self.softcap is not None:
            return "softcap"
        if self.has_sinks:
            return "sinks"
        if self.varlen:
            return "packed sequences"
        bias_dtype = self.bias_dtype
        if bias_dtype is not None and bias_dtype != self.dtype:
            return f"a {_short(bias_dtype)} bias beside {_short(self.dtype)} inputs"
        return None

    def sdpa_composite(self) -> str | None:
        """What the SDPA backend's plain-torch route is needed for; None where F.sdpa serves.

        torch's fused kernels keep only the log-sum-exp of a row, which loses the number of keys when all scores are
        finite minima: their gradients are wrong there.
        """
        lacking = self.sdpa_expresses()
        # With dropout always, since a checkpoint's first pass without a graph must draw what its second pass draws.
        if lacking is None and self.has_bias and (self.needs_grad or self.dropout_p > 0):
            return "right gradients for rows of finite minima"
        return lacking

    def shape_text(self, length: str | None = None) -> str:
        """Shapes, dtype and mask in one line, for tables and messages. length: to be said in place of this call's."""
        heads = f"{self.q_heads}" if self.q_heads == self.kv_heads else f"{self.q_heads}:{self.kv_heads}"
        length = length or (f"{self.q_len}" if self.q_len == self.kv_len else f"{self.q_len}x{self.kv_len}")
        width = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"
        mask = "causal" if self.is_causal else self.mask_kind
        extras = [f"dropout {self.dropout_p:g}"] if self.dropout_p else []
        extras += [f"softcap {self.softcap:g}"] if self.softcap is not None else []
        extras += ["sinks"] if self.has_sinks else []
        extras += ["lse"] if self.return_lse else []
        tail = f" {' '.join(extras)}" if extras else ""
        return f"B{self.batch} H{heads} N{length} D{width} {_short(self.dtype)} {mask}{tail}"


_FIELDS = tuple(field.name for field in dataclasses.fields(AttentionCall))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def device_facts(device: torch.device) -> tuple[tuple[int, int] | None, bool, str]:
    """(compute capability or None, is ROCm, device name) of a device; asks the driver once per device."""
    if device.type != "cuda":
        return None, False, device.type
    return _cuda_facts(device) if torch.compiler.is_compiling() else _cached_cuda_facts(device)


def _cuda_facts(device: torch.device) -> tuple[tuple[int, int] | None, bool, str]:
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), torch.version.hip is not None, properties.name


_cached_cuda_facts = functools.lru_cache(maxsize=64)(_cuda_facts)
