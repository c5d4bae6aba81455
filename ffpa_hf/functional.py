"""The public functions: check the arguments, plan, call. No kernel and no rule lives here.

`attend` is the door that processors and patches use: the same call, with preferences instead of explicit backends and
with the module it belongs to, for `ffpa_hf.report()`.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ffpa_hf import ops, settings
from ffpa_hf.backends import Backend
from ffpa_hf.call import AttentionCall, device_facts
from ffpa_hf.dispatch import FallbackWarning, Plan, Route, decide, give_up, plan_state, recall, remember
from ffpa_hf.kernels.building import is_build_failure
from ffpa_hf.kernels.common import AttentionInputs
from ffpa_hf.kernels.sdpa import run as sdpa
from ffpa_hf.masks import CanonicalMask, RowIntervals, canonical_mask, require_window
from ffpa_hf.report import record

if TYPE_CHECKING:
    from torch.nn import Module


def ffpa_attn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: Backend | str | None = None,
    forward_backend: Backend | str | None = None,
    backward_backend: Backend | str | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot product attention, with the arguments and the meaning of `F.scaled_dot_product_attention` and more.

    Args:
        query: `[B, Hq, Nq, D]`, any strides; fp16 or bf16 for the kernels, any dtype of F.sdpa otherwise.
        key, value: `[B, Hkv, Nkv, D]`, `[B, Hkv, Nkv, Dv]`. Batch and heads broadcast where they are 1; other unequal
            heads need `enable_gqa=True` and Hq a multiple of Hkv.
        attn_mask: None; bool (True keeps) or floating (added to the scores), broadcastable to `[B, Hq, Nq, Nkv]`; a
            `RowIntervals`; or one of torch's CausalBias objects. A floating mask has a gradient and is never cast down:
            it has query's dtype or float32.
        dropout_p: probability of dropping an attention weight, 0 <= p <= 1.
        is_causal: row i sees keys 0..i (top-left aligned, whatever the lengths). Excludes `attn_mask`.
        scale: factor of the scores; None means 1 / sqrt(D), 0.0 means zero.
        enable_gqa: query heads share key/value heads in equal groups.
        backend: None (or "auto") lets the planner choose; a name or a config is an explicit request, both directions.
        forward_backend, backward_backend: explicit requests for one direction; they win over `backend`.
        softcap: scores become `softcap * tanh(scores / softcap)` before the mask; > 0 or None.
        sinks: `[Hq]`, one extra logit per head that takes part in the softmax and has no value.
        return_lse: also return the log-sum-exp.

    Returns:
        out `[B, Hq, Nq, Dv]` in query's dtype and memory order; with `return_lse` also lse `[B, Hq, Nq]`, float32,
        natural logarithm, sink included, differentiable. A row that sees no key gives zeros, lse -inf, zero gradients.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument is wrong, or the requested backend cannot honour it; the
            message names the argument, what was given and a backend that would take it.
        RuntimeError: the requested kernel is not qualified on this GPU.
    """
    return attend(
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        softcap=softcap,
        sinks=sinks,
        return_lse=return_lse,
        route=_explicit(backend, forward_backend, backward_backend),
    )


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: Backend | str | None = None,
    forward_backend: Backend | str | None = None,
    backward_backend: Backend | str | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Plan:
    """What `ffpa_attn_func` would do with the same arguments, without doing it. `str(plan)` is a readable paragraph.

    A request that no rule can satisfy comes back as a plan whose `error` is what the call would raise; arguments that
    make no sense at all raise here as they would there.
    """
    prepared = _prepare(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap, sinks, return_lse
    )
    return decide(prepared.facts, _explicit(backend, forward_backend, backward_backend))


def ffpa_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool | None = None,
    return_lse: bool = False,
    backend: Backend | str | None = None,
    forward_backend: Backend | str | None = None,
    backward_backend: Backend | str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over packed sequences of different lengths, with the arguments of flash_attn's function of that name.

    Args:
        q, k, v: packed `[Tq, Hq, D]`, `[Tk, Hkv, D]`, `[Tk, Hkv, Dv]`.
        cu_seqlens_q, cu_seqlens_k: int32 `[sequences + 1]` on the tensors' device, cumulative lengths from 0.
        max_seqlen_q, max_seqlen_k: longest lengths; accepted for compatibility, nothing here depends on them.
        causal, window_size: bottom-right aligned within each sequence; (left, right), -1 is unbounded.
        enable_gqa: None infers it from the heads.

    Returns:
        `[Tq, Hq, Dv]`; with `return_lse` also lse `[Hq, Tq]`, float32, natural logarithm.

    Each sequence is a run of keys for its rows, so the call is attention with `RowIntervals` over the packed rows.
    """
    del max_seqlen_q, max_seqlen_k
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 3:
            given = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name} must be a packed [T, H, D] tensor, not {given}.")
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(offsets, Tensor) or offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
            kind = f"{offsets.dtype} {tuple(offsets.shape)}" if isinstance(offsets, Tensor) else type(offsets).__name__
            raise TypeError(f"{name} must be a one-dimensional int32 tensor of cumulative lengths from 0, not {kind}.")
        if offsets.shape[0] < 1 or offsets.device != q.device:
            raise ValueError(f"{name} must hold at least one offset and be on {q.device}.")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q holds {cu_seqlens_q.shape[0] - 1} sequences and cu_seqlens_k {cu_seqlens_k.shape[0] - 1}; "
            "each sequence needs an entry in both."
        )
    require_window("window_size", window_size)
    if type(causal) is not bool:
        raise TypeError(f"causal must be True or False, not {causal!r:.60} ({type(causal).__name__}).")
    if cu_seqlens_q.shape[0] == 1:
        intervals = RowIntervals.full(q.shape[0], 0, q.device)
    else:
        intervals = RowIntervals.packed(cu_seqlens_q, cu_seqlens_k, q.shape[0], causal=causal, window=window_size)
    result = attend(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=intervals,
        dropout_p=dropout_p,
        scale=softmax_scale,
        enable_gqa=q.shape[1] != k.shape[1] if enable_gqa is None else enable_gqa,
        return_lse=return_lse,
        route=_explicit(backend, forward_backend, backward_backend),
        varlen=True,
    )
    if return_lse:
        out, lse = result
        return out[0].transpose(0, 1), lse[0]
    return result[0].transpose(0, 1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    route: Route | None = None,
    site: Module | None = None,
    varlen: bool = False,
) -> Any:
    """`ffpa_attn_func` with a `Route` (preferences unless strict) and the module the call is counted under.

    varlen: `attn_mask` are the intervals of packed sequences, which SDPA then works off in chunks, not as a dense mask.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # sizes are symbols, and nothing runs yet
        planned = _planned(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap, sinks, return_lse, varlen,
            route,
        )  # fmt: skip
        out, lse = _run(*planned)
        return (out, lse) if return_lse else out
    name = None
    if attn_mask is None and sinks is None:
        name = _name_of(query, key, value, dropout_p, is_causal, scale, enable_gqa, softcap, return_lse, varlen, route)
    made: Plan | None = None if name is None else recall(name)
    state = plan_state()  # before the plan is made: what changes meanwhile makes it stale
    if made is not None:  # a call like an earlier one, whose tensors went to its kernel as they were
        inputs = AttentionInputs(query, key, value, _scale(scale, query.shape[3]), is_causal)
        inputs.dropout_p, inputs.softcap = dropout_p, softcap
        prepared = _Prepared((), inputs, None, None)
    else:
        prepared, made = _planned(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap, sinks, return_lse, varlen,
            route,
        )  # fmt: skip
        as_they_were = prepared.inputs is not None and (
            prepared.inputs.query is query and prepared.inputs.key is key and prepared.inputs.value is value
        )
        if name is not None and as_they_were and made.fallback is None:
            remember(name, made, state)
    if settings.current().log == "debug":
        print(made, file=sys.stderr)
    if made.fallback is not None:
        _warn_once(*made.fallback)
    try:
        out, lse = _run(prepared, made)
    except Exception as error:
        if made.forward == "sdpa" or not is_build_failure(error):
            raise
        _leave_out(made, route, error)
        again = {
            "attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale,
            "enable_gqa": enable_gqa, "softcap": softcap, "sinks": sinks, "return_lse": return_lse,
        }  # fmt: skip
        return attend(query, key, value, **again, route=route, site=site, varlen=varlen)
    record(made, site)
    return (out, lse) if return_lse else out


def _leave_out(made: Plan, route: Route | None, error: Exception) -> None:
    """A kernel could not be built: an explicit request raises, otherwise it is left out from now on."""
    problem = f"{type(error).__name__}: {error}"
    asked = route is not None and route.strict and (route.forward_backend or route.backend) is not None
    if asked:
        raise RuntimeError(
            f"backend={made.forward!r} could not build its kernel on this machine; backend='sdpa' needs none. {problem}"
        ) from error
    if not settings.silenced():
        warnings.warn(
            f"ffpa_hf: the {made.forward} backend could not build a kernel for head dim {made.call.head_dim} and is "
            f"left out there in this process. {problem}",
            RuntimeWarning,
            stacklevel=4,
        )
    give_up(made, f"it could not build a kernel for this head dim ({problem.splitlines()[0][:200]})")


_NUMBERS = frozenset({float, int, type(None)})


def _name_of(
    query: Any, key: Any, value: Any, dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool,
    softcap: float | None, return_lse: bool, varlen: bool, route: Route | None,
) -> tuple[Any, ...] | None:  # fmt: skip
    """All that decides what becomes of a call without mask and sinks, save its tensors' values and places; None for
    calls that are looked at anew each time."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return None
    if type(is_causal) is not bool or type(enable_gqa) is not bool or type(return_lse) is not bool:
        return None
    if not _NUMBERS.issuperset(map(type, (dropout_p, scale, softcap))):
        return None
    device = query.device
    if device.type == "meta" or torch.is_autocast_enabled(device.type):
        return None
    if not _is_dense(query) or not _is_dense(key) or not _is_dense(value):
        return None
    needs_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    return (
        query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype, device, key.device, value.device,
        is_causal, dropout_p, scale, enable_gqa, softcap, return_lse, varlen, route, needs_grad,
    )  # fmt: skip


def _planned(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, is_causal: bool, scale: float | None,
    enable_gqa: bool, softcap: float | None, sinks: Tensor | None, return_lse: bool, varlen: bool, route: Route | None,
) -> tuple[_Prepared, Plan]:  # fmt: skip
    """Checked arguments and their plan; raises what the plan cannot do."""
    prepared = _prepare(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap, sinks, return_lse, varlen
    )
    made = decide(prepared.facts, route)
    if made.error is not None:
        raise type(made.error)(*made.error.args)
    return prepared, made


class _Prepared:
    """Checked arguments of one call: the fields of its `AttentionCall` in order, and its canonical tensors or, for many
    dims, the original ones."""

    __slots__ = ("facts", "inputs", "intervals", "original")

    def __init__(
        self, facts: tuple[Any, ...], inputs: AttentionInputs | None, intervals: RowIntervals | None, original: Any
    ) -> None:
        self.facts, self.inputs, self.intervals, self.original = facts, inputs, intervals, original


def _prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    softcap: float | None,
    sinks: Tensor | None,
    return_lse: bool,
    varlen: bool = False,
) -> _Prepared:
    query, key, value = _check_tensors(query, key, value)
    if not torch.compiler.is_compiling():
        _check_options(dropout_p, is_causal, scale, enable_gqa, softcap, return_lse)
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p={dropout_p} is not allowed; use 0 <= dropout_p <= 1.")
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise ValueError(f"softcap={softcap} is not allowed; use a finite number above 0, or None for no cap.")
    if scale is not None and not -math.inf < scale < math.inf:
        raise ValueError(f"scale={scale} is not allowed; use a finite number, or None for 1 / sqrt(head_dim).")
    rank = query.dim()
    if rank in (2, 3):
        lead = (None,) * (4 - rank)  # three dimensions are heads first, as F.sdpa counts them
        query, key, value = (t[lead] for t in (query, key, value))
    elif rank != 4:
        return _prepare_many_dims(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap, sinks, return_lse
        )
    query, key, value = _broadcast(query, key, value, enable_gqa)
    batch, q_heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1], key.shape[2]
    device = query.device
    mask = canonical_mask(attn_mask, is_causal, batch=batch, heads=q_heads, q_len=q_len, kv_len=kv_len, device=device)
    bias = mask.bias
    _check_mask_dtype(mask, query.dtype)
    sinks = _check_sinks(sinks, q_heads, device)
    needs_grad = torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (bias is not None and bias.requires_grad)
        or (sinks is not None and sinks.requires_grad)
    )
    intervals = mask.intervals
    facts = (
        batch, q_heads, kv_heads, q_len, kv_len, head_dim, value.shape[-1], query.dtype, device.type,
        *device_facts(device), rank, mask.kind, bias is not None, None if bias is None else bias.dtype,
        needs_grad and bias is not None and bias.requires_grad, mask.is_causal, dropout_p, softcap, sinks is not None,
        return_lse, needs_grad, varlen,
    )  # fmt: skip
    inputs = AttentionInputs(
        query=query,
        key=key,
        value=value,
        scale=_scale(scale, head_dim),
        is_causal=mask.is_causal,
        mask=mask.mask,
        bias=bias,
        row_start=None if intervals is None else intervals.start,
        row_end=None if intervals is None else intervals.end,
        key_mask=None if intervals is None else intervals.key_mask,
        sinks=sinks,
        dropout_p=dropout_p,
        softcap=softcap,
    )
    return _Prepared(facts, inputs, intervals, None)


def _prepare_many_dims(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    softcap: float | None,
    sinks: Tensor | None,
    return_lse: bool,
) -> _Prepared:
    """Queries of five dimensions and more: F.sdpa takes them as they are; what it cannot express is refused."""
    beyond = {"softcap": softcap, "sinks": sinks, "return_lse": return_lse or None}
    given = [name for name, argument in beyond.items() if argument is not None]
    if isinstance(attn_mask, RowIntervals):
        given.append("attn_mask (RowIntervals)")
    elif attn_mask is not None and not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be None or a tensor, not {type(attn_mask).__name__}.")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal=True were both given; give one.")
    if given:
        raise NotImplementedError(
            f"{', '.join(given)} with a query of {query.dim()} dimensions; reshape to [B, H, N, D] first."
        )
    call = AttentionCall(
        batch=math.prod(query.shape[:-3]),
        q_heads=query.shape[-3],
        kv_heads=key.shape[-3],
        q_len=query.shape[-2],
        kv_len=key.shape[-2],
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        dtype=query.dtype,
        device_type=query.device.type,
        rank=query.dim(),
        mask_kind="none" if attn_mask is None else "bool" if attn_mask.dtype == torch.bool else "additive",
        is_causal=is_causal,
        dropout_p=dropout_p,
    )
    keywords: dict[str, Any] = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if enable_gqa:
        keywords["enable_gqa"] = True
    return _Prepared(call.facts, None, None, (query, key, value, keywords))


def _run(prepared: _Prepared, made: Plan) -> tuple[Tensor, Tensor | None]:
    inputs, call = prepared.inputs, made.call
    if inputs is None:
        query, key, value, keywords = prepared.original
        with _without_autocast(query.device.type):
            return F.scaled_dot_product_attention(query, key, value, **keywords), None
    if made.forward == "sdpa":
        with _without_autocast(call.device_type):
            out, lse = sdpa.forward(inputs, composite=made.composite)
        return _original_rank(out, lse, call.rank)
    if call.dropout_p > 0:
        inputs.rng_state = torch.randint(0, 2**62, (2,), dtype=torch.int64, device=inputs.query.device)
    if call.needs_grad and prepared.intervals is not None:
        inputs.block_start, inputs.block_end = prepared.intervals.query_ranges(call.kv_len)
    if inputs.sinks is not None:
        inputs.sinks = inputs.sinks.to(torch.float32).contiguous()
    return ops.flash_attn(inputs, made.forward_config, made.backward_config, call.needs_grad)


def _original_rank(out: Tensor, lse: Tensor | None, rank: int) -> tuple[Tensor, Tensor | None]:
    if rank == 3:
        return out[0], None if lse is None else lse[0]
    if rank == 2:
        return out[0, 0], None if lse is None else lse[0, 0]
    return out, lse


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_tensors(query: Any, key: Any, value: Any) -> tuple[Tensor, Tensor, Tensor]:
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        given = {"query": query, "key": key, "value": value}
        name, other = next((name, other) for name, other in given.items() if not isinstance(other, Tensor))
        raise TypeError(f"{name} must be a tensor, not {type(other).__name__}.")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not _is_dense(tensor):
            _refuse_layout(name, tensor)
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        query, key, value = _one_rank(query, key, value)
    if query.device != key.device or query.device != value.device:
        raise ValueError(
            f"query is on {query.device}, key on {key.device}, value on {value.device}; one device is needed."
        )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query is {query.shape[-1]} wide and key {key.shape[-1]}; they must agree.")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"key has {key.shape[-2]} positions and value {value.shape[-2]}; they must agree.")
    device_type = query.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        target = torch.get_autocast_dtype(device_type)
        query, key, value = (_autocast(tensor, target) for tensor in (query, key, value))
    if query.dtype != key.dtype or query.dtype != value.dtype:
        raise TypeError(
            f"query is {query.dtype}, key {key.dtype}, value {value.dtype}; one dtype is needed "
            f"(cast them, or run under torch.autocast)."
        )
    if not query.dtype.is_floating_point:
        raise TypeError(f"query must be floating point, not {query.dtype}.")
    if query.dtype.itemsize == 1:
        raise TypeError(
            f"query is {query.dtype}: 8-bit inputs are not taken. Give float16 or bfloat16; "
            "CUDABackend(enable_fp8=True) quantises them itself."
        )
    return query, key, value


def _check_options(dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any, softcap: Any, return_lse: Any) -> None:
    """Types, by name: a tensor in the place of a number would be read on the host, and its gradient lost."""
    for name, switch in (("is_causal", is_causal), ("enable_gqa", enable_gqa), ("return_lse", return_lse)):
        if type(switch) is not bool:
            raise TypeError(f"{name} must be True or False, not {switch!r:.60} ({type(switch).__name__}).")
    for name, number in (("dropout_p", dropout_p), ("scale", scale), ("softcap", softcap)):
        if number is None and name != "dropout_p":
            continue
        if not isinstance(number, Real) or isinstance(number, bool):
            optional = "" if name == "dropout_p" else " or None"
            raise TypeError(f"{name} must be a number{optional}, not {number!r:.60} ({type(number).__name__}).")


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def _refuse_layout(name: str, tensor: Tensor) -> None:
    if tensor.is_nested:
        raise TypeError(
            f"{name} is a nested tensor; pack its sequences and call ffpa_attn_varlen_func with their offsets."
        )
    raise TypeError(f"{name} has layout {tensor.layout}; a dense (strided) tensor is needed.")


def _one_rank(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Missing leading dimensions broadcast, as in F.sdpa."""
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise ValueError(
            f"query, key and value need two dimensions or more; they have shapes "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
        )
    rank = max(query.dim(), key.dim(), value.dim())
    return tuple(
        tensor if tensor.dim() == rank else tensor[(None,) * (rank - tensor.dim())] for tensor in (query, key, value)
    )


def _autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast as autocast casts the inputs of F.sdpa: floating tensors other than float64."""
    return tensor.to(dtype) if tensor.dtype.is_floating_point and tensor.dtype != torch.float64 else tensor


def _broadcast(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """One batch, and one number of key and value heads that divides query's; views, save where both are grouped."""
    (q_batch, q_heads), (k_batch, k_heads), (v_batch, v_heads) = query.shape[:2], key.shape[:2], value.shape[:2]
    if q_batch == k_batch == v_batch and k_heads == v_heads:  # the usual call, without the questions below
        if q_heads == k_heads or (enable_gqa and k_heads and q_heads % k_heads == 0):
            return query, key, value
    batch = max(q_batch, k_batch, v_batch)
    if query.shape[0] == 0 or key.shape[0] == 0 or value.shape[0] == 0:
        batch = 0
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.shape[0] not in (1, batch):
            raise ValueError(
                f"{name} has batch {tensor.shape[0]} beside {batch}; batches must agree or be 1 (query "
                f"{tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)})."
            )
    kv_heads = max(k_heads, v_heads)

    def refuse_heads(why: str) -> ValueError:
        return ValueError(f"query has {q_heads} heads, key {k_heads}, value {v_heads}; {why}")

    if k_heads != v_heads:
        if min(k_heads, v_heads) != 1 and not enable_gqa:
            raise refuse_heads("key and value heads must agree.")
        kv_heads = math.lcm(k_heads, v_heads)
        key = _more_heads(key, kv_heads)
        value = _more_heads(value, kv_heads)
    if q_heads != kv_heads:
        if q_heads == 1 and kv_heads > 1 and not enable_gqa:
            query = query.expand(-1, kv_heads, -1, -1)
        elif kv_heads != 1 and not enable_gqa:
            raise refuse_heads("unequal heads need enable_gqa=True (or one head to broadcast).")
        elif kv_heads == 0 or q_heads % kv_heads:
            raise refuse_heads("with enable_gqa query's heads must be a multiple of key's.")
    if query.shape[0] != batch:
        query = query.expand(batch, -1, -1, -1)
    if key.shape[0] != batch:
        key = key.expand(batch, -1, -1, -1)
    if value.shape[0] != batch:
        value = value.expand(batch, -1, -1, -1)
    return query, key, value


def _more_heads(tensor: Tensor, heads: int) -> Tensor:
    if tensor.shape[1] == heads:
        return tensor
    if tensor.shape[1] == 1:
        return tensor.expand(-1, heads, -1, -1)
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def _check_mask_dtype(mask: CanonicalMask, dtype: torch.dtype) -> None:
    bias = mask.bias
    if bias is None or bias.dtype == dtype or bias.dtype == torch.float32:
        return
    allowed = f"{dtype} or torch.float32" if dtype != torch.float32 else "torch.float32"
    raise TypeError(
        f"attn_mask is {bias.dtype} beside {dtype} inputs; an additive mask may be {allowed} (it is never cast down), "
        f"a boolean one torch.bool."
    )


def _check_sinks(sinks: Tensor | None, heads: int, device: torch.device) -> Tensor | None:
    if sinks is None:
        return None
    if not isinstance(sinks, Tensor) or not sinks.dtype.is_floating_point:
        given = sinks.dtype if isinstance(sinks, Tensor) else type(sinks).__name__
        raise TypeError(f"sinks must be a floating tensor of shape [Hq], not {given}.")
    if tuple(sinks.shape) != (heads,):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}; ({heads},) is needed, one logit per query head.")
    if sinks.device != device:
        raise ValueError(f"sinks is on {sinks.device}, query on {device}; one device is needed.")
    return sinks


def _scale(scale: float | None, head_dim: int) -> float:
    return 1.0 / math.sqrt(max(head_dim, 1)) if scale is None else float(scale)


def _explicit(backend: Any, forward_backend: Any, backward_backend: Any) -> Route:
    if backend is None and forward_backend is None and backward_backend is None:
        return _AUTO
    wishes = (backend, forward_backend, backward_backend)
    if torch.compiler.is_compiling() or not _NAMES.issuperset(map(type, wishes)):
        return Route(*wishes, strict=True)
    return _named(*wishes)


_AUTO = Route()
_NAMES = frozenset({str, type(None)})


@functools.lru_cache(maxsize=64)
def _named(backend: str | None, forward_backend: str | None, backward_backend: str | None) -> Route:
    return Route(backend, forward_backend, backward_backend, strict=True)


class _NoContext:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: Any) -> None:
        return None


def _without_autocast(device_type: str) -> Any:
    """The inputs were cast already; autocast would cast the mask too, and down."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return _NoContext()


_warned: set[tuple[str, str]] = set()


def _warn_once(backend: str, rule: str, reason: str) -> None:
    if (backend, rule) in _warned or settings.silenced():
        return
    _warned.add((backend, rule))
    warnings.warn(
        f"ffpa_hf: {reason}; SDPA runs instead of {backend}. "
        "(Said once; where no backend is named, the planner chooses and says nothing.)",
        FallbackWarning,
        stacklevel=4,
    )
