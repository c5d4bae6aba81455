"""The definition of the operations, in plain torch: dense, differentiable, in whatever precision they are given.

Every kernel is tested against this in float64. Knows no backend and no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    is_causal: bool = False,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    key_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
    first_row: int = 0,
) -> tuple[Tensor, Tensor]:
    """softmax(cap(scale * Q K^T) + bias) V with masked keys left out; returns (out, log-sum-exp).

    query `[B, Hq, Nq, D]`, key `[B, Hkv, Nkv, D]`, value `[B, Hkv, Nkv, Dv]`, Hq a multiple of Hkv. The other tensors
    are as in `AttentionInputs`. keep: bool `[B, Hq, Nq, Nkv]`, probabilities that dropout keeps; they are divided by
    `1 - dropout_p`. first_row: position of the first query row, for causal masking of a run of rows.

    out `[B, Hq, Nq, Dv]`; lse `[B, Hq, Nq]`, natural logarithm, including the sink. A row without keys gives zeros and
    -inf (or the sink alone). Gradients flow through every floating tensor; the result has query's dtype.
    """
    batch, q_heads, q_len, _ = query.shape
    kv_heads, kv_len = key.shape[1], key.shape[2]
    # A group of query heads shares one key head: its rows are stacked, so that keys are never repeated.
    stacked = q_heads * q_len // max(kv_heads, 1)
    rows = query.reshape(batch, kv_heads, stacked, query.shape[-1])
    scores = (rows @ key.transpose(-1, -2)).reshape(batch, q_heads, q_len, kv_len) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)

    hidden = hidden_keys(
        q_len, kv_len, query.device, is_causal, mask, row_start, row_end, key_mask, first_row=first_row
    )
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))

    peak = scores.detach().amax(-1, keepdim=True) if kv_len else scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    if sinks is not None:
        sink = sinks.to(scores.dtype)[None, :, None, None]
        peak = torch.maximum(peak, sink.detach())
    pivot = peak.masked_fill(peak == -torch.inf, 0.0)
    weights = torch.exp(scores - pivot)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - pivot)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    weights = weights / total
    if keep is not None:
        weights = weights * keep / (1.0 - dropout_p) if dropout_p < 1.0 else weights * 0.0
    out = (weights.reshape(batch, kv_heads, stacked, kv_len) @ value).reshape(batch, q_heads, q_len, value.shape[-1])
    lse = (pivot + torch.log(total)).masked_fill(empty, -torch.inf).squeeze(-1)
    return out, lse


def hidden_keys(
    q_len: int,
    kv_len: int,
    device: torch.device,
    is_causal: bool,
    mask: Tensor | None,
    row_start: Tensor | None,
    row_end: Tensor | None,
    key_mask: Tensor | None,
    *,
    first_row: int = 0,
) -> Tensor | None:
    """Which keys a row may not see, bool broadcastable to `[B, Hq, Nq, Nkv]`; None where it sees all."""
    position = torch.arange(kv_len, device=device)
    hidden = None
    if is_causal:
        hidden = (position > torch.arange(first_row, first_row + q_len, device=device)[:, None])[None, None]
    if row_start is not None and row_end is not None:
        outside = ((position < row_start[..., None]) | (position >= row_end[..., None]))[:, None]
        hidden = outside if hidden is None else hidden | outside
    if key_mask is not None:
        missing = ~key_mask[:, None, None, :]
        hidden = missing if hidden is None else hidden | missing
    if mask is not None:
        hidden = ~mask if hidden is None else hidden | ~mask
    return hidden


def join_streams(
    streams: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    eps: Sequence[float],
    cos: Sequence[Tensor | None],
    sin: Sequence[Tensor | None],
    across_heads: bool = False,
    interleaved: bool = True,
) -> Tensor:
    """QK-norm and rotary embedding of one or more streams of tokens, laid end to end: `[B, N1 + N2 + ..., H, D]`.

    For each stream: x `[B, N, H, D]`, any strides; x / sqrt(mean(x^2) + eps) * weight, the mean over a head, or over
    all heads of a token with `across_heads` (Zhang and Sennrich 2019, arXiv:1910.07467); weight `[D]` or `[H * D]`, or
    None for none; a negative eps for no norm at all. Then each pair (a, b) of a head becomes
    (a cos0 - b sin0, b cos1 + a sin1) (Su et al. 2021, arXiv:2104.09864); a pair is two neighbours, or the same place
    of the two halves where not `interleaved`; cos and sin `[B or 1, N, D/2, 2]` hold the factors of both members, any
    strides; None for no rotation.

    Computed in float32 (float64 for float64) and rounded once, to the dtype of the streams. Differentiable.
    """
    parts = []
    for x, weight, one_eps, one_cos, one_sin in zip(streams, weights, eps, cos, sin, strict=True):
        out = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        if one_eps >= 0:
            dims = (-2, -1) if across_heads else (-1,)
            out = out * torch.rsqrt(out.square().mean(dims, keepdim=True) + one_eps)
            if weight is not None:
                out = out * weight.to(out.dtype).reshape(x.shape[-2:] if across_heads else x.shape[-1:])
        if one_cos is not None and one_sin is not None:
            half = x.shape[-1] // 2
            pairs = out.unflatten(-1, (half, 2)) if interleaved else out.unflatten(-1, (2, half)).transpose(-1, -2)
            first, second = pairs.unbind(-1)
            c, s = one_cos.to(out.dtype)[:, :, None], one_sin.to(out.dtype)[:, :, None]
            turned = first * c[..., 0] - second * s[..., 0], second * c[..., 1] + first * s[..., 1]
            out = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
        parts.append(out.to(x.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
