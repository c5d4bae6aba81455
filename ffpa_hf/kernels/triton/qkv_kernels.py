"""QK-norm, rotary embedding and placement in one pass over a projection: what stands between it and attention.

One program takes one token. Device code and its launcher; knows no architecture, only strides and tables of pairs.
`kernels/reference.py` (`join_streams`) is the definition.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ffpa_hf.kernels.common import aligned
from ffpa_hf.kernels.triton.launch import _on, _plain, index_type

_ELEMENTS_PER_WARP = 512


@triton.jit
def load_halves(base, row, rows, D: tl.constexpr, BP: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two members of each pair, fp32 [BH, BP] each, zero outside `rows` and D; row: offsets [BH, 1] of rows.

    A pair is two neighbours where INTERLEAVED, else the same place of the two halves.
    """
    P: tl.constexpr = D // 2
    if INTERLEAVED:
        o_d = tl.arange(0, 2 * BP)[None, :]
        x = tl.load(base + row + o_d, mask=rows & (o_d < D), other=0.0).to(tl.float32)
        return tl.split(x.reshape([x.shape[0], BP, 2]))
    else:
        o_p = tl.arange(0, BP)[None, :]
        first = tl.load(base + row + o_p, mask=rows & (o_p < P), other=0.0).to(tl.float32)
        second = tl.load(base + row + P + o_p, mask=rows & (o_p < P), other=0.0).to(tl.float32)
        return first, second


@triton.jit
def load_table(base, strides, o_p, P: tl.constexpr):
    """Factors of the two members of each pair, fp32 [1, BP] each; strides (pair, member), None: one serves both."""
    inside = o_p < P
    first = tl.load(base + o_p * strides[0], mask=inside, other=0.0).to(tl.float32)[None, :]
    if strides[1] is None:
        return first, first
    else:
        second = tl.load(base + o_p * strides[0] + strides[1], mask=inside, other=0.0).to(tl.float32)
        return first, second[None, :]


@triton.jit(do_not_specialize=["tokens", "heads"])
def place_stream(
    source, target, weight, cos, sin, source_strides, target_strides, cos_token, cos_pair, sin_token, sin_pair,
    tokens, heads, eps,
    D: tl.constexpr, BH: tl.constexpr, BP: tl.constexpr, NORM: tl.constexpr, ACROSS: tl.constexpr,
    INTERLEAVED: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """target[b, n, h] = rotary(norm(source[b, n, h])) for BH heads of one token; grid B * tokens * ceil(heads / BH).

    source_strides and target_strides (b, n, h) count 16 bytes, which tells the compiler the alignment of every row.
    weight: dense [D], or [heads, D] where ACROSS (the norm is over all heads of a token), or None. cos, sin: tables
    with strides (b, n) and (pair, member), or None for no rotary embedding.
    """
    FROM: tl.constexpr = 128 // source.dtype.element_ty.primitive_bitwidth
    TO: tl.constexpr = 128 // target.dtype.element_ty.primitive_bitwidth
    P: tl.constexpr = D // 2
    blocks = tl.cdiv(heads, BH)
    i_token = tl.program_id(0) // blocks
    i_b = (i_token // tokens).to(INT)
    i_n = (i_token % tokens).to(INT)
    o_h = (tl.program_id(0) % blocks * BH + tl.arange(0, BH))[:, None]
    there = o_h < heads
    row = o_h.to(INT) * source_strides[2] * FROM
    start = i_b * source_strides[0] * FROM + i_n * source_strides[1] * FROM
    first, second = load_halves(source + start, row, there, D, BP, INTERLEAVED)
    if NORM:
        squares = tl.sum(first * first + second * second, 1)
        if ACROSS:
            scale = tl.rsqrt(tl.sum(squares, 0) / (heads * D) + eps)
        else:
            scale = tl.rsqrt(squares / D + eps)[:, None]
        first *= scale
        second *= scale
        if weight is not None:
            if ACROSS:
                w_first, w_second = load_halves(weight, o_h * D, there, D, BP, INTERLEAVED)
            else:
                none = tl.zeros([1, 1], tl.int32)
                w_first, w_second = load_halves(weight, none, none == 0, D, BP, INTERLEAVED)
            first *= w_first
            second *= w_second
    if cos is not None:
        o_p = tl.arange(0, BP)
        c_first, c_second = load_table(cos + i_b * cos_token[0] + i_n * cos_token[1], cos_pair, o_p, P)
        s_first, s_second = load_table(sin + i_b * sin_token[0] + i_n * sin_token[1], sin_pair, o_p, P)
        turned = first * c_first - second * s_first
        second = second * c_second + first * s_second
        first = turned
    out = target + i_b * target_strides[0] * TO + i_n * target_strides[1] * TO
    row = o_h.to(INT) * target_strides[2] * TO
    if INTERLEAVED:
        o_d = tl.arange(0, 2 * BP)[None, :]
        both = tl.join(first, second).reshape([BH, 2 * BP])
        tl.store(out + row + o_d, both.to(target.dtype.element_ty), mask=there & (o_d < D))
    else:
        o_p = tl.arange(0, BP)[None, :]
        tl.store(out + row + o_p, first.to(target.dtype.element_ty), mask=there & (o_p < P))
        tl.store(out + row + P + o_p, second.to(target.dtype.element_ty), mask=there & (o_p < P))


@functools.lru_cache(maxsize=256)
def _tile(heads: int, head_dim: int, across_heads: bool) -> tuple[int, int, int]:
    """(heads of a program, pairs, warps): all heads for a norm over them, else the power of two that wastes least."""
    width = triton.next_power_of_2(head_dim)
    block = triton.next_power_of_2(heads)
    if not across_heads:
        fitting = [b for b in (1, 2, 4, 8, 16, 32, 64) if b <= block and b * width <= 4096]
        roomy = [b for b in fitting if b * width >= 1024] or fitting[-1:]
        block = min(reversed(roomy), key=lambda b: -(-heads // b) * b)
    return block, width // 2, min(16, max(1, block * width // _ELEMENTS_PER_WARP))


def join_streams(
    streams: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    eps: Sequence[float],
    cos: Sequence[Tensor | None],
    sin: Sequence[Tensor | None],
    across_heads: bool,
    interleaved: bool,
) -> Tensor:
    """As `kernels.reference.join_streams` defines; a dense `[B, N1 + N2 + ..., H, D]` in the dtype of the streams.

    D is a multiple of 8 up to 256. With a norm over all heads a program holds a token, so that `ffpa_hf.joint` leaves
    tokens beyond 16384 elements to torch.
    """
    batch, _, heads, head_dim = streams[0].shape
    total = sum(stream.shape[1] for stream in streams)
    joint = streams[0].new_empty(batch, total, heads, head_dim)
    block, pairs, warps = _tile(heads, head_dim, across_heads)
    begin = 0
    with _on(joint.device):
        for stream, weight, one_eps, one_cos, one_sin in zip(streams, weights, eps, cos, sin, strict=True):
            tokens = stream.shape[1]
            target = joint[:, begin : begin + tokens]
            begin += tokens
            if target.numel() == 0:
                continue
            stream = aligned(stream)
            place_stream[(batch * tokens * -(-heads // block),)](
                stream, target, None if weight is None else weight.contiguous(), one_cos, one_sin,
                _units(stream), _units(target), *_table(one_cos), *_table(one_sin), tokens, heads, one_eps,
                D=head_dim, BH=block, BP=pairs, NORM=one_eps >= 0, ACROSS=across_heads, INTERLEAVED=interleaved,
                INT=index_type(stream, joint, one_cos, one_sin), num_warps=warps,
            )  # fmt: skip
    return joint


def _units(tensor: Tensor) -> tuple[int, ...]:
    """Strides (b, n, h) of `[B, N, H, D]` in units of 16 bytes."""
    unit = 16 // tensor.element_size()
    return tuple(stride // unit for stride in _plain(tensor)[:3])


def _table(table: Tensor | None) -> tuple[tuple[int, int], tuple[int, int | None]]:
    """Strides (b, n) and (pair, member) of a table `[B|1, N, D/2, 2]`; member None where both share a factor."""
    if table is None:
        return (0, 0), (0, None)
    batch, token, pair, member = _plain(table)
    return (batch, token), (pair, member or None)
