"""The library's operators: schemas, fake kernels and autograd, in torch alone.

A backend's module is imported when its operator runs, so that a cold `torch.compile(fullgraph=True)` and an import
without Triton both work. Operator names contain "flash_attn", which selective checkpointing looks for. An eager call
that nobody watches (no mode, transform, trace, profiler or tensor subclass) skips the dispatcher and its microseconds.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack, is_legacy_batchedtensor
from torch.autograd import forward_ad

from ffpa_hf.backends import Backend, CUDABackend, CuTeDSLBackend, SDPABackend, TritonBackend
from ffpa_hf.kernels.common import AttentionInputs, aligned

_CONFIGS: dict[str, type] = {
    config.name: config for config in (SDPABackend, TritonBackend, CUDABackend, CuTeDSLBackend)
}

#: Canonical inputs of a call, in schema order: what `AttentionInputs` holds.
_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, Tensor? row_start, Tensor? row_end, "
    "Tensor? key_mask, Tensor? block_start, Tensor? block_end, Tensor? sinks, Tensor? rng_state, float scale, "
    "bool is_causal, float dropout_p, float? softcap"
)
_FIELDS = tuple(part.split()[-1] for part in _INPUTS.split(", "))
_TENSOR_FIELDS = _FIELDS[:12]
#: Fields that may have a gradient, in the order of the backward operator's `needs`.
_DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")

_library = torch.library.Library("ffpa", "DEF")
_library.define(
    f"flash_attn_forward({_INPUTS}, str forward, str backward) -> (Tensor out, Tensor lse, Tensor row_stats)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    f"flash_attn_backward(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, Tensor row_stats, {_INPUTS}, "
    "bool[] needs, str backward) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "join_streams(Tensor[] streams, Tensor?[] weights, float[] eps, Tensor?[] cos, Tensor?[] sin, bool across_heads, "
    "bool interleaved) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def encode(config: Backend) -> str:
    """A backend config as the string that operators carry: its name and the fields that differ from the defaults.

    A compiled graph never tunes: what it runs is the same at every replay.
    """
    text = config.name
    compiling = torch.compiler.is_compiling()
    for field, default in _DEFAULTS[config.name]:
        value = getattr(config, field)
        if value != default and not (compiling and field.startswith("autotune")):
            text += f" {field}={value}"
    return text


@functools.lru_cache(maxsize=256)
def decode(text: str) -> Backend:
    """The backend config that `encode` wrote."""
    name, *assignments = text.split(" ")
    defaults = dict(_DEFAULTS[name])
    values: dict[str, Any] = {}
    for assignment in assignments:
        field, value = assignment.split("=", 1)
        default = defaults[field]
        if isinstance(default, bool) or value in ("True", "False", "None"):
            values[field] = {"True": True, "False": False, "None": None}[value]
        else:
            values[field] = type(default)(value)
    return _CONFIGS[name](**values)


_DEFAULTS: dict[str, tuple[tuple[str, Any], ...]] = {
    name: tuple((field.name, field.default) for field in dataclasses.fields(kind)) for name, kind in _CONFIGS.items()
}


@functools.cache
def _kernel(name: str) -> Any:
    return importlib.import_module(f"ffpa_hf.kernels.{name}")


_encoded = functools.lru_cache(maxsize=256)(encode)


def _tensors(inputs: AttentionInputs) -> tuple[Tensor | None, ...]:
    """`_TENSOR_FIELDS` of `inputs`, spelled out: this is on the way of every call."""
    return (
        inputs.query, inputs.key, inputs.value, inputs.mask, inputs.bias, inputs.row_start, inputs.row_end,
        inputs.key_mask, inputs.block_start, inputs.block_end, inputs.sinks, inputs.rng_state,
    )  # fmt: skip


def _inputs(values: Sequence[Any]) -> AttentionInputs:
    return AttentionInputs(**dict(zip(_FIELDS, values, strict=True)))


def _canonical(inputs: AttentionInputs) -> AttentionInputs:
    """The same inputs with the promise kernels rely on: aligned rows, at most one copy each. Changes `inputs`."""
    inputs.query, inputs.key, inputs.value = aligned(inputs.query), aligned(inputs.key), aligned(inputs.value)
    if inputs.sinks is not None:
        inputs.sinks = inputs.sinks.contiguous()
    return inputs


def _run(inputs: AttentionInputs, config: Backend) -> tuple[Tensor, Tensor, Tensor]:
    query = inputs.query
    out, lse, row_stats = _kernel(config.kernels).forward(_canonical(inputs), config)
    return _as_promised(out, query), lse, row_stats


def _forward(*values: Any) -> tuple[Tensor, Tensor, Tensor]:
    *call, forward, _ = values
    return _run(_inputs(call), decode(forward))


def _as_promised(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` in the memory order that the fake kernel tells compilers: that of `torch.empty_like(like)`.

    Kernels write it so from the start; a copy is made only where the input itself had to be copied.
    """
    if tensor.stride() == like.stride():
        return tensor
    stride = torch.empty_like(like, device="meta").stride()
    return tensor if tensor.stride() == stride else torch.empty_like(like).copy_(tensor)


def _above_autograd() -> Any:
    """Lets a graph be recorded inside an operator, where the dispatcher has left autograd behind."""
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.AutogradFunctionality)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _gradients(grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, row_stats: Tensor, *values: Any):
    """Gradients of the differentiable inputs, None where none was asked for."""
    *call, needs, backward = values
    inputs = _canonical(_inputs(call))
    config = decode(backward)
    if config.name == "sdpa":
        with _above_autograd():
            grads = _kernel("sdpa").backward(inputs, grad_out, grad_lse, needs)
    else:
        grads = _kernel(config.name).backward(
            inputs, aligned(out), lse, row_stats, aligned(grad_out), grad_lse, tuple(needs), config
        )
    given = dict(zip(_FIELDS, call, strict=True))
    return tuple(
        None if grad is None else _as_promised(grad, given[name])
        for name, grad in zip(_DIFFERENTIABLE, grads, strict=True)
    )


def _backward(grad_out: Tensor, *values: Any) -> tuple[Tensor, ...]:
    """`_gradients` as an operator returns them: nothing stays None."""
    return tuple(grad_out.new_empty(0) if grad is None else grad for grad in _gradients(grad_out, *values))


def _join_streams(*values: Any) -> Tensor:
    return _kernel("triton.qkv_kernels").join_streams(*values)


for _key in ("CUDA", "CPU"):
    _library.impl("join_streams", _join_streams, _key)
    _library.impl("flash_attn_forward", _forward, _key)
    _library.impl("flash_attn_backward", _backward, _key)


@torch.library.register_fake("ffpa::flash_attn_forward", lib=_library)
def _forward_fake(query: Tensor, key: Tensor, value: Tensor, mask: Any, bias: Any, *_: Any):
    rows = query.shape[:-1]
    stats = query.new_empty((2, *rows) if bias is not None else (0,), dtype=torch.float32)
    return torch.empty_like(query), query.new_empty(rows, dtype=torch.float32), stats


@torch.library.register_fake("ffpa::flash_attn_backward", lib=_library)
def _backward_fake(grad_out: Tensor, grad_lse: Any, out: Tensor, lse: Tensor, row_stats: Tensor, *values: Any):
    *call, needs, _ = values
    fields = dict(zip(_FIELDS, call, strict=True))
    return tuple(
        torch.empty_like(fields[name]) if needed else fields["query"].new_empty(0)
        for name, needed in zip(_DIFFERENTIABLE, needs, strict=True)
    )


@torch.library.register_fake("ffpa::join_streams", lib=_library)
def _join_streams_fake(streams: list[Tensor], *_: Any) -> Tensor:
    first = streams[0]
    return first.new_empty(first.shape[0], sum(stream.shape[1] for stream in streams), *first.shape[2:])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *call, _, backward = inputs
    _keep(ctx, output, call[: len(_TENSOR_FIELDS)], call[len(_TENSOR_FIELDS) :], backward)
    ctx.mark_non_differentiable(output[2])


def _keep(ctx: Any, output: tuple[Tensor, Tensor, Tensor], tensors: Sequence[Any], scalars: Any, backward: str) -> None:
    ctx.save_for_backward(*output, *tensors)
    ctx.scalars = tuple(scalars)
    ctx.backward_config = backward
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Any) -> tuple[Any, ...]:
    by_name = dict(zip(_FIELDS, ctx.needs_input_grad, strict=False))
    grads = _asked_gradients(ctx, grad_out, grad_lse, [by_name[name] for name in _DIFFERENTIABLE])
    named = dict(zip(_DIFFERENTIABLE, grads, strict=True))
    return (*(named.get(name) for name in _FIELDS), None, None)


def _asked_gradients(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, needs: list[bool]) -> tuple[Any, ...]:
    """Gradients of the differentiable inputs, None where not needed."""
    if (grad_out is None and grad_lse is None) or not any(needs):
        return (None,) * len(needs)
    if not ctx.backward_config:
        raise NotImplementedError("This forward was planned without a backward; ask for one with backward_backend=.")
    out, lse, row_stats, *tensors = ctx.saved_tensors
    if any(grad is not None and is_legacy_batchedtensor(grad) for grad in (grad_out, grad_lse)):
        raise NotImplementedError(
            "ffpa_hf's kernels take one gradient at a time: is_grads_batched=True and vectorize=True need "
            "backend='sdpa'."
        )
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    # With create_graph the operator has to be recorded: it raises when a second derivative is asked for.
    direct = not torch.is_grad_enabled() and _unwatched((grad_out, grad_lse, out, lse, row_stats, *tensors))
    run = _gradients if direct else torch.ops.ffpa.flash_attn_backward
    found = run(grad_out, grad_lse, out, lse, row_stats, *tensors, *ctx.scalars, needs, ctx.backward_config)
    return tuple(grad if needed else None for grad, needed in zip(found, needs, strict=True))


def _no_second_derivative(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    raise NotImplementedError(
        "ffpa_hf has no second derivative of attention. Use backend='sdpa' with torch's math backend "
        "(torch.nn.attention.sdpa_kernel) where a double backward is needed."
    )


torch.library.register_autograd(
    "ffpa::flash_attn_forward", _differentiate, setup_context=_save_for_backward, lib=_library
)
torch.library.register_autograd("ffpa::flash_attn_backward", _no_second_derivative, lib=_library)


def _refuse_forward_mode(tensors: Sequence[Any]) -> None:
    """Raise where a tangent would be lost: the dispatcher drops it for operators without a forward-mode formula."""
    if forward_ad._current_level < 0:
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(
            "ffpa_hf's kernels have no forward-mode derivative (torch.func.jvp, forward_ad). Use backend='sdpa' with "
            "torch's math backend (torch.nn.attention.sdpa_kernel)."
        )


def _refuse_functional_gradients() -> None:
    """torch.func's reverse mode wants an operator's autograd in a form that these have not."""
    if not torch._C._are_functorch_transforms_active():
        return
    if any(level.key() == TransformType.Grad for level in get_interpreter_stack() or ()):
        raise NotImplementedError(
            "ffpa_hf's kernels cannot be differentiated by torch.func (grad, vjp, jacrev); use backend='sdpa', or "
            "torch.autograd.grad on tensors that require gradients."
        )


_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})


def _unwatched(tensors: Sequence[Tensor | None]) -> bool:
    """Whether an operator call would only pass through the dispatcher: an eager one on plain tensors, with no mode,
    transform, trace or profiler that would have to see the operator, and no value that the dispatcher has to write out
    first (a kernel reads memory, where a lazily negated tensor has the other sign and a lazy zero nothing)."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
        and not torch.autograd.profiler._is_profiler_enabled
        and _PLAIN.issuperset(map(type, tensors))
        and not any(t is not None and (t.is_neg() or t._is_zerotensor()) for t in tensors)
    )


class flash_attn_forward(torch.autograd.Function):  # noqa: N801 - graph nodes are named as the operator's
    """The operator and its autograd without the dispatcher around them; of tensors, autograd sees those that may have
    a gradient, and of results those that pass one on: each that it looks at takes its time."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Any, ...], *_: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out, lse) of the operator. call: the inputs, their tensors, the forward and the backward's name; last, the
        `_DIFFERENTIABLE` tensors, without those at the end that the call has not."""
        inputs, tensors, forward, backward = call
        output = _run(inputs, forward)
        _keep(ctx, output, tensors, (inputs.scale, inputs.is_causal, inputs.dropout_p, inputs.softcap), backward)
        return output[:2]

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        """A gradient for each argument."""
        seen = list(ctx.needs_input_grad[1:])
        needs = seen + [False] * (len(_DIFFERENTIABLE) - len(seen))
        return None, *_asked_gradients(ctx, grad_out, grad_lse, needs)[: len(seen)]


#: `flash_attn_forward.apply` without its search for wrappers that a functorch transform left behind.
_apply = super(torch.autograd.Function, flash_attn_forward).apply


def flash_attn(
    inputs: AttentionInputs, forward: Backend, backward: Backend | None, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """Run the forward operator; (out, lse). Without a gradient to keep, autograd's wrapper is left out."""
    tensors = _tensors(inputs)
    direct = False
    if not torch.compiler.is_compiling():
        _refuse_forward_mode(tensors)
        if needs_grad:
            _refuse_functional_gradients()
        direct = _unwatched(tensors)
    if direct:
        if not needs_grad:
            return _run(inputs, forward)[:2]
        written = "" if backward is None else _encoded(backward)
        seen: tuple[Tensor | None, ...] = inputs.query, inputs.key, inputs.value
        if inputs.bias is not None or inputs.sinks is not None:
            seen = *seen, inputs.bias, inputs.sinks
        return _apply((inputs, tensors, forward, written), *seen)
    scalars = (inputs.scale, inputs.is_causal, inputs.dropout_p, inputs.softcap)
    # Not from the memory of `_encoded`: torch.compile warns of caches.
    arguments = (*tensors, *scalars, encode(forward), "" if backward is None else encode(backward))
    run = torch.ops.ffpa.flash_attn_forward.default
    if needs_grad or torch.compiler.is_compiling():
        out, lse, _ = run(*arguments)
    else:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, _ = run(*arguments)
    return out, lse


def join_streams(
    streams: list[Tensor],
    weights: list[Tensor | None],
    eps: list[float],
    cos: list[Tensor | None],
    sin: list[Tensor | None],
    across_heads: bool,
    interleaved: bool,
) -> Tensor:
    """Run the operator that `kernels.reference.join_streams` defines; it has no gradient."""
    values = streams, weights, eps, cos, sin, across_heads, interleaved
    if torch.compiler.is_compiling():
        return torch.ops.ffpa.join_streams.default(*values)
    if _unwatched((*streams, *weights, *cos, *sin)):
        return _join_streams(*values)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.ffpa.join_streams.default(*values)
