"""The library's operators: schemas, fake kernels and autograd, in torch alone.

A backend's module is imported when its operator runs, so that a cold `torch.compile(fullgraph=True)` and an import
without Triton both work. Operator names contain "flash_attn", which selective checkpointing looks for.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import torch
from torch import Tensor
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


def _kernel(name: str) -> Any:
    return importlib.import_module(f"ffpa_hf.kernels.{name}")


def _inputs(values: tuple[Any, ...]) -> AttentionInputs:
    """Canonical inputs with the promise kernels rely on: aligned rows, at most one copy each."""
    fields = dict(zip(_FIELDS, values, strict=True))
    for name in ("query", "key", "value"):
        fields[name] = aligned(fields[name])
    if fields["sinks"] is not None:
        fields["sinks"] = fields["sinks"].contiguous()
    return AttentionInputs(**fields)


def _forward(*values: Any) -> tuple[Tensor, Tensor, Tensor]:
    *call, forward, _ = values
    config = decode(forward)
    out, lse, row_stats = _kernel(config.name).forward(_inputs(tuple(call)), config)
    return _as_promised(out, call[0]), lse, row_stats


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


def _backward(grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, row_stats: Tensor, *values: Any):
    *call, needs, backward = values
    inputs = _inputs(tuple(call))
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
        inputs.query.new_empty(0) if grad is None else _as_promised(grad, given[name])
        for name, grad in zip(_DIFFERENTIABLE, grads, strict=True)
    )


for _key in ("CUDA", "CPU"):
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


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *call, _, backward = inputs
    tensors = call[: len(_TENSOR_FIELDS)]
    ctx.save_for_backward(*output, *tensors)
    ctx.scalars = tuple(call[len(_TENSOR_FIELDS) :])
    ctx.backward_config = backward
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Any) -> tuple[Any, ...]:
    out, lse, row_stats, *tensors = ctx.saved_tensors
    by_name = dict(zip(_FIELDS, ctx.needs_input_grad, strict=False))
    needs = [by_name[name] for name in _DIFFERENTIABLE]
    nothing = (None,) * (len(_FIELDS) + 2)
    if (grad_out is None and grad_lse is None) or not any(needs):
        return nothing
    if not ctx.backward_config:
        raise NotImplementedError("This forward was planned without a backward; ask for one with backward_backend=.")
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    found = torch.ops.ffpa.flash_attn_backward(
        grad_out, grad_lse, out, lse, row_stats, *tensors, *ctx.scalars, needs, ctx.backward_config
    )
    grads = {name: grad for name, grad, needed in zip(_DIFFERENTIABLE, found, needs, strict=True) if needed}
    return (*(grads.get(name) for name in _FIELDS), None, None)


def _no_second_derivative(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    raise NotImplementedError(
        "ffpa_hf has no second derivative of attention. Use backend='sdpa' with torch's math backend "
        "(torch.nn.attention.sdpa_kernel) where a double backward is needed."
    )


torch.library.register_autograd(
    "ffpa::flash_attn_forward", _differentiate, setup_context=_save_for_backward, lib=_library
)
torch.library.register_autograd("ffpa::flash_attn_backward", _no_second_derivative, lib=_library)


def _refuse_forward_mode(tensors: list[Any]) -> None:
    """Raise where a tangent would be lost: the dispatcher drops it for operators without a forward-mode formula."""
    if forward_ad._current_level < 0:
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(
            "ffpa_hf's kernels have no forward-mode derivative (torch.func.jvp, forward_ad). Use backend='sdpa' with "
            "torch's math backend (torch.nn.attention.sdpa_kernel)."
        )


def flash_attn(inputs: AttentionInputs, forward: str, backward: str, needs_grad: bool) -> tuple[Tensor, Tensor]:
    """Run the forward operator; (out, lse). Without a gradient to keep, autograd's wrapper is left out."""
    values = [getattr(inputs, name) for name in _FIELDS]
    if not torch.compiler.is_compiling():
        _refuse_forward_mode(values[: len(_TENSOR_FIELDS)])
    operator = torch.ops.ffpa.flash_attn_forward.default
    if needs_grad or torch.compiler.is_compiling():
        out, lse, _ = operator(*values, forward, backward)
    else:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, _ = operator(*values, forward, backward)
    return out, lse
