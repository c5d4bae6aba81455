// One attention call for kernels that load through TMA, and what these share: the ring of slots, boxes, the tail of a row.
#pragma once
#include "call.cuh"
#include "hopper.cuh"
#include "wgmma.cuh"

// Kernel argument; the host packs the same fields in the same order. Maps are over (64 columns, rows, column chunks,
// heads, batches) where the head dim is whole chunks and a load whole boxes, else over (columns, rows, 1, heads, batches).
struct TmaCall {
    TensorMap query, key, value;
    int key_b, key_h, value_b, value_h;  // factors of a coordinate, 0 in a broadcast dim
    int lanes;                           // batches times query heads
    int section;                         // heads whose keys and values the L2 cache holds together
    Call call;
};

// A place in a ring of shared-memory slots, and the parity of its barriers' phase.
template <int COUNT>
struct Slots {
    int slot = 0;
    u32 phase = 0;
    __device__ __forceinline__ void advance() {
        if (++slot == COUNT) {
            slot = 0;
            phase ^= 1;
        }
    }
    // The slot `count` places before this one, 0 <= count <= COUNT.
    __device__ __forceinline__ int before(int count) const {
        const int there = slot - count;
        return there < 0 ? there + COUNT : there;
    }
};

// The tile of rows and the (batch, head) of a place in the order of work.
struct Work {
    int tile, lane_bh;
};

__device__ __forceinline__ Work work_at(const TmaCall& tma, int index) {
    const int tiles = tma.call.tiles;
#if CAUSAL || INTERVALS
    // The last rows, mostly the longest, of a section's heads first: a late long tile would run alone.
    const int first = index / (tiles * tma.section) * tma.section;
    const int count = min(tma.section, tma.lanes - first), place = index - first * tiles;
    return {tiles - 1 - place / count, first + place % count};
#else
    return {index % tiles, index / tiles};
#endif
}

// `count` chunks of 64 columns, from `column` on, to shared memory, each of chunk_bytes. WHOLE: in one box.
template <bool WHOLE>
__device__ __forceinline__ void load_chunks(
    u32 target, u32 chunk_bytes, int count, const TensorMap* map, int row, int column, int head, int batch, u32 barrier) {
    if constexpr (WHOLE) {
        load_box(target, map, 0, row, column / 64, head, batch, barrier);
    } else {
#pragma unroll
        for (int c = 0; c < count; ++c) load_box(target + c * chunk_bytes, map, column + 64 * c, row, 0, head, batch, barrier);
    }
}

__device__ __forceinline__ float finite(float reference) { return reference == -infinity() ? 0.f : reference; }

// One row of a warpgroup's accumulators, scaled, to 16-bit elements in memory. Four lanes (t = lane % 4) hold a row, each
// two of every eight columns, at values[4 n] and values[4 n + 1]. They trade so that each stores whole eights.
// COLUMNS: a multiple of 8. `there` is the same in the four lanes.
template <int COLUMNS>
__device__ __forceinline__ void store_row(u16* target, const float* values, float factor, int t, bool there) {
    constexpr int EIGHTS = COLUMNS / 8;
#pragma unroll
    for (int m = 0; m < EIGHTS / 4; ++m) {
        u32 word[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) word[k] = pack(values[16 * m + 4 * k] * factor, values[16 * m + 4 * k + 1] * factor);
#pragma unroll
        for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int low = bit == 1 ? 2 * i : i, high = low + bit;
                const u32 other = __shfl_xor_sync(~0u, t & bit ? word[low] : word[high], bit);
                (t & bit ? word[low] : word[high]) = other;
            }
        if (there)
            *reinterpret_cast<uint4*>(target + 32 * m + 8 * t) = make_uint4(word[0], word[1], word[2], word[3]);
    }
#pragma unroll
    for (int n = EIGHTS / 4 * 4; n < EIGHTS; ++n) {
        const u32 word = pack(values[4 * n] * factor, values[4 * n + 1] * factor);
        if (there) *reinterpret_cast<u32*>(target + 8 * n + 2 * t) = word;
    }
}
