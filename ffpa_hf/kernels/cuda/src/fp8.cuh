// e4m3 operands: codes, the tiles that they lie in, and Hopper's products of them. Device code only.
//
// The quantiser writes operands as the shared-memory image of a tile, swizzle included, so that a load is one linear
// copy. Compile-time: D, the head dim the kernels are built for (zeros fill what a call's own leaves open).
#pragma once
#include "ptx.cuh"

constexpr int ROW_BLOCK = 64;    // query rows of a tile: one warpgroup's
constexpr int KEY_BLOCK = 64;    // keys that share a scale
constexpr int KEY_TILE = 128;    // keys of a tile
constexpr int KW = D == 64 ? 64 : 128;      // bytes of a row of query and key tiles: one swizzle row
constexpr int CHUNKS = (D + KW - 1) / KW;   // tiles side by side that hold a head dim
constexpr u32 Q_TILE = ROW_BLOCK * KW, K_TILE = KEY_TILE * KW;  // bytes of one chunk
constexpr u32 VALUE_ROW = KEY_TILE;         // bytes: a channel's values of a tile's keys
#define E4M3_MAX 448.f

// Two floats as e4m3 codes, `low` in the lower byte: to the nearest, ties to even, saturating, NaN as 0x7f.
__device__ __forceinline__ u16 e4m3_pair(float low, float high) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ u32 e4m3_four(float a, float b, float c, float d) {
    return e4m3_pair(a, b) | static_cast<u32>(e4m3_pair(c, d)) << 16;
}

// Where byte `column` of row `row` lies in a tile of rows of WIDTH bytes (64 or 128): 16-byte pieces change places.
template <int WIDTH>
__device__ __forceinline__ u32 swizzled(u32 row, u32 column) {
    const u32 turn = WIDTH == 128 ? row & 7 : (row >> 1) & 3;
    return row * WIDTH + ((column >> 4) ^ turn) * 16 + (column & 15);
}
