"""Streams of tokens into one joint buffer: QK-norm, rotary embedding and placement, by kernel or in torch.

The door for processors. Decides which of the two runs; knows no architecture and no module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ffpa_hf import ops, settings
from ffpa_hf.call import device_facts
from ffpa_hf.kernels import qualification, triton
from ffpa_hf.kernels.reference import join_streams
from ffpa_hf.kernels.tuning import constant_under_compile

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_WIDEST_TOKEN = 16384  # elements that a norm over all heads holds at once, both sizes rounded up to powers of two


class Stream(NamedTuple):
    """Tokens of one projection and what happens to them on the way to attention.

    heads: `[B, N, H, D]`, any strides, as a projection's output seen by heads is. eps: of the RMS norm; None leaves it
    out. weight: `[D]`, or `[H * D]` for a norm over all heads of a token, or None. rotary: (cos, sin), each
    `[B or 1, N, D/2, 2]` with any strides: the factors of the two members of each pair, see `rotary_tables`; or None.
    """

    heads: Tensor
    eps: float | None = None
    weight: Tensor | None = None
    rotary: tuple[Tensor, Tensor] | None = None


def join(streams: Sequence[Stream], *, across_heads: bool = False, interleaved: bool = True) -> Tensor:
    """All streams normalised, rotated and laid end to end: dense `[B, N1 + N2 + ..., H, D]` in their dtype.

    across_heads: the norm is over all heads of a token. interleaved: a rotary pair is two neighbours, else the same
    place of a head's two halves. Differentiable; `kernels.reference.join_streams` is the definition. On a GPU, without
    a gradient to keep, one kernel does each stream, where that kernel is qualified; elsewhere plain PyTorch does.

    Raises ValueError for streams that differ in more than their length, and for tables or weights that do not fit.
    """
    for stream in streams:
        _check(stream, streams[0].heads.shape, across_heads)
    tensors = [stream.heads for stream in streams]
    weights = [stream.weight for stream in streams]
    eps = [-1.0 if stream.eps is None else stream.eps for stream in streams]
    cos = [None if stream.rotary is None else stream.rotary[0] for stream in streams]
    sin = [None if stream.rotary is None else stream.rotary[1] for stream in streams]
    serves = _kernel_serves(tensors, [*weights, *cos, *sin], across_heads)
    return (ops.join_streams if serves else join_streams)(tensors, weights, eps, cos, sin, across_heads, interleaved)


def runs_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel may run on a device and takes this dtype, as far as that goes without a call."""
    current = settings.current()
    if dtype not in _DTYPES:
        return False
    if device.type == "cpu":  # the interpreter is for tests: nobody wants it in place of torch
        return current.triton_interpret and current.force_no_sdpa_fallback and dtype != torch.bfloat16
    return device.type == "cuda" and _qualified(device, current.allow_unqualified)


def _check(stream: Stream, first: torch.Size, across_heads: bool) -> None:
    batch, length, heads, head_dim = stream.heads.shape
    if (batch, heads, head_dim) != (first[0], first[2], first[3]):
        raise ValueError(
            f"heads: streams of {tuple(first)} and {tuple(stream.heads.shape)} must agree in all but their length."
        )
    width = heads * head_dim if across_heads else head_dim
    if stream.weight is not None and tuple(stream.weight.shape) != (width,):
        raise ValueError(f"weight: shape {tuple(stream.weight.shape)} is not allowed; ({width},) is.")
    for table in stream.rotary or ():
        if table.shape[0] not in (1, batch) or tuple(table.shape[1:]) != (length, head_dim // 2, 2):
            raise ValueError(
                f"rotary: a table of shape {tuple(table.shape)} does not fit heads {tuple(stream.heads.shape)}; "
                f"[1 or {batch}, {length}, {head_dim // 2}, 2] does."
            )


def _kernel_serves(streams: list[Tensor], factors: list[Tensor | None], across_heads: bool) -> bool:
    device, dtype = streams[0].device, streams[0].dtype
    heads, head_dim = streams[0].shape[2:]
    if dtype not in _DTYPES or head_dim % 8 or not 8 <= head_dim <= 256:
        return False
    if across_heads and _power_of_two(heads) * _power_of_two(head_dim) > _WIDEST_TOKEN:
        return False
    given = [*streams, *(tensor for tensor in factors if tensor is not None)]
    if any(stream.dtype != dtype for stream in streams) or any(tensor.dtype == torch.float64 for tensor in given):
        return False
    if any(tensor.device != device for tensor in given):
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        return False
    if forward_ad._current_level >= 0:  # the operator would lose a tangent
        return False
    if not torch.compiler.is_compiling() and any(map(torch._C._functorch.is_functorch_wrapped_tensor, given)):
        return False
    return runs_on(device, dtype)


@constant_under_compile
def _qualified(device: torch.device, allow_unqualified: bool) -> bool:
    """Whether the kernel can and may run on a GPU."""
    if triton._import_problem() is not None:
        return False
    capability, is_rocm, name = device_facts(device)
    return allow_unqualified or qualification.verdict("triton-qkv", capability, is_rocm, name).qualified


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
