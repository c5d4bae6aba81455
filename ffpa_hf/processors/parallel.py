"""Context parallelism of diffusers (Ulysses, ring, both) over `attend`: the two operations its templates call.

Layout is `[B, N, H, D]`, lse `[B, N, H]`. Knows the templates' calling convention; communication is theirs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ffpa_hf.processors.redirect import from_dispatch, running_scope, use_scope


def is_context_parallel(parallel_config: Any) -> bool:
    """Does diffusers' configuration split the sequence (rather than the weights)?"""
    return getattr(parallel_config, "context_parallel_config", None) is not None


def attention(
    template: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    parallel_config: Any,
) -> Any:
    """One sequence-parallel call. template: diffusers' own, which communicates and calls back.

    Raises NotImplementedError for a mask under ring attention (diffusers would apply one rank's mask to every rank's
    keys) and for dropout (a recomputed backward cannot draw it again).
    """
    if attn_mask is not None and parallel_config.context_parallel_config.ring_degree > 1:
        raise NotImplementedError(
            "attn_mask under ring attention: each rank's keys would need their own part of it. Use Ulysses "
            "(ContextParallelConfig(ulysses_degree=...)), or drop the mask where it is all True."
        )
    if dropout_p > 0:
        raise NotImplementedError(f"dropout_p={dropout_p} under context parallelism; use 0 there.")
    return template(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        return_lse,
        forward_op=forward_op,
        backward_op=backward_op,
        _parallel_config=parallel_config,
    )


def forward_op(
    ctx: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _save_ctx: bool = True,
    _parallel_config: Any = None,
) -> Any:
    """Attention over one rank's part, `(out, lse)` or out. Saves what `backward_op` recomputes from."""
    if _save_ctx:
        ctx.save_for_backward(query, key, value)
        ctx.ffpa_arguments = {
            "attn_mask": attn_mask,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
        }
        ctx.ffpa_scope = running_scope()
    return from_dispatch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse)


def backward_op(
    ctx: Any,
    grad_out: Tensor,
    *_: Any,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one part. Ring gives this part's key and value, and the out and lse reduced over all parts.

    With w = exp(lse_part - lse), out is the sum of w * out_part, so out_part receives w * grad_out and lse_part
    w * <grad_out, out_part - out>.
    """
    saved = ctx.saved_tensors
    inputs: Any = [
        (saved[index] if given is None else given).detach().requires_grad_(True)
        for index, given in enumerate((query, key, value))
    ]
    with torch.enable_grad(), use_scope(ctx.ffpa_scope):
        if out is None or lse is None:
            outputs: Any = (from_dispatch(inputs[0], inputs[1], inputs[2], **ctx.ffpa_arguments),)
            gradients: Any = (grad_out,)
        else:
            outputs = from_dispatch(inputs[0], inputs[1], inputs[2], **ctx.ffpa_arguments, return_lse=True)
            part, part_lse = (tensor.detach() for tensor in outputs)
            weight = torch.exp(part_lse - lse)
            grad = grad_out.to(weight.dtype)
            grad_lse = weight * (grad * (part.to(weight.dtype) - out.to(weight.dtype))).sum(-1)
            gradients = ((grad * weight[..., None]).to(part.dtype), grad_lse)
        return torch.autograd.grad(outputs, inputs, gradients)  # type: ignore[return-value]
