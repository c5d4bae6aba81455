"""The backward of narrow heads: one kernel makes dK, dV and leaves dS, from which a plain product makes dQ.

Device code only; tiles come from `configs`, tensors, bands and rounds from `launch`. The formulas are those of
`backward_kernels`. A program keeps a block of keys and its dK and dV while query rows pass, as in FlashAttention-2 (Dao
2023); writing dS once instead of recomputing S and dP for dQ makes it five products, and no atomic sum. Scores are held
transposed, [keys, rows]: so P and dS are ready to be multiplied from the left, and dS leaves as rows of keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ffpa_hf.kernels.triton.primitives import BIG, SIZES, Operand, Visibility, load_tile, row_ranges, store_tile


@triton.jit(do_not_specialize=SIZES)
def key_reach(
    seen, reach, tiles, n_q, n_kv,
    BN: tl.constexpr, HULL: tl.constexpr, TILES: tl.constexpr, CAUSAL: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """For each BN keys, the rows [first, last) to visit, whole tiles of HULL rows: reach int32 [B or 1, tiles, 2].

    A tile of rows belongs to them where the range from its least to its greatest visible key meets the keys, even if
    no row of it sees one of them: dQ reads dS over just that range. TILES tiles of rows are looked at at a time.
    """
    seen = Visibility(seen.mask, seen.bias, seen.key_mask, seen.row_start, seen.row_end, seen.strides[0:14])
    pid = tl.program_id(0)
    key = pid % tiles * BN
    i_b = pid // tiles
    first = key * 0 + BIG
    last = key * 0
    for row in tl.range(0, n_q, TILES * HULL):
        start, end = row_ranges(seen, i_b, row + tl.arange(0, TILES * HULL), n_q, n_kv, CAUSAL, INT)
        some = start < end
        lo = tl.min(tl.where(some, start, BIG).reshape([TILES, HULL]), 1)
        hi = tl.max(tl.where(some, end, 0).reshape([TILES, HULL]), 1)
        o_row = row + tl.arange(0, TILES) * HULL
        meets = (lo < key + BN) & (hi > key)
        first = tl.minimum(first, tl.min(tl.where(meets, o_row, BIG), 0))
        last = tl.maximum(last, tl.max(tl.where(meets, o_row + HULL, 0), 0))
    tl.store(reach + pid * 2, tl.minimum(first, last))
    tl.store(reach + pid * 2 + 1, last)


@triton.jit
def visible_probabilities(
    s, slope, pivot, seen, i_b, o_m, o_n, n_q, n_kv, TEST: tl.constexpr, RANGES: tl.constexpr, CAUSAL: tl.constexpr,
    INT: tl.constexpr,
):  # fmt: skip
    """P [keys, rows] of raw products, 0 where a key is not visible. o_n: the keys, BIG for those that no row may see.

    pivot: log2 of a row's sum of exp2(logit), +inf for a row without keys, so that its probabilities are 0.
    """
    p = tl.exp2(s * slope - pivot[None, :])
    if RANGES:
        start, end = row_ranges(seen, i_b, o_m, n_q, n_kv, CAUSAL, INT)
        if seen.row_start is not None:
            p = tl.where((o_n[:, None] >= start[None, :]) & (o_n[:, None] < end[None, :]), p, 0.0)
        else:
            p = tl.where(o_n[:, None] < end[None, :], p, 0.0)
    elif TEST:
        p = tl.where((o_n < n_kv)[:, None], p, 0.0)
    return p


@triton.jit(do_not_specialize=SIZES)
def gradient_key_value(
    q, q_tail, q_strides, k, k_tail, k_strides, v, v_tail, v_strides,
    grad_out, grad_out_tail, grad_out_strides,
    ds_out, ds_strides, dk, dk_strides, dv, dv_strides, dk_partial, dv_partial, partial_strides,
    seen, reach, reach_stride, slope, pivot, delta,
    lane0, heads, row0, row1, padded_rows, padded_cols, Hq, group, n_q, n_kv, factor,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HULL: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN_KV: tl.constexpr, TMA: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """dk, dv [keys, D0 + D1 columns] over `heads` query heads of one group and the rows in [row0, row1); dS to scratch.

    ds_out: [lanes, 1, padded_cols, padded_rows] in the input dtype, a descriptor where tiles go through TMA; ds_out, dk
    and dv may each be None. pivot, delta: fp32 [B, Hq, Nq], see `row_delta`. reach: what `key_reach` found, or None
    without intervals. Where a group is worked off in several bands, all but the LAST leave their sums in the partials
    (fp32 [1, 1, Nkv, D]) and all but the FIRST add to them.
    """
    q = Operand(q, q_tail, q_strides[0:3])
    k = Operand(k, k_tail, k_strides[0:3])
    v = Operand(v, v_tail, v_strides[0:3])
    grad_out = Operand(grad_out, grad_out_tail, grad_out_strides[0:3])
    seen = Visibility(seen.mask, seen.bias, seen.key_mask, seen.row_start, seen.row_end, seen.strides[0:14])
    INTERVALS: tl.constexpr = seen.row_start is not None
    MASKED: tl.constexpr = seen.key_mask is not None
    tiles = tl.cdiv(n_kv, BN)
    pid = tl.program_id(0)
    if CAUSAL:  # the longest blocks of some units first, a few units at a time so that their rows stay in L2
        GROUP: tl.constexpr = 8
        band = pid // (GROUP * tiles)
        size = tl.minimum(tl.num_programs(0) // tiles - band * GROUP, GROUP)
        rest = pid % (GROUP * tiles)
        i_unit = band * GROUP + rest % size
        key = rest // size * BN
    else:
        i_unit = pid // tiles
        key = pid % tiles * BN
    lane = lane0 + i_unit * heads
    i_b = lane // Hq
    i_h = lane % Hq
    i_hkv = i_h // group

    lo = row0
    hi = row1
    if INTERVALS:
        bounds = reach + i_b * reach_stride + key // BN * 2
        lo = tl.maximum(lo, tl.load(bounds))
        hi = tl.minimum(hi, tl.load(bounds + 1))
    elif CAUSAL:
        lo = tl.maximum(lo, key // HULL * HULL)
    steps = tl.where(lo < hi, tl.cdiv(hi - lo, BM), 0)

    o_n = key + tl.arange(0, BN)
    visible = o_n < n_kv
    if MASKED:
        there = tl.load(seen.key_mask + i_b.to(INT) * seen.strides[8] + o_n * seen.strides[9], mask=visible, other=0)
        visible = there != 0
    o_n = tl.where(visible, o_n, BIG)

    # k0, v0 [BN, D0]; k1, v1 [BN, D1]
    k0 = load_tile(k.first, k.strides, i_b, i_hkv, key, 0, n_kv, D, BN, D0, TMA, INT)
    v0 = load_tile(v.first, v.strides, i_b, i_hkv, key, 0, n_kv, D, BN, D0, TMA, INT)
    dk0 = tl.zeros([BN, D0], tl.float32)
    dv0 = tl.zeros([BN, D0], tl.float32)
    if D1 > 0:
        k1 = load_tile(k.second, k.strides, i_b, i_hkv, key, D0, n_kv, D, BN, D1, TMA, INT)
        v1 = load_tile(v.second, v.strides, i_b, i_hkv, key, D0, n_kv, D, BN, D1, TMA, INT)
        dk1 = tl.zeros([BN, D1], tl.float32)
        dv1 = tl.zeros([BN, D1], tl.float32)

    for t in tl.range(0, steps * heads):  # one loop over heads and rows, so that loads never drain between heads
        head = t // steps
        row = lo + t % steps * BM
        i_lane = i_unit * heads + head
        o_m = row + tl.arange(0, BM)
        rows = (lane + head).to(INT) * n_q + o_m
        # q0, g0 [BM, D0]; q1, g1 [BM, D1]; s, p, dp, ds [BN, BM]
        q0 = load_tile(q.first, q.strides, i_b, i_h + head, row, 0, n_q, D, BM, D0, TMA, INT)
        s = tl.dot(k0, tl.trans(q0), input_precision="ieee")
        if D1 > 0:
            q1 = load_tile(q.second, q.strides, i_b, i_h + head, row, D0, n_q, D, BM, D1, TMA, INT)
            s = tl.dot(k1, tl.trans(q1), s, input_precision="ieee")
        top = tl.load(pivot + rows, mask=o_m < n_q, other=float("inf"))
        p = visible_probabilities(
            s, slope, top, seen, i_b, o_m, o_n, n_q, n_kv, MASKED or not EVEN_KV, CAUSAL or INTERVALS, CAUSAL, INT
        )
        g0 = load_tile(grad_out.first, grad_out.strides, i_b, i_h + head, row, 0, n_q, D, BM, D0, TMA, INT)
        if D1 > 0:
            g1 = load_tile(grad_out.second, grad_out.strides, i_b, i_h + head, row, D0, n_q, D, BM, D1, TMA, INT)
        if dv is not None:
            weights = p.to(g0.dtype)
            dv0 = tl.dot(weights, g0, dv0, input_precision="ieee")
            if D1 > 0:
                dv1 = tl.dot(weights, g1, dv1, input_precision="ieee")
        if dk is not None or ds_out is not None:
            dp = tl.dot(v0, tl.trans(g0), input_precision="ieee")
            if D1 > 0:
                dp = tl.dot(v1, tl.trans(g1), dp, input_precision="ieee")
            shift = tl.load(delta + rows, mask=o_m < n_q, other=0.0)
            ds = (p * (dp - shift[None, :])).to(q0.dtype)
            if dk is not None:
                dk0 = tl.dot(ds, q0, dk0, input_precision="ieee")
                if D1 > 0:
                    dk1 = tl.dot(ds, q1, dk1, input_precision="ieee")
            if ds_out is not None:
                if TMA:
                    ds_out.store([i_lane, 0, key, row - row0], ds.reshape([1, 1, BN, BM]))
                else:
                    store_tile(
                        ds_out, ds_strides, i_lane, i_lane * 0, key, row - row0, padded_cols, padded_rows, ds, BN, BM,
                        INT,
                    )  # fmt: skip

    if dk is not None:
        finish(
            dk, dk_strides, dk_partial, partial_strides, i_b, i_hkv, key, 0, n_kv, D, dk0, factor, BN, D0, FIRST, LAST,
            INT,
        )  # fmt: skip
        if D1 > 0:
            finish(
                dk, dk_strides, dk_partial, partial_strides, i_b, i_hkv, key, D0, n_kv, D, dk1, factor, BN, D1, FIRST,
                LAST, INT,
            )  # fmt: skip
    if dv is not None:
        finish(
            dv, dv_strides, dv_partial, partial_strides, i_b, i_hkv, key, 0, n_kv, D, dv0, 1.0, BN, D0, FIRST, LAST, INT
        )  # fmt: skip
        if D1 > 0:
            finish(
                dv, dv_strides, dv_partial, partial_strides, i_b, i_hkv, key, D0, n_kv, D, dv1, 1.0, BN, D1, FIRST,
                LAST, INT,
            )  # fmt: skip


@triton.jit
def finish(
    grad, strides, partial, partial_strides, i_b, i_hkv, key, col, n_kv, D, acc, factor,
    BN: tl.constexpr, W: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """Write a block of a gradient, or of the sum that the next band goes on with."""
    zero = key * 0
    if not FIRST:
        acc += load_tile(partial, partial_strides, zero, zero, key, col, n_kv, D, BN, W, False, INT)
    if LAST:
        store_tile(grad, strides, i_b, i_hkv, key, col, n_kv, D, acc * factor, BN, W, INT)
    else:
        store_tile(partial, partial_strides, zero, zero, key, col, n_kv, D, acc, BN, W, INT)
