"""The forward kernel: one program makes one tile of query rows times one slice of output columns.

Device code only; shapes of tiles come from `configs`, tensors from `launch`. Online softmax in base 2 (Milakov and
Gimelshein 2018; Dao et al. 2022), with three key phases so that only blocks on the border of a range test elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ffpa_hf.kernels.triton.primitives import (
    LN2,
    LOG2E,
    SIZES,
    Operand,
    Visibility,
    base2_scores,
    hide,
    kept,
    key_hull,
    key_phases,
    load_tile,
    row_ranges,
    store_tile,
)


@triton.jit(do_not_specialize=SIZES)
def attention_forward(
    q, q_tail, q_strides, k, k_tail, k_strides, v, v_tail, v_strides,
    out, out_strides, lse, stats, sinks,
    seen, dropout, scores,
    Hq, group, n_q, n_kv, stats_size,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, CHUNK: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, SLICES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN_KV: tl.constexpr, POSITIVE: tl.constexpr, PHASED: tl.constexpr,
    TMA: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """q [B, Hq, Nq, D], k and v [B, Hkv, Nkv, D], each the three fields of an `Operand`, to out [B, Hq, Nq, D].

    lse fp32 [B, Hq, Nq]; stats fp32 [2, B, Hq, Nq] or None (row maximum, log2 of the sum relative to it); sinks fp32
    [Hq] or None. The query width D is multiplied whole, as D0 + D1 columns, or in CHUNK columns at a time when CHUNK is
    not 0. Output columns: SLICES programs of W0 + W1 columns each, every one making the scores for itself.
    POSITIVE: scale > 0, which lets the maximum be taken before scaling. PHASED: a loop each for the keys before, inside
    and after the range that all rows of a tile see, so that only border blocks test elements; else one loop that tests.
    """
    q = Operand(q, q_tail, q_strides[0:3])
    k = Operand(k, k_tail, k_strides[0:3])
    v = Operand(v, v_tail, v_strides[0:3])
    seen = Visibility(seen.mask, seen.bias, seen.key_mask, seen.row_start, seen.row_end, seen.strides[0:14])
    INTERVALS: tl.constexpr = seen.row_start is not None
    RANGES: tl.constexpr = CAUSAL or INTERVALS
    FOLD: tl.constexpr = POSITIVE and scores.cap is None and seen.bias is None
    SOME_HIDDEN: tl.constexpr = seen.mask is not None or seen.key_mask is not None or seen.bias is not None

    tiles = tl.cdiv(n_q, BM)
    pid = tl.program_id(0)
    i_slice = pid % SLICES
    i_m = (pid // SLICES) % tiles
    lane = pid // SLICES // tiles
    if CAUSAL:  # the longest rows first: a late long tile would run alone
        i_m = tiles - 1 - i_m
    i_b = lane // Hq
    i_h = lane % Hq
    i_hkv = i_h // group
    row = i_m * BM
    col = i_slice * (W0 + W1)

    o_m = row + tl.arange(0, BM)
    start, end = row_ranges(seen, i_b, o_m, n_q, n_kv, CAUSAL, INT)
    lo, hi, inner_lo, inner_hi = key_hull(seen, start, end, row, n_q, n_kv, BM, CAUSAL)
    begin, full, tested, stop = key_phases(lo, hi, inner_lo, inner_hi, BN)

    # q0 [BM, D0], q1 [BM, D1]
    if CHUNK == 0:
        q0 = load_tile(q.first, q.strides, i_b, i_h, row, 0, n_q, D, BM, D0, TMA, INT)
        if D1 > 0:
            q1 = load_tile(q.second, q.strides, i_b, i_h, row, D0, n_q, D, BM, D1, TMA, INT)

    acc0 = tl.zeros([BM, W0], tl.float32)
    if W1 > 0:
        acc1 = tl.zeros([BM, W1], tl.float32)
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)  # noqa: E741
    if sinks is not None:
        sink = tl.load(sinks + i_h) * LOG2E
        m = tl.zeros([BM], tl.float32) + sink
        l = tl.where(m == float("-inf"), 0.0, 1.0)  # noqa: E741

    for phase in tl.static_range(3 if PHASED else 1):
        if not PHASED:
            first = begin
            last = stop
        elif phase == 0:
            first = begin
            last = full
        elif phase == 1:
            first = full
            last = tested
        else:
            first = tested
            last = stop
        if (phase == 0 and (INTERVALS or not PHASED)) or phase == 1 or (phase == 2 and (RANGES or not EVEN_KV)):
            for n in tl.range(first, last, BN):
                # s [BM, BN] = q k^T
                if CHUNK == 0:
                    k0 = load_tile(k.first, k.strides, i_b, i_hkv, n, 0, n_kv, D, BN, D0, TMA, INT)
                    s = tl.dot(q0, tl.trans(k0), input_precision="ieee")
                    if D1 > 0:
                        k1 = load_tile(k.second, k.strides, i_b, i_hkv, n, D0, n_kv, D, BN, D1, TMA, INT)
                        s = tl.dot(q1, tl.trans(k1), s, input_precision="ieee")
                else:
                    s = tl.zeros([BM, BN], tl.float32)
                    for d in tl.range(0, D, CHUNK):
                        q_d = load_tile(q.first, q.strides, i_b, i_h, row, d, n_q, D, BM, CHUNK, TMA, INT)
                        k_d = load_tile(k.first, k.strides, i_b, i_hkv, n, d, n_kv, D, BN, CHUNK, TMA, INT)
                        s = tl.dot(q_d, tl.trans(k_d), s, input_precision="ieee")

                o_n = n + tl.arange(0, BN)
                if FOLD:
                    z = hide(s, seen, i_b, i_h, o_m, o_n, start, end, n_q, n_kv, RANGES and phase != 1, phase != 1, INT)
                    m_new = tl.maximum(m, tl.max(z, 1) * scores.slope)
                else:
                    z, _ = base2_scores(s, scores, seen, i_b, i_h, o_m, o_n, n_q, n_kv, INT)
                    z = hide(z, seen, i_b, i_h, o_m, o_n, start, end, n_q, n_kv, RANGES and phase != 1, phase != 1, INT)
                    m_new = tl.maximum(m, tl.max(z, 1))
                pivot = m_new
                if phase != 1 or SOME_HIDDEN:  # a row may have met no key yet: keep -inf - -inf out
                    pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
                if FOLD:
                    p = tl.exp2(z * scores.slope - pivot[:, None])
                else:
                    p = tl.exp2(z - pivot[:, None])
                alpha = tl.exp2(m - pivot)
                l = l * alpha + tl.sum(p, 1)  # noqa: E741
                m = m_new
                if dropout.rng is not None:
                    p = tl.where(kept(dropout, lane, row, n, BM, BN), p, 0.0)

                # acc [BM, W] = acc alpha + p v
                v0 = load_tile(v.first, v.strides, i_b, i_hkv, n, col, n_kv, D, BN, W0, TMA, INT)
                p = p.to(v0.dtype)
                acc0 = tl.dot(p, v0, acc0 * alpha[:, None], input_precision="ieee")
                if W1 > 0:
                    v1 = load_tile(v.second, v.strides, i_b, i_hkv, n, col + W0, n_kv, D, BN, W1, TMA, INT)
                    acc1 = tl.dot(p, v1, acc1 * alpha[:, None], input_precision="ieee")

    empty = l == 0.0
    total = tl.where(empty, 1.0, l)
    norm = 1.0 / total
    if dropout.rng is not None:
        norm *= dropout.scale
    store_tile(out, out_strides, i_b, i_h, row, col, n_q, D, acc0 * norm[:, None], BM, W0, INT)
    if W1 > 0:
        store_tile(out, out_strides, i_b, i_h, row, col + W0, n_q, D, acc1 * norm[:, None], BM, W1, INT)
    if i_slice == 0:
        rows = lane.to(INT) * n_q + o_m
        log2_l = tl.log2(total)
        tl.store(lse + rows, tl.where(empty, float("-inf"), (m + log2_l) * LN2), mask=o_m < n_q)
        if stats is not None:
            tl.store(stats + rows, m, mask=o_m < n_q)
            tl.store(stats + stats_size + rows, log2_l, mask=o_m < n_q)
