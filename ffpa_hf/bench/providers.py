"""Who is timed: for each provider, the ways it may legally run a case. Peers are imported inside the functions.

A provider's function returns variants to try, the fastest of which is the provider's row, or raises `Unavailable` with
the reason that becomes the row's note. Knows nothing of clocks or tables.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ffpa_hf import settings
from ffpa_hf.bench.cases import Case, Direction
from ffpa_hf.bench.truth import packed_intervals
from ffpa_hf.masks import RowIntervals

Call = Callable[[Tensor, Tensor, Tensor], Any]


class Unavailable(Exception):
    """The provider is not installed, or does not do this case; the text says which."""


@dataclass(frozen=True)
class Variant:
    """One way to run a case. prepare: makes what the call needs (masks, compiled code) and returns the call, which
    takes query, key and value as `[B, H, N, D]` and returns the output in that form."""

    note: str
    prepare: Callable[[], Call]


@dataclass(frozen=True)
class Provider:
    """layout: memory order of the tensors that this provider is given, whatever their shape says."""

    name: str
    variants: Callable[[Case, torch.device], list[Variant]]
    layout: Literal["BHND", "BNHD"] = "BHND"
    directions: tuple[Direction, ...] = ("fwd", "bwd", "fwd+bwd")


# --- torch ------------------------------------------------------------------------------------------------------------


def _window_masks(case: Case, device: torch.device) -> dict[str, Callable[[], Tensor | None]]:
    """The mask forms that F.sdpa takes for a case: none, or a window or documents as a bool or an additive tensor."""
    if case.window is None and not case.documents:
        return {"": lambda: None}
    window = case.window

    def keep() -> Tensor:
        if window is None:
            return packed_intervals(case, device).dense(case.kv_len)
        return RowIntervals.sliding_window(case.q_len, case.kv_len, window, device).dense(case.kv_len)

    def added() -> Tensor:
        mask = torch.zeros(1, 1, case.q_len, case.kv_len, dtype=getattr(torch, case.dtype), device=device)
        return mask.masked_fill_(~keep(), float("-inf"))

    return {"bool mask": keep, "additive mask": added}


def _sdpa_variants(case: Case, device: torch.device, kernels: dict[str, Any]) -> list[Variant]:
    """F.sdpa by every kernel given, every mask form, and with K/V grouped or expanded."""
    groups = {"": False} if case.group == 1 else {"expanded K/V": False, "enable_gqa": True}
    found = []
    for kernel_name, kernel in kernels.items():
        for mask_name, make_mask in _window_masks(case, device).items():
            for group_name, grouped in groups.items():
                words = ", ".join(word for word in (kernel_name, mask_name, group_name) if word)
                found.append(Variant(words, _sdpa_call(case, kernel, make_mask, grouped)))
    if case.documents:  # of one length, so that they can be a batch: what a loop over documents could reach at best
        for kernel_name, kernel in kernels.items():
            found.append(Variant(f"{kernel_name}, documents as a batch", _sdpa_documents(case, kernel)))
    return found


def _sdpa_documents(case: Case, kernel: Any) -> Callable[[], Call]:
    def apart(tensor: Tensor) -> Tensor:
        heads = tensor.shape[1]
        if heads != case.heads:
            tensor = tensor.repeat_interleave(case.heads // heads, 1)
        return tensor[0].unflatten(1, (case.documents, -1)).transpose(0, 1)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with _kernel(kernel):
            out = F.scaled_dot_product_attention(apart(query), apart(key), apart(value), is_causal=True)
        return out.transpose(0, 1).flatten(1, 2)[None]

    return lambda: call


def _sdpa_call(case: Case, kernel: Any, make_mask: Callable[[], Tensor | None], grouped: bool) -> Callable[[], Call]:
    def prepare() -> Call:
        mask = make_mask()
        causal = case.causal and mask is None
        expand = case.group > 1 and not grouped

        def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if expand:
                key, value = key.repeat_interleave(case.group, 1), value.repeat_interleave(case.group, 1)
            with _kernel(kernel):
                return F.scaled_dot_product_attention(
                    query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped
                )

        return call

    return prepare


def _kernel(kernel: Any) -> AbstractContextManager[Any]:
    if kernel is None:
        return contextlib.nullcontext()
    from torch.nn.attention import sdpa_kernel

    return sdpa_kernel([kernel])


def _sdpa(case: Case, device: torch.device) -> list[Variant]:
    kernels: dict[str, Any] = {"torch's choice": None}
    if device.type == "cuda":
        from torch.nn.attention import SDPBackend

        kernels |= {"cudnn": SDPBackend.CUDNN_ATTENTION, "mem-efficient": SDPBackend.EFFICIENT_ATTENTION}
        if case.window is None:
            kernels["flash"] = SDPBackend.FLASH_ATTENTION
    return _sdpa_variants(case, device, kernels)


def _sdpa_cudnn(case: Case, device: torch.device) -> list[Variant]:
    if device.type != "cuda":
        raise Unavailable("cuDNN needs a CUDA device")
    from torch.nn.attention import SDPBackend

    return _sdpa_variants(case, device, {"": SDPBackend.CUDNN_ATTENTION})


def _flex(case: Case, device: torch.device) -> list[Variant]:
    if device.type != "cuda":
        raise Unavailable("compiled flex_attention is timed on CUDA devices only")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    window, length = case.window, case.q_len // max(case.documents, 1)

    def allowed(batch: Any, head: Any, row: Any, column: Any) -> Any:
        near = row >= column
        if case.documents:
            return near & (row // length == column // length)
        return near if window is None else near & (row - column < window)

    def prepare() -> Call:
        torch._dynamo.reset()  # or the many shapes of a run reach the recompile limit and run uncompiled
        mask = create_block_mask(allowed, None, None, case.q_len, case.kv_len, device=device) if case.causal else None
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=case.group > 1)

    return [Variant("compiled", prepare)]


# --- peers ------------------------------------------------------------------------------------------------------------


def _import(module: str, distribution: str, case: Case) -> Any:
    if case.documents:
        raise Unavailable("not asked for packed documents")
    try:
        return importlib.import_module(module)
    except Exception as problem:  # a broken peer is a note in the table, not the end of the run
        raise Unavailable(f"{distribution} cannot be imported: {type(problem).__name__}: {problem}") from None


def _ffpa_attn_triton(case: Case, device: torch.device) -> list[Variant]:
    ffpa = _import("ffpa_attn", "ffpa-attn", case)
    if case.head_dim <= 256 and not settings_flag("FFPA_TRITON_ALLOW_SMALL_D"):
        raise Unavailable("ffpa-attn's Triton backend leaves head dims up to 256 to F.sdpa")
    if 8 <= case.q_len < 512 or case.kv_len < 512:
        raise Unavailable("ffpa-attn leaves lengths under 512 to F.sdpa")
    return [
        Variant(note, _ffpa_attn_call(ffpa, case, device, ffpa.TritonBackend(**options)))
        for note, options in (("", {}), ("enable_tma", {"enable_tma": True}))
    ]


def _ffpa_attn_cute(case: Case, device: torch.device) -> list[Variant]:
    ffpa = _import("ffpa_attn", "ffpa-attn", case)
    if case.head_dim <= 256 and not settings_flag("FFPA_CUTE_ALLOW_SMALL_D"):
        raise Unavailable("ffpa-attn's CuTe-DSL backend leaves head dims up to 256 to F.sdpa")
    return [Variant("", _ffpa_attn_call(ffpa, case, device, ffpa.CuTeDSLBackend()))]


def settings_flag(variable: str) -> bool:
    """Whether a switch of the peer's own is on; it reads the same variables with the opposite default."""
    import os

    return os.environ.get(variable, "0") not in ("", "0")


def _ffpa_attn_call(ffpa: Any, case: Case, device: torch.device, backend: Any) -> Callable[[], Call]:
    def prepare() -> Call:
        masks = _window_masks(case, device)
        mask = next(iter(masks.values()))()
        causal = case.causal and mask is None
        return lambda q, k, v: ffpa.ffpa_attn_func(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=case.group > 1, backend=backend
        )

    return prepare


def _flash_call(function: Callable[..., Any], case: Case, unbounded: Any) -> Callable[[], Call]:
    """Both FlashAttention generations: `[B, N, H, D]`, a window counted in keys beside the row's own."""
    if case.causal and case.q_len != case.kv_len:
        raise Unavailable("FlashAttention aligns causal masks to the bottom right")
    window = (unbounded, unbounded) if case.window is None else (case.window - 1, 0)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = function(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), causal=case.causal, window_size=window
        )
        out = result[0] if isinstance(result, tuple) else result
        return out.transpose(1, 2)

    return lambda: call


def _fa4(case: Case, device: torch.device) -> list[Variant]:
    module = _import("flash_attn.cute", "flash-attn-4", case)
    return [Variant("", _flash_call(module.flash_attn_func, case, None))]


def _fa3(case: Case, device: torch.device) -> list[Variant]:
    module = _import("fa3_fwd_interface", "fa3-fwd", case)
    return [Variant("", _flash_call(module.flash_attn_func, case, -1))]


def _fa3_fp8(case: Case, device: torch.device) -> list[Variant]:
    """Its FP8 kernel, which takes e4m3 tensors: the conversion, by one scale for each head, is timed with it."""
    module = _import("fa3_fwd_interface", "fa3-fwd", case)

    def attend(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Any:
        codes, scales = zip(*(_one_scale_per_head(x, case.kv_heads) for x in (query, key, value)), strict=True)
        names = ("q_descale", "k_descale", "v_descale")
        return module.flash_attn_func(*codes, **dict(zip(names, scales, strict=True)), **more)

    return [Variant("with its quantisation", _flash_call(attend, case, -1))]


def _one_scale_per_head(tensor: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """e4m3 codes of `[B, N, H, D]` and their scales, float32 `[B, kv_heads]`, one for the query heads of a key head."""
    batch, _, heads, _ = tensor.shape
    largest = tensor.abs().amax((1, 3)).float().view(batch, kv_heads, heads // kv_heads).amax(2)
    scale = (largest / 448).clamp(min=1e-12)
    inverse = (1 / scale).repeat_interleave(heads // kv_heads, 1)[:, None, :, None]
    return (tensor * inverse.to(tensor.dtype)).clamp(-448, 448).to(torch.float8_e4m3fn), scale


# --- ours -------------------------------------------------------------------------------------------------------------


def _ours(backend: str | None) -> Callable[[Case, torch.device], list[Variant]]:
    def variants(case: Case, device: torch.device) -> list[Variant]:
        from ffpa_hf.functional import explain, ffpa_attn_func

        # A kernel that was named is timed at every length, and before it is qualified: that is what a bench is for.
        forced = {} if backend is None else {"force_no_sdpa_fallback": True, "allow_unqualified": True}

        def arguments() -> dict[str, Any]:
            more: dict[str, Any] = {"enable_gqa": case.group > 1, "backend": backend}
            if case.window is not None:
                more["attn_mask"] = RowIntervals.sliding_window(case.q_len, case.kv_len, case.window, device)
            elif case.documents:
                more["attn_mask"] = packed_intervals(case, device)
            else:
                more["is_causal"] = case.causal
            return more

        def prepare() -> Call:
            more = arguments()

            def call(query: Tensor, key: Tensor, value: Tensor) -> Any:
                with settings.override(**forced) if forced else contextlib.nullcontext():
                    return ffpa_attn_func(query, key, value, **more)

            return call

        with settings.override(**forced):
            shape = (case.batch, case.heads, case.q_len, case.head_dim)
            keys = (case.batch, case.kv_heads, case.kv_len, case.head_dim)
            dtype = getattr(torch, case.dtype)
            # Expanded from one element: the planner reads shapes, so none of the data is needed.
            q, k = (torch.empty(1, dtype=dtype, device=device).expand(size) for size in (shape, keys))
            plan = explain(q, k, k, **arguments())
        if plan.error is not None:
            raise Unavailable(f"refused: {plan.error}")
        return [Variant(f"{plan.forward} / {plan.backward or 'no backward'}", prepare)]

    return variants


PROVIDERS: tuple[Provider, ...] = (
    Provider("sdpa", _sdpa),
    Provider("sdpa-cudnn", _sdpa_cudnn),
    Provider("flex", _flex),
    Provider("ffpa-attn/triton", _ffpa_attn_triton),
    Provider("ffpa-attn/cute", _ffpa_attn_cute),
    Provider("fa4", _fa4, layout="BNHD"),
    Provider("fa3", _fa3, layout="BNHD", directions=("fwd",)),
    Provider("fa3-fp8", _fa3_fp8, layout="BNHD", directions=("fwd",)),
    Provider("ffpa_hf/auto", _ours(None)),
    Provider("ffpa_hf/triton", _ours("triton")),
    Provider("ffpa_hf/cuda", _ours("cuda"), directions=("fwd",)),  # its backward is Triton's
    Provider("ffpa_hf/cuda-fp8", _ours("cuda-fp8"), directions=("fwd",)),  # quantisation is part of the call
)

#: Providers that need nothing beyond torch and this library; what runs when none are named, with the installed peers.
BUILT_IN = ("sdpa", "sdpa-cudnn", "flex", "ffpa_hf/auto", "ffpa_hf/triton")


def select(names: list[str] | None, device: torch.device) -> tuple[Provider, ...]:
    """The providers named, in table order; without names, all 16-bit ones that this machine can import.

    Raises ValueError for a name that is none.
    """
    known = {provider.name: provider for provider in PROVIDERS}
    for name in names or ():
        if name not in known:
            raise ValueError(f"providers={name!r} is unknown; use one of {', '.join(known)}.")
    if names:
        return tuple(provider for provider in PROVIDERS if provider.name in names)
    modules = {"ffpa-attn/triton": "ffpa_attn", "ffpa-attn/cute": "ffpa_attn"}
    modules |= {"fa4": "flash_attn.cute", "fa3": "fa3_fwd_interface", "ffpa_hf/cuda": "cuda.bindings"}
    # 8-bit providers answer another question: they are timed where they are named.
    chosen = [p for p in PROVIDERS if p.name in BUILT_IN or (p.name in modules and _found(modules[p.name]))]
    if device.type != "cuda":
        chosen = [provider for provider in chosen if provider.name in ("sdpa", "ffpa_hf/auto", "ffpa_hf/triton")]
    return tuple(chosen)


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
