"""The float64 result that timed providers are judged against, for a slice of the heads.

Two key heads with all their query heads are computed (the first of the first batch, the last of the last), every row
of them, a chunk of rows at a time. Knows no provider.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ffpa_hf.bench.cases import Case
from ffpa_hf.kernels.reference import attention
from ffpa_hf.masks import RowIntervals

#: Scores held at once, in float64 elements (about six such tensors live during a backward).
_CHUNK_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class Truth:
    """Float64 results of some heads. slices: (batch, first query head, key head) of each."""

    group: int
    slices: tuple[tuple[int, int, int], ...]
    out: tuple[Tensor, ...]
    grads: tuple[tuple[Tensor, Tensor, Tensor], ...]

    def forward_error(self, out: Tensor) -> float:
        """||out - truth|| / ||truth|| over the known heads of `out` `[B, H, N, D]`."""
        return _relative(
            [out[b : b + 1, hq : hq + self.group] for b, hq, _ in self.slices],
            list(self.out),
        )

    def backward_error(self, grads: tuple[Tensor, Tensor, Tensor]) -> float:
        """The largest such error among the gradients of query, key and value."""
        query, key, value = grads
        given = (
            [query[b : b + 1, hq : hq + self.group] for b, hq, _ in self.slices],
            [key[b : b + 1, hk : hk + 1] for b, _, hk in self.slices],
            [value[b : b + 1, hk : hk + 1] for b, _, hk in self.slices],
        )
        return max(_relative(mine, [g[i] for g in self.grads]) for i, mine in enumerate(given))


def compute(case: Case, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor | None) -> Truth:
    """Run the reference on the chosen heads; gradients too where `grad_out` is given."""
    corners = {(0, 0), (case.batch - 1, case.kv_heads - 1)}
    slices = tuple((b, hk * case.group, hk) for b, hk in sorted(corners))
    outs, grads = [], []
    for b, hq, hk in slices:
        q = query[b : b + 1, hq : hq + case.group].double()
        k, v = key[b : b + 1, hk : hk + 1].double(), value[b : b + 1, hk : hk + 1].double()
        g = None if grad_out is None else grad_out[b : b + 1, hq : hq + case.group].double()
        out, found = _head(case, q, k, v, g)
        outs.append(out)
        if found is not None:
            grads.append(found)
    return Truth(case.group, slices, tuple(outs), tuple(grads))


def packed_intervals(case: Case, device: torch.device) -> RowIntervals:
    """The mask of a case of packed documents."""
    offsets = torch.arange(case.documents + 1, dtype=torch.int32, device=device) * (case.q_len // case.documents)
    return RowIntervals.packed(offsets, offsets, case.q_len, causal=True)


def _head(case: Case, q: Tensor, k: Tensor, v: Tensor, grad: Tensor | None):
    intervals = None
    if case.window is not None:
        intervals = RowIntervals.sliding_window(case.q_len, case.kv_len, case.window, q.device)
    elif case.documents:
        intervals = packed_intervals(case, q.device)
    step = max(1, _CHUNK_ELEMENTS // (case.group * case.kv_len))
    outs, query_grads = [], []
    key_grad, value_grad = torch.zeros_like(k), torch.zeros_like(v)
    for begin in range(0, case.q_len, step):
        rows = slice(begin, min(case.q_len, begin + step))
        leaves = [t.detach().requires_grad_(grad is not None) for t in (q[:, :, rows], k, v)]
        part = None if intervals is None else intervals.rows(rows)
        with torch.set_grad_enabled(grad is not None):
            out, _ = attention(
                *leaves,
                scale=1.0 / math.sqrt(case.head_dim),
                is_causal=case.causal and part is None,
                row_start=None if part is None else part.start,
                row_end=None if part is None else part.end,
                first_row=begin,
            )
        if grad is not None:
            dq, dk, dv = torch.autograd.grad(out, leaves, grad[:, :, rows])
            query_grads.append(dq)
            key_grad += dk
            value_grad += dv
        outs.append(out.detach())
    found = None if grad is None else (torch.cat(query_grads, 2), key_grad, value_grad)
    return torch.cat(outs, 2), found


def _relative(given: list[Tensor], truth: list[Tensor]) -> float:
    difference = sum(float((mine.double() - exact).square().sum()) for mine, exact in zip(given, truth, strict=True))
    norm = sum(float(exact.square().sum()) for exact in truth)
    return math.sqrt(difference / norm) if norm else math.sqrt(difference)
