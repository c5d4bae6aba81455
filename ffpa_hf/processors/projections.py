"""From a model's tokens to attention without copies: projections, norms, rotary tables, the joint buffer.

What the native processors are made of. Knows torch's and diffusers' linear and norm layers, no architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Module

from ffpa_hf.joint import Stream, join, runs_on
from ffpa_hf.masks import RowIntervals
from ffpa_hf.processors.redirect import Caller, from_dispatch, run_for

Tables = tuple[Tensor, Tensor]

# --- modules, and when their weights may be used instead of a call ----------------------------------------------------

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _is_plain(module: Any, *kinds: str) -> bool:
    """Would calling the module do what its class does and nothing else? Hooks, offloading, adapters say no."""
    kind = type(module)
    return (
        f"{kind.__module__}.{kind.__qualname__}" in kinds
        and "forward" not in module.__dict__
        and not any(module.__dict__[hooks] for hooks in _HOOKS)
        and module.__dict__.get("_compiled_call_impl") is None
        and not torch.nn.modules.module._has_any_global_hook()
    )


def _fits(parameter: Tensor | None, x: Tensor) -> bool:
    """Is it an ordinary weight that meets x without a cast or a move?"""
    if parameter is None:
        return True
    return type(parameter) is torch.nn.Parameter and parameter.dtype == x.dtype and parameter.device == x.device


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _writable(linear: Any, x: Tensor) -> bool:
    """May `x @ weight + bias` be written straight into a buffer in place of calling the module?

    Only for one batch element: its rows of a joint buffer are one dense matrix, as the fastest products want it.
    """
    return (
        x.shape[0] == 1
        and not torch.compiler.is_compiling()
        and forward_ad._current_level < 0
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and not torch.is_autocast_enabled(x.device.type)
        and _is_plain(linear, "torch.nn.modules.linear.Linear")
        and _fits(linear.weight, x)
        and _fits(linear.bias, x)
        and not _needs_grad(x, linear.weight, linear.bias)
    )


def _write(weight: Tensor, bias: Tensor | None, x: Tensor, out: Tensor) -> None:
    """out[0] = x[0] @ weight.T + bias."""
    if bias is None:
        torch.mm(x[0], weight.t(), out=out[0])
    else:
        torch.addmm(bias, x[0], weight.t(), out=out[0])


def _rms(norm: Any, x: Tensor, width: int) -> tuple[float, Tensor | None] | None:
    """(eps, weight) of a plain RMS norm over `width` elements, None for any other norm."""
    if _is_plain(norm, "torch.nn.modules.normalization.RMSNorm"):
        shape: Any = norm.normalized_shape
    elif _is_plain(norm, "diffusers.models.normalization.RMSNorm") and norm.bias is None:
        shape = norm.dim
    else:
        return None
    eps, weight = norm.eps, norm.weight
    if tuple(shape) != (width,) or eps is None or not _fits(weight, x):
        return None
    return eps, weight


# --- from tokens to attention -----------------------------------------------------------------------------------------


class Source(NamedTuple):
    """Tokens `[B, N, C]` of one stream, what projects them, and what happens to their queries and keys.

    projections: (to_q, to_k, to_v), or one module for all three. norms: of queries and keys, or None. rotary: tables of
    `Stream`, or None.
    """

    tokens: Tensor
    projections: Sequence[Any]
    norms: tuple[Any, Any] = (None, None)
    rotary: Tables | None = None


class _Projected:
    """The projections of one source, each made when it is asked for, so that what was consumed is freed."""

    def __init__(self, source: Source, in_place: bool) -> None:
        self.source, self.in_place = source, in_place
        self.fused = len(source.projections) == 1
        self.parts: Sequence[Tensor] | None = None
        if self.fused:
            linear, x = source.projections[0], source.tokens
            if in_place:  # value will be written where it belongs, so only queries and keys are made here
                self.width = linear.weight.shape[0] // 3
                bias = None if linear.bias is None else linear.bias[: 2 * self.width]
                self.parts = F.linear(x, linear.weight[: 2 * self.width], bias).chunk(2, dim=-1)
            else:
                self.parts = linear(x).chunk(3, dim=-1)
                self.width = self.parts[0].shape[-1]

    def __getitem__(self, index: int) -> Tensor:
        return self.source.projections[index](self.source.tokens) if self.parts is None else self.parts[index]

    def value_into(self, out: Tensor) -> None:
        linear, x = self.source.projections[-1], self.source.tokens
        if self.fused:
            bias = None if linear.bias is None else linear.bias[2 * self.width :]
            _write(linear.weight[2 * self.width :], bias, x, out)
        else:
            _write(linear.weight, linear.bias, x, out)


def _side(projected: Sequence[_Projected], index: int, split: tuple[int, int]) -> Tensor:
    """Queries (index 0) or keys (1) of all sources, normalised, rotated and end to end: `[B, N, H, D]`."""
    streams = [stream(one[index], one.source.norms[index], split, one.source.rotary) for one in projected]
    if len(streams) == 1 and streams[0].eps is None and streams[0].rotary is None:
        return streams[0].heads
    return join(streams)


def stream(x: Tensor, norm: Any, split: tuple[int, int], rotary: Tables | None, across_heads: bool = False) -> Stream:
    """A projection `[B, N, H * D]` with its norm's weights, or normalised already where the norm must do it itself."""
    heads = x.unflatten(-1, split)
    if norm is None:
        return Stream(heads, rotary=rotary)
    known = _rms(norm, x, x.shape[-1] if across_heads else heads.shape[-1])
    if known is not None:
        return Stream(heads, *known, rotary)
    return Stream(norm(x).unflatten(-1, split) if across_heads else norm(heads), rotary=rotary)


def _value(projected: Sequence[_Projected], split: tuple[int, int]) -> Tensor:
    if len(projected) == 1:
        return projected[0][2].unflatten(-1, split)
    if not projected[0].in_place:
        return torch.cat([one[2] for one in projected], dim=1).unflatten(-1, split)
    lengths = [one.source.tokens.shape[1] for one in projected]
    linear = projected[0].source.projections[-1]
    width = projected[0].width if projected[0].fused else linear.weight.shape[0]
    joint = projected[0].source.tokens.new_empty(1, sum(lengths), width)
    for one, part in zip(projected, joint.split(lengths, dim=1), strict=True):
        one.value_into(part)
    return joint.unflatten(-1, split)


def attend_heads(caller: Caller, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Tensor:
    """Attention over `[B, N, H, D]`; the result is `[B, N, H * D]`, a view of what the kernel wrote."""
    out = run_for(caller, from_dispatch, (query, key, value, mask), {})
    return out.flatten(2, 3).to(query.dtype)


def attend_jointly(caller: Caller, sources: Sequence[Source], split: tuple[int, int], mask: Any = None) -> Tensor:
    """Attention of all sources together, `[B, N1 + N2, H * D]`."""
    in_place = len(sources) > 1 and all(_writable(source.projections[-1], source.tokens) for source in sources)
    projected = [_Projected(source, in_place) for source in sources]
    query = _side(projected, 0, split)
    key = _side(projected, 1, split)
    return attend_heads(caller, query, key, _value(projected, split), mask)


# --- rotary tables in diffusers' conventions --------------------------------------------------------------------------


def real_tables(embedding: Any, length: int, device: torch.device) -> Tables | None:
    """(cos, sin) `[N, D]`, neighbours paired, as `Stream` takes them; None for anything else."""
    if not isinstance(embedding, (tuple, list)) or len(embedding) != 2:
        return None
    if any(table.dim() != 2 or table.shape[0] != length or table.shape[1] % 2 for table in embedding):
        return None
    cos, sin = (table.to(device).unflatten(-1, (-1, 2))[None] for table in embedding)
    return cos, sin


def complex_tables(embedding: Any, length: int) -> Tables | None:
    """cos + i sin `[N, D/2]`, one factor for each pair of neighbours."""
    if not isinstance(embedding, Tensor) or embedding.dtype != torch.complex64 or embedding.dim() != 2:
        return None
    if embedding.shape[0] != length:
        return None
    parts = torch.view_as_real(embedding)[None]
    shape = (1, *embedding.shape, 2)
    return parts[..., :1].expand(shape), parts[..., 1:].expand(shape)


def rows_of(tables: Tables | None, rows: slice) -> Tables | None:
    return None if tables is None else (tables[0][:, rows], tables[1][:, rows])


def ordinary(*tensors: Tensor | None) -> bool:
    """Plain dense tokens `[B, N, C]`, all of them; tensor subclasses (sharded, say) go the generic way."""
    return all(tensor is None or (type(tensor) is Tensor and tensor.dim() == 3) for tensor in tensors)


def pays(attn: Module, x: Tensor) -> bool:
    """Will the kernel do what stands between x and attention? Without it diffusers' own operations are as good.

    A gradient keeps it off, and so does a device on which it is not qualified.
    """
    if not runs_on(x.device, x.dtype):
        return False
    return not torch.is_grad_enabled() or not (x.requires_grad or any(p.requires_grad for p in attn.parameters()))


def padding_intervals(keep: Tensor) -> RowIntervals:
    """The mask `keep[:, :, None] & keep[:, None, :]` without its N x N: absent rows see nothing and give zeros.

    keep: bool `[B, N]`, tokens that are there.
    """
    end = keep.to(torch.int32) * keep.shape[1]
    return RowIntervals(torch.zeros_like(end), end, key_mask=keep)
