// What the passes of the FP8 quantiser share: their argument, and the scalar steps that decide a code. Device code only.
#pragma once
#include "fp8.cuh"

constexpr int CHUNK = 128, STRANDS = 8;  // of token sums, kernels/quantised_reference.py

// Kernel argument of all passes; the host packs the same fields in the same order (fp8_launch.py).
// k_count, v_count: batches times heads of keys and values that differ; k_heads, v_heads: heads of a batch among them.
struct Quantise {
    View query, key, value;
    u8 *q_codes, *k_codes, *v_codes;
    float *q_scale, *k_scale, *v_scale;  // [B Hq, Nq], [count, 2 tiles], [count, D]
    float *k_mean, *v_mean;              // [count, D]
    float* moved;                        // [B Hq, Nq]: what the mean of the keys took from a row's scores
    float *k_sums, *v_sums, *v_most, *v_least;  // [count, chunks, width]
    float scale;                         // of the softmax
    int n_q, n_kv, width, heads, group, batch;
    int k_count, k_heads, v_count, v_heads, k_b, k_h;  // k_b, k_h: place of (batch, head) among the keys that differ
    int smooth_k, smooth_v;
};

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_int(x) & 0x7f800000) != 0x7f800000; }

// Eight neighbours of 16 bits from a 16-byte aligned address.
__device__ __forceinline__ void load_eight(float (&values)[8], const u16* source) {
    const uint4 raw = *reinterpret_cast<const uint4*>(source);
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        values[2 * i] = widen(static_cast<u16>(words[i]));
        values[2 * i + 1] = widen(static_cast<u16>(words[i] >> 16));
    }
}

// Magnitude that counts for a scale: of `x`, whose original is not counted where it is not finite.
__device__ __forceinline__ float counted(float original, float x) {
    return is_finite(original) ? fminf(fabsf(x), 3.4028234663852886e38f) : 0.f;
}

// What one unit of a code is worth where magnitudes reach `largest`.
__device__ __forceinline__ float scale_of(float largest) {
    return __fdiv_rn(fmaxf(largest, 7.888609052210118e-31f), E4M3_MAX);  // at least 2^-100
}

__device__ __forceinline__ float inverse_of(float scale) { return __fdiv_rn(1.f, scale); }
