"""How a processor's attention call reaches `attend`: from diffusers' dispatcher, from F.sdpa, or by a function mode.

Knows tensors, routes and the module a call belongs to; knows no diffusers class, and does not import diffusers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ffpa_hf.dispatch import Route
from ffpa_hf.functional import attend
from ffpa_hf.masks import RowIntervals
from ffpa_hf.report import not_accelerated

#: (route, module, scale where the call names none) of a running processor.
Caller = tuple[Route, Module | None, float | None]
_NOBODY: Caller = (Route(), None, None)

#: Whether diffusers' dispatcher knows our backend now; without it every call takes the function mode.
backend_registered = False


@dataclasses.dataclass(frozen=True)
class Lowered(Route):
    """A route for modules that compute in float32: their queries, keys and values go to attention as `dtype`."""

    dtype: torch.dtype = torch.bfloat16


class _Scope(threading.local):
    """What the running processor wants: `call` is a `Caller`, `busy` says that `attend` itself is running."""

    def __init__(self) -> None:
        # On the instance, not the class: torch.compile guards on what this thread's namespace holds.
        self.call: Caller | None = None
        self.busy = False


_scope = _Scope()


class Redirect(TorchFunctionMode):
    """While active, `F.scaled_dot_product_attention` is answered by `attend` for `site` along `route`.

    scale: used where the call itself names none (processors written before torch took a scale).
    """

    def __init__(self, route: Route, site: Module | None, scale: float | None = None) -> None:
        super().__init__()
        self.route, self.site, self.scale = route, site, scale

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.unflatten:  # written with super(), which torch.compile cannot trace from inside a mode
            return torch.unflatten(*args, **kwargs)
        if func is not F.scaled_dot_product_attention or _scope.busy:
            return func(*args, **kwargs)
        before, _scope.call = _scope.call, (self.route, self.site, self.scale)
        try:
            return from_sdpa(*args, **kwargs)
        finally:
            _scope.call = before


class IntervalArgument:
    """A `RowIntervals` on its way through an argument of F.scaled_dot_product_attention that only takes tensors.

    `from_sdpa` takes it out again. A call that goes to torch after all gets the dense mask.
    """

    def __init__(self, intervals: RowIntervals) -> None:
        self.intervals = intervals

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        mask = kwargs.get("attn_mask")
        if isinstance(mask, cls):
            kwargs["attn_mask"] = mask.intervals.dense(args[1].shape[-2])
        return func(*args, **kwargs)


def from_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """F.sdpa's arguments, served for the processor that is running: `[B, H, N, D]`."""
    route, site, own_scale = _scope.call or _NOBODY
    if isinstance(attn_mask, IntervalArgument):
        attn_mask = attn_mask.intervals
    scale = own_scale if scale is None else scale
    return serve(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, False, route, site)


def serve(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    route: Route,
    site: Module | None,
) -> Any:
    """One `[B, H, N, D]` call through `attend`, or through F.sdpa where another function mode waits for that call."""
    route = route.for_length(key.shape[-2])
    busy, _scope.busy = _scope.busy, True
    try:
        if not return_lse and (_watched() or torch.compiler.is_compiling() and _undecidable(query, key, value)):
            if site is not None and not torch.compiler.is_compiling():
                not_accelerated(site, "another TorchFunctionMode takes the F.scaled_dot_product_attention call")
            if isinstance(attn_mask, RowIntervals):
                attn_mask = attn_mask.dense(key.shape[-2])
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=attn_mask,
                dropout_p=dropout_p,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        own = query.dtype
        if isinstance(route, Lowered) and own == torch.float32:
            query, key, value = (tensor.to(route.dtype) for tensor in (query, key, value))
        result = attend(
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            return_lse=return_lse,
            route=route,
            site=site,
        )
        return (result[0].to(own), result[1]) if return_lse else result.to(own)
    finally:
        _scope.busy = busy


def _undecidable(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Under torch.compile: do lengths depend on data, so that no rule about them can be decided?

    The HunyuanVideo family cuts its text to the longest real prompt; a graph holds such a length without knowing it.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    if not guard_or_false(key.shape[-2] == value.shape[-2]):
        return True
    for length in (query.shape[-2], key.shape[-2]):
        if not guard_or_false(length >= 512) and not guard_or_false(length < 512):
            return True
    return False


def _watched() -> bool:
    """Does someone else's function mode (layer skipping, say) expect to see F.scaled_dot_product_attention?"""
    if torch._C._len_torch_function_stack() == 0:
        return False
    return any(not isinstance(mode, (Redirect, DeviceContext)) for mode in _get_current_function_mode_stack())


def running_scope() -> Caller | None:
    """The processor that is running in this thread."""
    return _scope.call


@contextlib.contextmanager
def use_scope(call: Caller | None) -> Iterator[None]:
    """Run as that processor would; for a backward that recomputes."""
    before, _scope.call = _scope.call, call
    try:
        yield
    finally:
        _scope.call = before


def run_for(caller: Caller, function: Any, args: Any, kwargs: Any) -> Any:
    """Call `function`, which reaches `from_dispatch` or `from_sdpa` by itself, so that they know for whom."""
    before, _scope.call = _scope.call, caller
    try:
        return function(*args, **kwargs)
    finally:
        _scope.call = before


def from_dispatch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Any:
    """The "ffpa" backend of diffusers' dispatcher: `[B, N, H, D]` in and out, lse `[B, N, H]`; everything is a view.

    A 2-D mask `[B, Nkv]` is a key mask, as diffusers' native backend reads it.
    """
    route, site, _ = _scope.call or _NOBODY
    if (
        isinstance(attn_mask, Tensor)
        and attn_mask.dim() == 2
        and attn_mask.shape[0] == query.shape[0]
        and attn_mask.shape[1] == key.shape[1]
    ):
        attn_mask = attn_mask[:, None, None, :]
    result = serve(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        return_lse,
        route,
        site,
    )
    if return_lse:
        out, lse = result
        return out.transpose(1, 2), lse.transpose(1, 2)
    return result.transpose(1, 2)
