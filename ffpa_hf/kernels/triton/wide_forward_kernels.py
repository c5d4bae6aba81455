"""The forward for wide heads: probabilities go to bounded scratch, then one plain product with the values reads them.

Device code only. A fused kernel at head dim 512 and more holds too little of V at once, so it makes the scores several
times or waits for loads; here both products run as ordinary tiles. Memory: 2 bytes written and read for each score.

Probabilities are relative to a reference of their row, which moves only where a score exceeds it by more than MARGIN
(the lazy rescaling of FlashAttention-4, with the same threshold of 2^8). Rows of a block whose reference moves end a
segment; between two segments the product rescales its sum, so nothing is lost and almost nothing is ever rescaled.
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

MARGIN = tl.constexpr(8.0)


@triton.jit
def place(i_block, lane0, lanes, tile0, tiles, CAUSAL: tl.constexpr):
    """(lane, row tile) of a block of a round, lanes from lane0, row tiles from tile0; causal: longest tiles first."""
    if CAUSAL:
        GROUP: tl.constexpr = 8  # lanes side by side, so that a group's keys stay in L2
        band = i_block // (GROUP * tiles)
        rest = i_block % (GROUP * tiles)
        size = tl.minimum(lanes - band * GROUP, GROUP)
        return lane0 + band * GROUP + rest % size, tile0 + tiles - 1 - rest // size
    else:
        return lane0 + i_block // tiles, tile0 + i_block % tiles


@triton.jit(do_not_specialize=SIZES)
def forward_scores(
    q, q_tail, q_strides, k, k_tail, k_strides,
    weights, weights_strides, norm, segments, rescale, lse, stats, sinks,
    seen, dropout, scores,
    lane0, lanes, tile0, tiles, padded_cols, slots, Hq, group, n_q, n_kv, stats_size,
    D: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN_KV: tl.constexpr, TMA: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """One block of BM query rows against all its keys; a round holds `tiles` row tiles of each of `lanes` heads.

    weights [1, 1, blocks * BM, padded_cols] in the input dtype: probabilities relative to the row's reference, after
    dropout. norm fp32 [blocks, BM]: what the sum over them is multiplied by. segments int32 [blocks, slots + 1]: their
    number less one, then the key at which each but the first begins; rescale fp32 [blocks, slots, BM]: the factors
    there. lse, stats and sinks as in the fused kernel, except that stats holds the reference for the maximum.
    """
    q = Operand(q, q_tail, q_strides[0:3])
    k = Operand(k, k_tail, k_strides[0:3])
    weights_strides = weights_strides[0:3]
    seen = Visibility(seen.mask, seen.bias, seen.key_mask, seen.row_start, seen.row_end, seen.strides[0:14])
    INTERVALS: tl.constexpr = seen.row_start is not None
    RANGES: tl.constexpr = CAUSAL or INTERVALS

    i_block = tl.program_id(0)
    lane, i_m = place(i_block, lane0, lanes, tile0, tiles, CAUSAL)
    i_b = lane // Hq
    i_h = lane % Hq
    i_hkv = i_h // group
    row = i_m * BM

    o_m = row + tl.arange(0, BM)
    o_row = tl.arange(0, BM)
    start, end = row_ranges(seen, i_b, o_m, n_q, n_kv, CAUSAL, INT)
    lo, hi, inner_lo, inner_hi = key_hull(seen, start, end, row, n_q, n_kv, BM, CAUSAL)
    begin, full, tested, stop = key_phases(lo, hi, inner_lo, inner_hi, BN)

    reference = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)  # noqa: E741
    if sinks is not None:
        reference = tl.zeros([BM], tl.float32) + tl.load(sinks + i_h) * LOG2E
        l = tl.where(reference == float("-inf"), 0.0, 1.0)  # noqa: E741
    moves = i_block * 0
    segment = segments + i_block.to(INT) * (slots + 1)
    factor = rescale + i_block.to(INT) * slots * BM

    for phase in tl.static_range(3):
        if phase == 0:
            first = begin
            last = full
        elif phase == 1:
            first = full
            last = tested
        else:
            first = tested
            last = stop
        if (phase == 0 and INTERVALS) or phase == 1 or (phase == 2 and (RANGES or not EVEN_KV)):
            for n in tl.range(first, last, BN):
                s = tl.zeros([BM, BN], tl.float32)
                for d in tl.range(0, D, CHUNK):
                    q_d = load_tile(q.first, q.strides, i_b, i_h, row, d, n_q, D, BM, CHUNK, TMA, INT)
                    k_d = load_tile(k.first, k.strides, i_b, i_hkv, n, d, n_kv, D, BN, CHUNK, TMA, INT)
                    s = tl.dot(q_d, tl.trans(k_d), s, input_precision="ieee")
                o_n = n + tl.arange(0, BN)
                z, _ = base2_scores(s, scores, seen, i_b, i_h, o_m, o_n, n_q, n_kv, INT)
                z = hide(z, seen, i_b, i_h, o_m, o_n, start, end, n_q, n_kv, RANGES and phase != 1, phase != 1, INT)

                top = tl.max(z, 1)
                moved = tl.where(top > reference + MARGIN, top, reference)
                pivot = tl.where(moved == float("-inf"), 0.0, moved)
                alpha = tl.exp2(reference - pivot)
                # A row that has met no key has no sum to rescale: its first reference begins no segment.
                some = tl.max(((moved != reference) & (reference != float("-inf"))).to(tl.int32), 0)
                tl.store(segment + 1 + moves, n, mask=some != 0)
                tl.store(
                    factor + moves * BM + o_row, tl.where(reference == float("-inf"), 1.0, alpha),
                    mask=(o_row >= 0) & (some != 0),
                )  # fmt: skip
                moves += some
                reference = moved
                p = tl.exp2(z - pivot[:, None])
                l = l * alpha + tl.sum(p, 1)  # noqa: E741
                if dropout.rng is not None:
                    p = tl.where(kept(dropout, lane, row, n, BM, BN), p, 0.0)
                zero = i_block * 0
                store_tile(
                    weights,
                    weights_strides,
                    zero,
                    zero,
                    i_block * BM,
                    n,
                    (i_block + 1) * BM,
                    padded_cols,
                    p,
                    BM,
                    BN,
                    INT,
                )

    empty = l == 0.0
    total = tl.where(empty, 1.0, l)
    scale = 1.0 / total
    if dropout.rng is not None:
        scale *= dropout.scale
    tl.store(norm + i_block.to(INT) * BM + o_row, scale)
    tl.store(segment, moves)
    rows = lane.to(INT) * n_q + o_m
    log2_l = tl.log2(total)
    tl.store(lse + rows, tl.where(empty, float("-inf"), (reference + log2_l) * LN2), mask=o_m < n_q)
    if stats is not None:
        tl.store(stats + rows, reference, mask=o_m < n_q)
        tl.store(stats + stats_size + rows, log2_l, mask=o_m < n_q)


@triton.jit(do_not_specialize=SIZES)
def forward_product(
    weights, weights_tail, weights_strides, v, v_tail, v_strides,
    out, out_strides, norm, segments, rescale, seen,
    lane0, lanes, tile0, tiles, padded_rows, padded_cols, slots, Hq, group, n_q, n_kv,
    D: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, SLICES: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, TMA: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """out[rows, W0 + W1 columns] = norm * weights V over the keys of a block, by segments; BN is the scores'."""
    weights = Operand(weights, weights_tail, weights_strides[0:3])
    v = Operand(v, v_tail, v_strides[0:3])
    pid = tl.program_id(0)
    col = pid % SLICES * (W0 + W1)
    i_block = pid // SLICES
    lane, i_m = place(i_block, lane0, lanes, tile0, tiles, CAUSAL)
    i_b = lane // Hq
    i_h = lane % Hq
    i_hkv = i_h // group
    row = i_m * BM
    start, end = row_ranges(seen, i_b, row + tl.arange(0, BM), n_q, n_kv, CAUSAL, INT)
    lo, hi, _, _ = key_hull(seen, start, end, row, n_q, n_kv, BM, CAUSAL)
    first = lo // BN * BN
    stop = tl.where(lo < hi, tl.cdiv(hi, BK) * BK, first)

    segment = segments + i_block.to(INT) * (slots + 1)
    factor = rescale + i_block.to(INT) * slots * BM
    o_row = tl.arange(0, BM)
    acc0 = tl.zeros([BM, W0], tl.float32)
    if W1 > 0:
        acc1 = tl.zeros([BM, W1], tl.float32)
    moves = tl.load(segment)
    for i in tl.range(0, moves + 1):
        # Both ends are read anew: a start carried over from the last segment is lost in Triton 3.6's lowering.
        begin = tl.where(i > 0, tl.load(segment + i, mask=i > 0, other=0), first)
        last = tl.where(i < moves, tl.load(segment + 1 + i, mask=i < moves, other=0), stop)
        alpha = tl.load(factor + (i - 1) * BM + o_row, mask=(o_row >= 0) & (i > 0), other=1.0)
        acc0 *= alpha[:, None]
        if W1 > 0:
            acc1 *= alpha[:, None]
        for n in tl.range(begin, last, BK):
            a = load_tile(
                weights.first,
                weights.strides,
                i_block * 0,
                i_block * 0,
                i_block * BM,
                n,
                padded_rows,
                padded_cols,
                BM,
                BK,
                TMA,
                INT,
            )
            v0 = load_tile(v.first, v.strides, i_b, i_hkv, n, col, n_kv, D, BK, W0, TMA, INT)
            acc0 = tl.dot(a, v0, acc0, input_precision="ieee")
            if W1 > 0:
                v1 = load_tile(v.second, v.strides, i_b, i_hkv, n, col + W0, n_kv, D, BK, W1, TMA, INT)
                acc1 = tl.dot(a, v1, acc1, input_precision="ieee")
    scale = tl.load(norm + i_block.to(INT) * BM + o_row)[:, None]
    store_tile(out, out_strides, i_b, i_h, row, col, n_q, D, acc0 * scale, BM, W0, INT)
    if W1 > 0:
        store_tile(out, out_strides, i_b, i_h, row, col + W0, n_q, D, acc1 * scale, BM, W1, INT)
