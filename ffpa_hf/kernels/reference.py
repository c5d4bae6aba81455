"""The definition of the operation, in plain torch: dense, differentiable, in whatever precision it is given.

Every kernel is tested against this in float64. Knows no backend and no GPU.
"""

from __future__ import annotations

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
