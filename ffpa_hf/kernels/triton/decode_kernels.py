"""Split-KV decode: few query rows against many keys, divided over programs that each leave a partial result.

Device code only; tiles and the number of splits come from `configs`, tensors from `launch`. The query rows of all heads
that share a key head are packed into one tile, so that keys and values are read once. Partial results are combined in
the order of the splits (Flash-Decoding: Dao et al. 2023), so an answer is the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ffpa_hf.kernels.triton.primitives import (
    BIG,
    LN2,
    LOG2E,
    SIZES,
    Visibility,
    base2_scores,
    hide,
    kept_rows,
    load_tile,
    row_ranges,
)

try:
    from triton.language.extra import cuda
except ImportError:  # a Triton built for AMD alone; PDL is never set there
    cuda = None


@triton.jit
def packed_tile(base, strides, i_h, o_q, col, BC: tl.constexpr, INT: tl.constexpr):
    """Pointers [BM, BC] to the columns from `col` on of row o_q of head i_h, both [BM]; strides as an `Operand`'s."""
    UNIT: tl.constexpr = 128 // base.dtype.element_ty.primitive_bitwidth
    rows = i_h.to(INT) * strides[1] * UNIT + o_q.to(INT) * strides[2] * UNIT
    return base + rows[:, None] + (col + tl.arange(0, BC))[None, :]


@triton.jit
def columns_of(there, col, D: tl.constexpr, BC: tl.constexpr):
    """Bool [BM, BC]: rows that are there, inside the head dim."""
    return there[:, None] & (col + tl.arange(0, BC) < D)[None, :]


@triton.jit(do_not_specialize=SIZES)
def decode_split(
    q, q_strides, k, k_strides, v, v_strides,
    out, out_strides, lse, stats, sinks, partial, partial_stats,
    seen, dropout, scores,
    Hq, group, n_q, n_kv, stats_size, splits, row_tiles,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, PDL: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """One tile of the group * n_q packed rows of a key head against one of `splits` parts of the keys they see.

    q [B, Hq, Nq, D], k and v [B, Hkv, Nkv, D], strides as an `Operand`'s. Row r of a key head is query row r % n_q of
    its query head r // n_q. The keys that some row of the tile sees are divided over the splits, so that a window or a
    short cache leaves none idle. With one split, out, lse, stats and sinks are as in `attention_forward`. Else partial
    fp32 [splits, B, Hq, Nq, D] gets sums relative to the split's own maximum, after dropout, and partial_stats fp32
    [2, splits, B, Hq, Nq] that maximum and the sum of exp2; sums of rows that met no key are not written. The first
    split counts the sink.
    """
    k_strides = k_strides[0:3]
    v_strides = v_strides[0:3]
    seen = Visibility(seen.mask, seen.bias, seen.key_mask, seen.row_start, seen.row_end, seen.strides[0:14])
    if PDL:
        cuda.gdc_launch_dependents()

    pid = tl.program_id(0)
    i_tile = pid % row_tiles  # row tiles side by side, so that the second reads keys from L2
    i_split = pid // row_tiles % splits
    unit = pid // row_tiles // splits
    i_b = unit // (Hq // group)
    i_hkv = unit % (Hq // group)

    o_r = i_tile * BM + tl.arange(0, BM)
    there = o_r < group * n_q
    o_q = tl.where(there, o_r % n_q, n_q)
    i_h = i_hkv * group + tl.where(there, o_r // n_q, 0)
    start, end = row_ranges(seen, i_b, o_q, n_q, n_kv, CAUSAL, INT)
    end = tl.where(there, end, 0)
    hi = tl.max(tl.where(start < end, end, 0), 0)
    lo = tl.minimum(tl.min(tl.where(start < end, start, BIG), 0), hi)
    begin = lo // BN * BN
    per_split = tl.cdiv(tl.cdiv(hi - begin, BN), splits) * BN
    first = begin + i_split * per_split
    last = tl.minimum(first + per_split, hi)

    # q0 [BM, D0], q1 [BM, D1]
    UNIT: tl.constexpr = 128 // q.dtype.element_ty.primitive_bitwidth
    q += i_b.to(INT) * q_strides[0] * UNIT
    q0 = tl.load(packed_tile(q, q_strides, i_h, o_q, 0, D0, INT), mask=columns_of(there, 0, D, D0), other=0.0)
    acc0 = tl.zeros([BM, D0], tl.float32)
    if D1 > 0:
        q1 = tl.load(packed_tile(q, q_strides, i_h, o_q, D0, D1, INT), mask=columns_of(there, D0, D, D1), other=0.0)
        acc1 = tl.zeros([BM, D1], tl.float32)
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)  # noqa: E741
    if sinks is not None:
        m = tl.where(i_split == 0, tl.load(sinks + i_h) * LOG2E, m)
        l = tl.where(m == float("-inf"), 0.0, 1.0)  # noqa: E741

    for n in tl.range(first, last, BN):
        # s [BM, BN] = q k^T
        k0 = load_tile(k, k_strides, i_b, i_hkv, n, 0, n_kv, D, BN, D0, False, INT)
        s = tl.dot(q0, tl.trans(k0), input_precision="ieee")
        if D1 > 0:
            k1 = load_tile(k, k_strides, i_b, i_hkv, n, D0, n_kv, D, BN, D1, False, INT)
            s = tl.dot(q1, tl.trans(k1), s, input_precision="ieee")

        o_n = n + tl.arange(0, BN)
        z, _ = base2_scores(s, scores, seen, i_b, i_h[:, None], o_q, o_n, n_q, n_kv, INT)
        z = hide(z, seen, i_b, i_h[:, None], o_q, o_n, start, end, n_q, n_kv, True, False, INT)
        m_new = tl.maximum(m, tl.max(z, 1))
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row may have met no key yet
        p = tl.exp2(z - pivot[:, None])
        alpha = tl.exp2(m - pivot)
        l = l * alpha + tl.sum(p, 1)  # noqa: E741
        m = m_new
        if dropout.rng is not None:
            p = tl.where(kept_rows(dropout, (i_b * Hq + i_h)[:, None], o_q, n, BM, BN), p, 0.0)

        # acc [BM, D] = acc alpha + p v
        v0 = load_tile(v, v_strides, i_b, i_hkv, n, 0, n_kv, D, BN, D0, False, INT)
        p = p.to(v0.dtype)
        acc0 = tl.dot(p, v0, acc0 * alpha[:, None], input_precision="ieee")
        if D1 > 0:
            v1 = load_tile(v, v_strides, i_b, i_hkv, n, D0, n_kv, D, BN, D1, False, INT)
            acc1 = tl.dot(p, v1, acc1 * alpha[:, None], input_precision="ieee")

    empty = l == 0.0
    factor = tl.full([BM], 1.0, tl.float32)
    if dropout.rng is not None:
        factor *= dropout.scale
    rows = unit.to(INT) * group * n_q + o_r
    if partial is not None:
        rows += i_split.to(INT) * stats_size
        tl.store(partial_stats + rows, m, mask=there)
        tl.store(partial_stats + splits.to(INT) * stats_size + rows, l, mask=there)
        met = there & (l > 0.0)
        target = partial + rows[:, None] * D
        tl.store(target + tl.arange(0, D0)[None, :], acc0 * factor[:, None], mask=columns_of(met, 0, D, D0))
        if D1 > 0:
            target += D0
            tl.store(target + tl.arange(0, D1)[None, :], acc1 * factor[:, None], mask=columns_of(met, D0, D, D1))
    else:
        total = tl.where(empty, 1.0, l)
        factor /= total
        kind = out.dtype.element_ty
        out += i_b.to(INT) * out_strides[0] * UNIT
        target = packed_tile(out, out_strides, i_h, o_q, 0, D0, INT)
        tl.store(target, (acc0 * factor[:, None]).to(kind), mask=columns_of(there, 0, D, D0))
        if D1 > 0:
            target = packed_tile(out, out_strides, i_h, o_q, D0, D1, INT)
            tl.store(target, (acc1 * factor[:, None]).to(kind), mask=columns_of(there, D0, D, D1))
        log2_l = tl.log2(total)
        tl.store(lse + rows, tl.where(empty, float("-inf"), (m + log2_l) * LN2), mask=there)
        if stats is not None:
            tl.store(stats + rows, m, mask=there)
            tl.store(stats + stats_size + rows, log2_l, mask=there)


@triton.jit(do_not_specialize=SIZES)
def decode_combine(
    partial, partial_stats, out, out_strides, lse, stats, Hq, n_q, stats_size, splits,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, PDL: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """What `decode_split` left, summed over the splits, BS at a time, for BD columns of one row; see there for all."""
    PIECES: tl.constexpr = (D + BD - 1) // BD
    pid = tl.program_id(0)
    row = pid // PIECES
    o_d = pid % PIECES * BD + tl.arange(0, BD)
    if PDL:
        cuda.gdc_wait()
    acc = tl.zeros([BD], tl.float32)
    m = float("-inf")
    l = 0.0  # noqa: E741
    for s in tl.range(0, splits, BS):
        o_s = s + tl.arange(0, BS)
        rows = o_s.to(INT) * stats_size + row
        m_s = tl.load(partial_stats + rows, mask=o_s < splits, other=float("-inf"))
        l_s = tl.load(partial_stats + splits.to(INT) * stats_size + rows, mask=o_s < splits, other=0.0)
        met = (l_s > 0.0)[:, None] & (o_d < D)[None, :]
        part = tl.load(partial + rows[:, None] * D + o_d[None, :], mask=met, other=0.0)
        m_new = tl.maximum(m, tl.max(m_s, 0))
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2(m_s - pivot)
        alpha = tl.exp2(m - pivot)
        l = l * alpha + tl.sum(l_s * weight, 0)  # noqa: E741
        acc = acc * alpha + tl.sum(part * weight[:, None], 0)
        m = m_new
    empty = l == 0.0
    total = tl.where(empty, 1.0, l)
    lane = row // n_q
    UNIT: tl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
    target = out + (lane // Hq).to(INT) * out_strides[0] * UNIT + (lane % Hq).to(INT) * out_strides[1] * UNIT
    target += (row % n_q).to(INT) * out_strides[2] * UNIT
    tl.store(target + o_d, (acc / total).to(out.dtype.element_ty), mask=o_d < D)
    if pid % PIECES == 0:
        log2_l = tl.log2(total)
        tl.store(lse + row, tl.where(empty, float("-inf"), (m + log2_l) * LN2))
        if stats is not None:
            tl.store(stats + row, m)
            tl.store(stats + stats_size + row, log2_l)
