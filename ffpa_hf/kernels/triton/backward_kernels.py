"""The backward kernels: probabilities and score gradients go once to bounded scratch, then plain products read them.

Device code only; tiles come from `configs`, tensors, bands and rounds from `launch`. With S = Q K^T, P = softmax:
dV = P^T dO, dP = dO V^T, dS = P (dP - delta), dQ = scale dS K, dK = scale dS^T Q, delta = rowsum(dO O) - dLSE.
Nothing is added atomically, so results do not depend on the order of programs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ffpa_hf.kernels.triton.primitives import (
    BIG,
    LOG2E,
    SIZES,
    Operand,
    Visibility,
    base2_scores,
    hide,
    kept,
    key_hull,
    load_tile,
    row_ranges,
    store_tile,
)


class QueryRanges(NamedTuple):
    """start, end: int32 rows [start, end) that can see each 64-key block, or None; strides (b, block, b, block)."""

    start: Any = None
    end: Any = None
    strides: Any = None


class Saved(NamedTuple):
    """What the forward left for each row, fp32 [B, Hq, Nq] contiguous: lse, stats (as in the forward, or None) of
    stats_size elements per half; and delta."""

    lse: Any
    stats: Any
    stats_size: Any
    delta: Any


@triton.jit
def query_hull(ranges, i_b, key, n_q, n_kv, BN: tl.constexpr, CAUSAL: tl.constexpr, INT: tl.constexpr):
    """The rows that can see a key of [key, key + BN), as [lo, hi); lo >= hi for none. BN and key: multiples of 64."""
    lo = key * 0
    hi = lo + n_q
    if ranges.start is not None:
        o = key // 64 + tl.arange(0, BN // 64)
        first = ranges.start + i_b.to(INT) * ranges.strides[0] + o * ranges.strides[1]
        last = ranges.end + i_b.to(INT) * ranges.strides[2] + o * ranges.strides[3]
        first = tl.load(first, mask=o * 64 < n_kv, other=BIG)
        last = tl.load(last, mask=o * 64 < n_kv, other=0)
        some = first < last
        hi = tl.minimum(tl.max(tl.where(some, last, 0), 0), n_q)
        lo = tl.minimum(tl.maximum(tl.min(tl.where(some, first, BIG), 0), 0), hi)
    if CAUSAL:
        lo = tl.minimum(tl.maximum(lo, key), hi)
    return lo, hi


@triton.jit(do_not_specialize=SIZES)
def row_delta(
    out, grad_out, grad_lse, lse, delta, pivot, out_strides, go_strides, grad_lse_strides, Hq, n_q,
    D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """delta [B, Hq, Nq] = rowsum(grad_out * out) - grad_lse; grad_lse fp32 with strides (b, h, n), or None.

    pivot [B, Hq, Nq]: lse in base 2, and +inf for a row without keys: what it subtracts makes its probabilities 0.
    """
    grad_lse_strides = grad_lse_strides[0:3]
    tiles = tl.cdiv(n_q, BM)
    pid = tl.program_id(0)
    row = pid % tiles * BM
    lane = pid // tiles
    i_b = lane // Hq
    i_h = lane % Hq
    total = tl.zeros([BM], tl.float32)
    for d in tl.range(0, D, BD):
        o = load_tile(out, out_strides, i_b, i_h, row, d, n_q, D, BM, BD, False, INT)
        g = load_tile(grad_out, go_strides, i_b, i_h, row, d, n_q, D, BM, BD, False, INT)
        total += tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    o_m = row + tl.arange(0, BM)
    if grad_lse is not None:
        base = grad_lse + i_b.to(INT) * grad_lse_strides[0] + i_h.to(INT) * grad_lse_strides[1]
        total -= tl.load(base + o_m.to(INT) * grad_lse_strides[2], mask=o_m < n_q, other=0.0)
    rows = lane.to(INT) * n_q + o_m
    tl.store(delta + rows, total, mask=o_m < n_q)
    top = tl.load(lse + rows, mask=o_m < n_q, other=0.0)
    tl.store(pivot + rows, tl.where(top == float("-inf"), float("inf"), top * LOG2E), mask=o_m < n_q)


@triton.jit
def product(
    a, b, i_b, i_ha, i_hb, row_a, row_b, n_a, n_b, stop,
    D: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """fp32 [BM, BN] = a[row_a:, :stop] b[row_b:, :stop]^T, CHUNK columns at a time."""
    total = tl.zeros([BM, BN], tl.float32)
    for d in tl.range(0, stop, CHUNK):
        a_d = load_tile(a.first, a.strides, i_b, i_ha, row_a, d, n_a, D, BM, CHUNK, TMA, INT)
        b_d = load_tile(b.first, b.strides, i_b, i_hb, row_b, d, n_b, D, BN, CHUNK, TMA, INT)
        total = tl.dot(a_d, tl.trans(b_d), total, input_precision="ieee")
    return total


@triton.jit
def probabilities(
    s, scores, seen, saved, lane, i_b, i_h, o_m, o_n, start, end, n_q, n_kv,
    RANGES: tl.constexpr, EVEN_KV: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """Raw products to P [BM, BN], zero where nothing is visible, and the capped base-2 scores."""
    z, capped = base2_scores(s, scores, seen, i_b, i_h, o_m, o_n, n_q, n_kv, INT)
    z = hide(z, seen, i_b, i_h, o_m, o_n, start, end, n_q, n_kv, RANGES, not EVEN_KV, INT)
    rows = lane.to(INT) * n_q + o_m
    # A dead row subtracts +inf: its probabilities are 0 without a test for each element.
    if saved.stats is not None:
        top = tl.load(saved.stats + rows, mask=o_m < n_q, other=float("-inf"))
        log2_l = tl.load(saved.stats + saved.stats_size + rows, mask=o_m < n_q, other=0.0)
        dead = top == float("-inf")
        z = (z - tl.where(dead, 0.0, top)[:, None]) - tl.where(dead, float("inf"), log2_l)[:, None]
    else:
        lse = tl.load(saved.lse + rows, mask=o_m < n_q, other=float("-inf"))
        z -= tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)[:, None]
    return tl.exp2(z), capped


@triton.jit
def scores_tile(
    q, k, v, grad_out, p_out, ds_out, scratch_strides, seen, dropout, scores, saved,
    lane, i_lane, i_b, i_h, i_hkv, row, key, row0, stop, padded_rows, padded_cols, n_q, n_kv,
    D: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RANGES: tl.constexpr, EVEN_KV: tl.constexpr, CAUSAL: tl.constexpr, TMA: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """Make and write one [BM, BN] tile of P and dS; the products run over the first `stop` columns of the head dim."""
    o_m = row + tl.arange(0, BM)
    o_n = key + tl.arange(0, BN)
    start, end = row_ranges(seen, i_b, o_m, n_q, n_kv, CAUSAL, INT)
    s = product(q, k, i_b, i_h, i_hkv, row, key, n_q, n_kv, stop, D, CHUNK, BM, BN, TMA, INT)
    p, capped = probabilities(
        s, scores, seen, saved, lane, i_b, i_h, o_m, o_n, start, end, n_q, n_kv, RANGES, EVEN_KV, INT
    )
    if dropout.rng is not None:
        keep = kept(dropout, lane, row, key, BM, BN)
    if p_out is not None:
        dropped = p
        if dropout.rng is not None:
            dropped = tl.where(keep, p * dropout.scale, 0.0)
        store_tile(
            p_out, scratch_strides, i_lane, i_lane * 0, row - row0, key, padded_rows, padded_cols, dropped, BM, BN, INT
        )
    if ds_out is not None:
        if scores.cap is not None:  # tanh' = 1 - tanh^2
            p *= 1.0 - (capped / scores.cap) * (capped / scores.cap)
        dp = product(grad_out, v, i_b, i_h, i_hkv, row, key, n_q, n_kv, stop, D, CHUNK, BM, BN, TMA, INT)
        if dropout.rng is not None:
            dp = tl.where(keep, dp * dropout.scale, 0.0)
        rows = lane.to(INT) * n_q + o_m
        delta = tl.load(saved.delta + rows, mask=o_m < n_q, other=0.0)
        ds = p * (dp - delta[:, None])
        store_tile(
            ds_out, scratch_strides, i_lane, i_lane * 0, row - row0, key, padded_rows, padded_cols, ds, BM, BN, INT
        )


@triton.jit(do_not_specialize=SIZES)
def backward_scores(
    q, q_tail, q_strides, k, k_tail, k_strides, v, v_tail, v_strides,
    grad_out, grad_out_tail, grad_out_strides,
    p_out, ds_out, scratch_strides,
    seen, ranges, dropout, scores, saved,
    lane0, row0, row1, padded_rows, padded_cols, Hq, group, n_q, n_kv,
    D: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HULL_M: tl.constexpr, HULL_N: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN_KV: tl.constexpr, TMA: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """One tile of P (dropped and rescaled) and of dS, for rows [row0, row1) of the heads from lane0 on, to scratch.

    p_out, ds_out: [lanes, 1, padded_rows, padded_cols] in the input dtype; either may be None. A tile is written where
    the keys seen by its HULL_M rows reach it (dQ reads it) or the rows seeing its HULL_N keys do (dK and dV read it);
    other tiles are left as they are. Every written tile is written whole, with zeros where nothing is visible.
    """
    q = Operand(q, q_tail, q_strides[0:3])
    k = Operand(k, k_tail, k_strides[0:3])
    v = Operand(v, v_tail, v_strides[0:3])
    grad_out = Operand(grad_out, grad_out_tail, grad_out_strides[0:3])
    seen = Visibility(seen.mask, seen.bias, seen.key_mask, seen.row_start, seen.row_end, seen.strides[0:14])
    saved = Saved(saved.lse, saved.stats, saved.stats_size, saved.delta)
    RANGES: tl.constexpr = CAUSAL or seen.row_start is not None
    GROUP: tl.constexpr = 8  # row tiles visited together, so that their K and V tiles are read from L2 once
    tiles_m = tl.cdiv(row1 - row0, BM)
    tiles_n = tl.cdiv(n_kv, BN)
    pid = tl.program_id(0)
    i_lane = pid // (tiles_m * tiles_n)
    pid = pid % (tiles_m * tiles_n)
    band = pid // (GROUP * tiles_n)
    size = tl.minimum(tiles_m - band * GROUP, GROUP)
    row = row0 + (band * GROUP + pid % (GROUP * tiles_n) % size) * BM
    key = pid % (GROUP * tiles_n) // size * BN

    lane = lane0 + i_lane
    i_b = lane // Hq
    i_h = lane % Hq
    i_hkv = i_h // group

    if RANGES:
        row_h = row // HULL_M * HULL_M
        start, end = row_ranges(seen, i_b, row_h + tl.arange(0, HULL_M), n_q, n_kv, CAUSAL, INT)
        lo, hi, _, _ = key_hull(seen, start, end, row_h, n_q, n_kv, HULL_M, CAUSAL)
        first, last = query_hull(ranges, i_b, key // HULL_N * HULL_N, n_q, n_kv, HULL_N, CAUSAL, INT)
        covered = (lo < key + BN) & (hi > key) & (lo < hi)
        wanted = (first < row + BM) & (last > row) & (first < last)
        # Nothing visible: no product is made, and `hide` turns every probability to 0.
        stop = tl.where(covered, D, 0)
        if covered | wanted:  # not an early return: Triton 3.6 loses the None fields of tuples after one
            scores_tile(
                q, k, v, grad_out, p_out, ds_out, scratch_strides, seen, dropout, scores, saved,
                lane, i_lane, i_b, i_h, i_hkv, row, key, row0, stop, padded_rows, padded_cols, n_q, n_kv,
                D, CHUNK, BM, BN, RANGES, EVEN_KV, CAUSAL, TMA, INT,
            )  # fmt: skip
    else:
        scores_tile(
            q, k, v, grad_out, p_out, ds_out, scratch_strides, seen, dropout, scores, saved,
            lane, i_lane, i_b, i_h, i_hkv, row, key, row0, row * 0 + D, padded_rows, padded_cols, n_q, n_kv,
            D, CHUNK, BM, BN, RANGES, EVEN_KV, CAUSAL, TMA, INT,
        )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def gradient_query(
    ds, ds_tail, ds_strides, k, k_tail, k_strides,
    dq, dq_strides, seen,
    lane0, row0, row1, padded_rows, padded_cols, Hq, group, n_q, n_kv, factor,
    D: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, SLICES: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    KEYS_FIRST: tl.constexpr, CAUSAL: tl.constexpr, TMA: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """dq[rows, W0 + W1 columns] = factor * dS K over the keys that some row of the tile sees.

    ds: [lanes, 1, padded_rows, padded_cols], or with those two exchanged where KEYS_FIRST.
    """
    ds = Operand(ds, ds_tail, ds_strides[0:3])
    k = Operand(k, k_tail, k_strides[0:3])
    tiles = tl.cdiv(row1 - row0, BM)
    pid = tl.program_id(0)
    col = pid % SLICES * (W0 + W1)
    i_m = (pid // SLICES) % tiles
    i_lane = pid // SLICES // tiles
    if CAUSAL:
        i_m = tiles - 1 - i_m
    row = row0 + i_m * BM
    lane = lane0 + i_lane
    i_b = lane // Hq
    i_h = lane % Hq
    i_hkv = i_h // group
    start, end = row_ranges(seen, i_b, row + tl.arange(0, BM), n_q, n_kv, CAUSAL, INT)
    lo, hi, _, _ = key_hull(seen, start, end, row, n_q, n_kv, BM, CAUSAL)

    acc0 = tl.zeros([BM, W0], tl.float32)
    if W1 > 0:
        acc1 = tl.zeros([BM, W1], tl.float32)
    for n in tl.range(lo // BK * BK, hi, BK):
        if KEYS_FIRST:
            a = load_tile(
                ds.first, ds.strides, i_lane, i_lane * 0, n, row - row0, padded_cols, padded_rows, BK, BM, TMA, INT
            )
            a = tl.trans(a)
        else:
            a = load_tile(
                ds.first, ds.strides, i_lane, i_lane * 0, row - row0, n, padded_rows, padded_cols, BM, BK, TMA, INT
            )
        k0 = load_tile(k.first, k.strides, i_b, i_hkv, n, col, n_kv, D, BK, W0, TMA, INT)
        acc0 = tl.dot(a, k0, acc0, input_precision="ieee")
        if W1 > 0:
            k1 = load_tile(k.second, k.strides, i_b, i_hkv, n, col + W0, n_kv, D, BK, W1, TMA, INT)
            acc1 = tl.dot(a, k1, acc1, input_precision="ieee")
    store_tile(dq, dq_strides, i_b, i_h, row, col, row1, D, acc0 * factor, BM, W0, INT)
    if W1 > 0:
        store_tile(dq, dq_strides, i_b, i_h, row, col + W0, row1, D, acc1 * factor, BM, W1, INT)


@triton.jit(do_not_specialize=SIZES)
def gradient_key(
    s, s_tail, s_strides, x, x_tail, x_strides,
    grad, grad_strides, partial, partial_strides, ranges,
    lane0, heads, row0, row1, padded_rows, padded_cols, Hq, group, n_q, n_kv, factor,
    D: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, SLICES: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, CAUSAL: tl.constexpr, TMA: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """grad[keys, W0 + W1 columns] = factor * s^T x over `heads` query heads of one group and the rows in [row0, row1).

    dK: s is dS and x is Q; dV: s is P and x is dO. Where a group is worked off in several bands, all but the LAST leave
    their sum in partial (fp32 [1, 1, Nkv, D]) and all but the FIRST start from it.
    """
    s = Operand(s, s_tail, s_strides[0:3])
    x = Operand(x, x_tail, x_strides[0:3])
    tiles = tl.cdiv(n_kv, BN)
    pid = tl.program_id(0)
    col = pid % SLICES * (W0 + W1)
    key = (pid // SLICES) % tiles * BN
    i_unit = pid // SLICES // tiles
    lane = lane0 + i_unit * heads
    i_b = lane // Hq
    i_h = lane % Hq
    i_hkv = i_h // group
    lo, hi = query_hull(ranges, i_b, key, n_q, n_kv, BN, CAUSAL, INT)
    lo = tl.maximum(lo, row0)
    hi = tl.minimum(hi, row1)
    steps = tl.where(lo < hi, tl.cdiv(hi, BK) - lo // BK, 0)
    lo = lo // BK * BK

    acc0 = tl.zeros([BN, W0], tl.float32)
    if W1 > 0:
        acc1 = tl.zeros([BN, W1], tl.float32)
    if not FIRST:
        acc0 = load_tile(partial, partial_strides, key * 0, key * 0, key, col, n_kv, D, BN, W0, False, INT)
        if W1 > 0:
            acc1 = load_tile(partial, partial_strides, key * 0, key * 0, key, col + W0, n_kv, D, BN, W1, False, INT)
    for t in tl.range(0, steps * heads):  # one loop over heads and rows, so that loads never drain between heads
        head = t // steps
        row = lo + t % steps * BK
        i_lane = i_unit * heads + head
        a = load_tile(
            s.first, s.strides, i_lane, i_lane * 0, row - row0, key, padded_rows, padded_cols, BK, BN, TMA, INT
        )
        x0 = load_tile(x.first, x.strides, i_b, i_h + head, row, col, n_q, D, BK, W0, TMA, INT)
        acc0 = tl.dot(tl.trans(a), x0, acc0, input_precision="ieee")
        if W1 > 0:
            x1 = load_tile(x.second, x.strides, i_b, i_h + head, row, col + W0, n_q, D, BK, W1, TMA, INT)
            acc1 = tl.dot(tl.trans(a), x1, acc1, input_precision="ieee")
    if LAST:
        store_tile(grad, grad_strides, i_b, i_hkv, key, col, n_kv, D, acc0 * factor, BN, W0, INT)
        if W1 > 0:
            store_tile(grad, grad_strides, i_b, i_hkv, key, col + W0, n_kv, D, acc1 * factor, BN, W1, INT)
    else:
        store_tile(partial, partial_strides, key * 0, key * 0, key, col, n_kv, D, acc0, BN, W0, INT)
        if W1 > 0:
            store_tile(partial, partial_strides, key * 0, key * 0, key, col + W0, n_kv, D, acc1, BN, W1, INT)


@triton.jit(do_not_specialize=SIZES)
def gradient_bias(
    q, q_tail, q_strides, k, k_tail, k_strides, v, v_tail, v_strides,
    grad_out, grad_out_tail, grad_out_strides,
    dbias, dbias_strides,
    seen, dropout, scores, saved,
    bias_heads, batches, heads, Hq, group, n_q, n_kv,
    D: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PER_ROW: tl.constexpr,
    PER_KEY: tl.constexpr, CAUSAL: tl.constexpr, EVEN_KV: tl.constexpr, TMA: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """One tile of the bias's own shape; its strides (b, h, row, key) are 0 in a dim of size 1.

    Sums dS (before the cap's derivative) in fp32, in a fixed order, over what the bias is broadcast along: `batches`
    and `heads` (1 where it has that dim), all row tiles unless PER_ROW, all key tiles unless PER_KEY.
    """
    q = Operand(q, q_tail, q_strides[0:3])
    k = Operand(k, k_tail, k_strides[0:3])
    v = Operand(v, v_tail, v_strides[0:3])
    grad_out = Operand(grad_out, grad_out_tail, grad_out_strides[0:3])
    seen = Visibility(seen.mask, seen.bias, seen.key_mask, seen.row_start, seen.row_end, seen.strides[0:14])
    saved = Saved(saved.lse, saved.stats, saved.stats_size, saved.delta)
    dbias_strides = dbias_strides[0:4]
    RANGES: tl.constexpr = CAUSAL or seen.row_start is not None
    tiles_m = tl.cdiv(n_q, BM)
    tiles_n = tl.cdiv(n_kv, BN)
    own_m = tiles_m * 0 + 1
    own_n = own_m
    if PER_ROW:
        own_m = tiles_m
        tiles_m = tiles_m * 0 + 1
    if PER_KEY:
        own_n = tiles_n
        tiles_n = tiles_n * 0 + 1
    pid = tl.program_id(0)
    own_key = pid % own_n * BN
    own_row = (pid // own_n) % own_m * BM
    own_head = pid // own_n // own_m % bias_heads
    own_batch = pid // own_n // own_m // bias_heads

    acc = tl.zeros([BM, BN], tl.float32)
    for t in tl.range(0, batches * heads * tiles_m * tiles_n):
        key = own_key + t % tiles_n * BN
        row = own_row + t // tiles_n % tiles_m * BM
        i_h = own_head + t // tiles_n // tiles_m % heads
        i_b = own_batch + t // tiles_n // tiles_m // heads
        lane = i_b * Hq + i_h
        i_hkv = i_h // group
        o_m = row + tl.arange(0, BM)
        o_n = key + tl.arange(0, BN)
        start, end = row_ranges(seen, i_b, o_m, n_q, n_kv, CAUSAL, INT)
        stop = key * 0 + D
        if RANGES:
            lo, hi, _, _ = key_hull(seen, start, end, row, n_q, n_kv, BM, CAUSAL)
            stop = tl.where((lo < key + BN) & (hi > key), D, 0)
        s = product(q, k, i_b, i_h, i_hkv, row, key, n_q, n_kv, stop, D, CHUNK, BM, BN, TMA, INT)
        p, _ = probabilities(
            s, scores, seen, saved, lane, i_b, i_h, o_m, o_n, start, end, n_q, n_kv, RANGES, EVEN_KV, INT
        )
        dp = product(grad_out, v, i_b, i_h, i_hkv, row, key, n_q, n_kv, stop, D, CHUNK, BM, BN, TMA, INT)
        if dropout.rng is not None:
            dp = tl.where(kept(dropout, lane, row, key, BM, BN), dp * dropout.scale, 0.0)
        delta = tl.load(saved.delta + lane.to(INT) * n_q + o_m, mask=o_m < n_q, other=0.0)
        acc += p * (dp - delta[:, None])

    o_m = own_row + tl.arange(0, BM)
    o_n = own_key + tl.arange(0, BN)
    base = dbias + own_batch.to(INT) * dbias_strides[0] + own_head.to(INT) * dbias_strides[1]
    rows = o_m.to(INT) * dbias_strides[2]
    keys = o_n.to(INT) * dbias_strides[3]
    if PER_ROW and PER_KEY:
        target = base + rows[:, None] + keys[None, :]
        tl.store(target, acc.to(dbias.dtype.element_ty), mask=(o_m < n_q)[:, None] & (o_n < n_kv)[None, :])
    elif PER_ROW:
        tl.store(base + rows, tl.sum(acc, 1).to(dbias.dtype.element_ty), mask=o_m < n_q)
    elif PER_KEY:
        tl.store(base + keys, tl.sum(acc, 0).to(dbias.dtype.element_ty), mask=o_n < n_kv)
    else:
        tl.store(base, tl.sum(tl.sum(acc, 1), 0).to(dbias.dtype.element_ty))
