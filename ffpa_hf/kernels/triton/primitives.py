"""What every Triton attention kernel does, each thing once: load a tile, bound the keys, score, mask, drop.

Device code only; it must not know who launches it. Names: `i_` a scalar index, `o_` a vector of positions, B H N D
sizes, BM and BN the rows and keys of a tile. INT is the integer type of addresses, int64 where some offset can pass
2^31. Scores are in base 2: exp2 needs no multiplication by log2(e).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# The least finite base-2 bias: finfo.min * log2(e) would be -inf, and a row of minima is an average, not a dead row.
LOWEST = tl.constexpr(-3.3e38)
BIG = tl.constexpr(2**31 - 1)

#: Arguments whose value must not make another kernel: a new length, head count or round is no reason to compile.
SIZES = (
    "Hq", "group", "n_q", "n_kv", "stats_size", "lane0", "lanes", "tile0", "tiles", "row0", "row1", "padded_rows",
    "slots", "bias_heads", "batches", "heads", "splits", "row_tiles",
)  # fmt: skip


class Operand(NamedTuple):
    """A [B, H, N, D] tensor as kernels read it: pointers, or with TMA descriptors over it, one for each box shape.

    A head dim that is no power of two is read as two boxes, first and second (else None). strides (b, h, n) count units
    of 16 bytes. A descriptor has size 1 in a dim of stride 0.
    """

    first: Any
    second: Any
    strides: Any


class Visibility(NamedTuple):
    """Which keys a row may see, and what is added to its scores. Absent parts are None, which removes their code.

    mask: uint8, bias: float, key_mask: uint8, row_start and row_end: int32, in the shapes of `AttentionInputs`.
    strides, 0 in a broadcast dim: mask (b, h, row, key), bias (b, h, row, key), key_mask (b, key), row_start (b, row),
    row_end (b, row). A mask or bias whose row dim is broadcast has None there: one vector over keys serves the tile.

    Kernels start by taking the fields and `strides[0:14]` into a new tuple: after the first loop, Triton 3.6 forgets
    the elements of an argument tuple that it took as constants, such as a stride of 1.
    """

    mask: Any
    bias: Any
    key_mask: Any
    row_start: Any
    row_end: Any
    strides: Any


class Dropout(NamedTuple):
    """rng: pointer to int64 [seed, offset], or None for no dropout. threshold: int32 bits of the uint32 limit below
    which a word is dropped. scale: 1 / (1 - p)."""

    rng: Any = None
    threshold: Any = None
    scale: Any = None


class Scores(NamedTuple):
    """slope: factor of the raw product, `scale * log2(e)`, or `2 * log2(e) * scale / softcap` under a cap.
    cap: `softcap * log2(e)`, or None."""

    slope: Any
    cap: Any = None


@triton.jit
def load_tile(
    source, strides, i_b, i_h, row, col, rows, cols,
    BR: tl.constexpr, BC: tl.constexpr, TMA: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """[BR, BC] of source[i_b, i_h, row:, col:], zero beyond `rows` and `cols`.

    source and strides are an `Operand`'s; counting strides in 16 bytes tells the compiler the alignment of every row.
    """
    if TMA:
        i_b = i_b * (strides[0] != 0)
        i_h = i_h * (strides[1] != 0)
        return source.load([i_b, i_h, row, col]).reshape([BR, BC])
    else:
        UNIT: tl.constexpr = 128 // source.dtype.element_ty.primitive_bitwidth
        o_r = row + tl.arange(0, BR)
        o_c = col + tl.arange(0, BC)
        base = source + i_b.to(INT) * strides[0] * UNIT + i_h.to(INT) * strides[1] * UNIT
        offsets = o_r.to(INT)[:, None] * strides[2] * UNIT + o_c[None, :]
        return tl.load(base + offsets, mask=(o_r < rows)[:, None] & (o_c < cols)[None, :], other=0.0)


@triton.jit
def store_tile(
    target, strides, i_b, i_h, row, col, rows, cols, tile, BR: tl.constexpr, BC: tl.constexpr, INT: tl.constexpr
):
    """Write [BR, BC] to target[i_b, i_h, row:, col:] inside `rows` and `cols`; strides as in `load_tile`."""
    UNIT: tl.constexpr = 128 // target.dtype.element_ty.primitive_bitwidth
    o_r = row + tl.arange(0, BR)
    o_c = col + tl.arange(0, BC)
    base = target + i_b.to(INT) * strides[0] * UNIT + i_h.to(INT) * strides[1] * UNIT
    offsets = o_r.to(INT)[:, None] * strides[2] * UNIT + o_c[None, :]
    tl.store(base + offsets, tile.to(target.dtype.element_ty), mask=(o_r < rows)[:, None] & (o_c < cols)[None, :])


@triton.jit
def row_ranges(seen, i_b, o_m, n_q, n_kv, CAUSAL: tl.constexpr, INT: tl.constexpr):
    """[start, end) of the keys of each row, clipped to [0, n_kv]; rows past n_q see none when intervals are given."""
    start = o_m * 0
    end = start + n_kv
    if seen.row_start is not None:
        i_b = i_b.to(INT)
        first = seen.row_start + i_b * seen.strides[10]
        last = seen.row_end + i_b * seen.strides[12]
        start = tl.maximum(tl.load(first + o_m * seen.strides[11], mask=o_m < n_q, other=0), 0)
        end = tl.minimum(tl.load(last + o_m * seen.strides[13], mask=o_m < n_q, other=0), n_kv)
    if CAUSAL:
        end = tl.minimum(end, o_m + 1)
    return start, end


@triton.jit
def key_hull(seen, start, end, row, n_q, n_kv, BM: tl.constexpr, CAUSAL: tl.constexpr):
    """The keys that some row of a tile sees, [lo, hi), and those that every row sees, [inner_lo, inner_hi).

    start and end are the tile's `row_ranges`, row its first row. lo == hi where no row sees any key.
    """
    lo = row * 0
    hi = lo + n_kv
    inner_lo = lo
    inner_hi = hi
    if seen.row_start is not None:
        o_m = row + tl.arange(0, BM)
        some = start < end
        hi = tl.max(tl.where(some, end, 0), 0)
        lo = tl.minimum(tl.min(tl.where(some, start, BIG), 0), hi)
        inner_lo = tl.max(tl.where(o_m < n_q, start, 0), 0)
        inner_hi = tl.min(tl.where(o_m < n_q, end, BIG), 0)
    else:
        if CAUSAL:
            hi = tl.minimum(hi, tl.minimum(row + BM, n_q))
            inner_hi = tl.minimum(inner_hi, row + 1)
    return lo, hi, inner_lo, inner_hi


@triton.jit
def key_phases(lo, hi, inner_lo, inner_hi, BN: tl.constexpr):
    """Borders of whole key blocks: [begin, full) must be tested, [full, tested) need not, [tested, stop) must again."""
    begin = lo // BN * BN
    stop = tl.cdiv(hi, BN) * BN
    full = tl.minimum(tl.maximum(tl.cdiv(inner_lo, BN) * BN, begin), stop)
    tested = tl.minimum(tl.maximum(inner_hi // BN * BN, full), stop)
    return begin, full, tested, stop


@triton.jit
def load_pairs(source, strides, i_b, i_h, o_m, o_n, n_q, n_kv, other, AT: tl.constexpr, INT: tl.constexpr):
    """A tile of a mask or a bias, strides[AT : AT + 4]: [BM, BN], or [1, BN] where its row dim is broadcast."""
    base = source + i_b.to(INT) * strides[AT] + i_h.to(INT) * strides[AT + 1]
    o_n = o_n[None, :]
    if strides[AT + 2] is None:
        return tl.load(base + o_n.to(INT) * strides[AT + 3], mask=o_n < n_kv, other=other)
    else:
        o_m = o_m[:, None]
        offsets = o_m.to(INT) * strides[AT + 2] + o_n.to(INT) * strides[AT + 3]
        return tl.load(base + offsets, mask=(o_m < n_q) & (o_n < n_kv), other=other)


@triton.jit
def hide(
    z, seen, i_b, i_h, o_m, o_n, start, end, n_q, n_kv,
    RANGES: tl.constexpr, TAIL: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """Scores with -inf where a key is not visible. RANGES: test each row's own range; TAIL: test only `key < n_kv`."""
    if RANGES:
        z = tl.where((o_n[None, :] >= start[:, None]) & (o_n[None, :] < end[:, None]), z, float("-inf"))
    else:
        if TAIL:
            z = tl.where((o_n < n_kv)[None, :], z, float("-inf"))
    if seen.key_mask is not None:
        base = seen.key_mask + i_b.to(INT) * seen.strides[8]
        there = tl.load(base + o_n * seen.strides[9], mask=o_n < n_kv, other=0)
        z = tl.where((there != 0)[None, :], z, float("-inf"))
    if seen.mask is not None:
        keep = load_pairs(seen.mask, seen.strides, i_b, i_h, o_m, o_n, n_q, n_kv, 0, 0, INT)
        z = tl.where(keep != 0, z, float("-inf"))
    return z


@triton.jit
def base2_scores(s, scores, seen, i_b, i_h, o_m, o_n, n_q, n_kv, INT: tl.constexpr):
    """Raw products to base-2 logits: scale, cap (tanh through exp2), then the bias. Returns (logits, capped scores)."""
    z = s * scores.slope
    if scores.cap is not None:
        z = scores.cap * (1.0 - 2.0 / (tl.exp2(z) + 1.0))
    capped = z
    if seen.bias is not None:
        b = load_pairs(seen.bias, seen.strides, i_b, i_h, o_m, o_n, n_q, n_kv, 0.0, 4, INT).to(tl.float32)
        z += tl.where(b == float("-inf"), b, tl.maximum(b * LOG2E, LOWEST))
    return z, capped


@triton.jit
def kept(dropout, lane, row, col, BM: tl.constexpr, BN: tl.constexpr):
    """Bool [BM, BN]: the probabilities that dropout keeps in rows [row, row + BM) of one lane, as `kept_rows`."""
    return kept_rows(dropout, lane, row + tl.arange(0, BM), col, BM, BN)


@triton.jit
def kept_rows(dropout, lane, o_m, col, BM: tl.constexpr, BN: tl.constexpr):
    """Bool [BM, BN]: the probabilities that dropout keeps, as `philox_keep_mask` defines; col is a multiple of 4.

    lane: batch * Hq + head of the rows o_m [BM], a scalar or [BM, 1].
    """
    seed = tl.load(dropout.rng)
    offset = tl.load(dropout.rng + 1).to(tl.uint32)
    quad = (col // 4 + tl.arange(0, BN // 4)).to(tl.uint32)[None, :]
    zero = tl.zeros([BM, BN // 4], tl.uint32)
    o_m = o_m.to(tl.uint32)[:, None]
    w0, w1, w2, w3 = tl.philox(seed, zero + quad, zero + o_m, zero + lane.to(tl.uint32), zero + offset)
    limit = tl.full([1, 1], dropout.threshold, tl.int32).to(tl.uint32, bitcast=True)
    even = tl.join(w0 >= limit, w2 >= limit)
    odd = tl.join(w1 >= limit, w3 >= limit)
    return tl.join(even, odd).reshape([BM, BN])
