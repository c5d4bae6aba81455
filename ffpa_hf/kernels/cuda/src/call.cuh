// One attention call as the host describes it, and what a query row may see. Device code only; knows no tile.
//
// Compile-time switches: CAUSAL, INTERVALS (row ranges), MASK (bool), KEY_MASK, BIAS (0 none, 1 input dtype, 2 fp32),
// DROPOUT. Scores are in base 2: exp2 needs no multiplication by log2(e).
#pragma once
#include "ptx.cuh"

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
// The least finite base-2 bias: finfo.min * log2(e) would be -inf, and a row of minima is an average, not a dead row.
#define LOWEST -3.3e38f

// A [B, H, N, D] tensor with a contiguous last dim; strides in elements, 0 in a broadcast dim.
struct View {
    u16* data;
    i64 b, h, n;
};

// A [B, H, Nq, Nkv] mask or bias; strides in elements, 0 in a broadcast dim.
struct Pairs {
    const void* data;
    i64 b, h, q, k;
};

// A [B, N] vector per batch; strides in elements, 0 where the batch is broadcast.
struct Vector {
    const void* data;
    i64 b, n;
};

// Kernel argument; the host packs the same fields in the same order (launch.py).
struct Call {
    View query, key, value, out;
    float* lse;    // [B, Hq, Nq], natural logarithm
    float* stats;  // [2, B, Hq, Nq] or null: row maximum and log2 of the sum relative to it
    i64 stats_size;
    Pairs mask, bias;
    Vector key_mask, row_start, row_end;
    const i64* rng;  // seed, offset
    float slope;     // scale * log2(e)
    u32 threshold;   // a random word below it is dropped
    float keep_scale;  // 1 / (1 - p)
    int heads, group, n_q, n_kv, tiles;
};

struct Range {
    int start, end;
};

// The keys [start, end) of one query row, clipped to what exists; empty past the last row.
__device__ __forceinline__ Range row_range(const Call& call, int batch, int row) {
    Range range = {0, call.n_kv};
    if (row >= call.n_q) return {0, 0};
#if INTERVALS
    const int* start = static_cast<const int*>(call.row_start.data);
    const int* end = static_cast<const int*>(call.row_end.data);
    range.start = max(start[batch * call.row_start.b + row * call.row_start.n], 0);
    range.end = min(end[batch * call.row_end.b + row * call.row_end.n], call.n_kv);
#endif
#if CAUSAL
    range.end = min(range.end, row + 1);
#endif
    return range;
}

// Keys [lo, hi) that some row of a tile sees, empty where lo >= hi, and [inner_lo, inner_hi) that every row does.
struct Hull {
    int lo, hi, inner_lo, inner_hi;
};

// The hull of rows [row0, row0 + ROWS), ROWS a multiple of 32. For whole warps: lanes read the ranges of different rows,
// AT_ONCE of each lane's at a time.
template <int ROWS, int AT_ONCE = ROWS / 32>
__device__ __forceinline__ Hull hull_of(const Call& call, int batch, int row0, int lane) {
#if INTERVALS
    Hull hull = {0x7fffffff, 0, 0, 0x7fffffff};
#pragma unroll AT_ONCE
    for (int i = 0; i < ROWS; i += 32) {
        if (row0 + i + lane >= call.n_q) continue;
        const Range range = row_range(call, batch, row0 + i + lane);
        if (range.start < range.end) hull.lo = min(hull.lo, range.start), hull.hi = max(hull.hi, range.end);
        hull.inner_lo = max(hull.inner_lo, range.start), hull.inner_hi = min(hull.inner_hi, range.end);
    }
    hull.hi = __reduce_max_sync(~0u, hull.hi);
    hull.lo = min(__reduce_min_sync(~0u, hull.lo), hull.hi);
    hull.inner_lo = __reduce_max_sync(~0u, hull.inner_lo);
    hull.inner_hi = __reduce_min_sync(~0u, hull.inner_hi);
    return hull;
#elif CAUSAL
    return {0, min(call.n_kv, min(row0 + ROWS, call.n_q)), 0, min(call.n_kv, row0 + 1)};
#else
    return {0, call.n_kv, 0, call.n_kv};
#endif
}

// Base-2 logit of a raw product: scaled, biased, -inf where the key is hidden. `tested`: the row's range is checked too.
struct Seen {
    const u8* mask;      // at (b, h, 0, 0)
    const void* bias;    // at (b, h, 0, 0)
    const u8* key_mask;  // at (b, 0)

    __device__ __forceinline__ Seen(const Call& call, int b, int h)
        : mask(static_cast<const u8*>(call.mask.data) + b * call.mask.b + h * call.mask.h),
          bias(static_cast<const char*>(call.bias.data) +
               (b * call.bias.b + h * call.bias.h) * (BIAS == 2 ? sizeof(float) : sizeof(u16))),
          key_mask(static_cast<const u8*>(call.key_mask.data) + b * call.key_mask.b) {}

    __device__ __forceinline__ float logit(
        const Call& call, float product, int row, int key, Range range, bool tested) const {
        float z = product * call.slope;
        bool visible = !tested || ((!INTERVALS || key >= range.start) && key < range.end);
        [[maybe_unused]] const bool there = row < call.n_q && key < call.n_kv;
#if BIAS
        if (there) {
            i64 at = row * call.bias.q + key * call.bias.k;
            float b = BIAS == 2 ? static_cast<const float*>(bias)[at] : widen(static_cast<const u16*>(bias)[at]);
            z += b == -infinity() ? b : fmaxf(b * LOG2E, LOWEST);
        }
#endif
#if MASK
        visible = visible && there && mask[row * call.mask.q + key * call.mask.k];
#endif
#if KEY_MASK
        visible = visible && key < call.n_kv && key_mask[key * call.key_mask.n];
#endif
        return visible ? z : -infinity();
    }
};

// Two of the four words of Philox 4x32-10 (Salmon et al. 2011) at counter (key / 4, row, lane, offset); `key` is even.
// They decide for key and key + 1, as kernels/philox.py defines.
__device__ __forceinline__ void random_pair(u32 (&pair)[2], u64 seed, u32 offset, u32 lane, u32 row, u32 key) {
    u32 c0 = key >> 2, c1 = row, c2 = lane, c3 = offset;
    u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        u32 high0 = __umulhi(c0, 0xD2511F53u), low0 = c0 * 0xD2511F53u;
        u32 high1 = __umulhi(c2, 0xCD9E8D57u), low1 = c2 * 0xCD9E8D57u;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    pair[0] = key & 2 ? c2 : c0;
    pair[1] = key & 2 ? c3 : c1;
}
