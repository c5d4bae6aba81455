// Second pass of the quantiser: means of the keys and values, and the scale of each channel of the values.
//
// One block of 8 x 32 threads per 32 columns of a head, keys first. Compile-time: BFLOAT16, D.
#define CAUSAL 0
#define INTERVALS 0
#define MASK 0
#define KEY_MASK 0
#define BIAS 0
#define DROPOUT 0
#include "call.cuh"
#include "fp8_call.cuh"

// Strands of one quantity put together, in turn, for each of 32 columns; every thread gets its column's result.
// KIND: 0 adds, 1 takes the largest, -1 the smallest.
template <int KIND>
__device__ __forceinline__ float join(float (&shared)[STRANDS][32], float mine) {
    const int lane = threadIdx.x & 31;
    __syncthreads();
    shared[threadIdx.x >> 5][lane] = mine;
    __syncthreads();
    float all = shared[0][lane];
    for (int s = 1; s < STRANDS; ++s) {
        const float next = shared[s][lane];
        all = KIND == 0 ? __fadd_rn(all, next) : KIND > 0 ? fmaxf(all, next) : fminf(all, next);
    }
    return all;
}

extern "C" __global__ void __launch_bounds__(256) fp8_finish(const __grid_constant__ Quantise call) {
    __shared__ float shared[STRANDS][32];
    constexpr int parts = (D + 31) / 32;
    const int chunks = (call.n_kv + CHUNK - 1) / CHUNK;
    const int head = blockIdx.x / parts, lane = threadIdx.x & 31, strand = threadIdx.x >> 5;
    const int column = blockIdx.x % parts * 32 + lane;
    const bool is_key = head < call.k_count;
    const int i_bh = is_key ? head : head - call.k_count;
    const bool inside = column < call.width;
    const i64 first = static_cast<i64>(i_bh) * chunks * call.width + column;

    const float* sums = is_key ? call.k_sums : call.v_sums;
    float sum = 0.f, most = -infinity(), least = infinity();
    if (inside)
#pragma unroll 8
        for (int c = strand; c < chunks; c += STRANDS) {
            const i64 at = first + static_cast<i64>(c) * call.width;
            sum = __fadd_rn(sum, sums[at]);
            if (!is_key) {
                most = fmaxf(most, call.v_most[at]);
                least = fminf(least, call.v_least[at]);
            }
        }
    sum = join<0>(shared, sum);
    most = join<1>(shared, most);
    least = join<-1>(shared, least);
    if (strand || column >= D) return;
    float mean = __fdiv_rn(sum, static_cast<float>(call.n_kv));
    if (!inside || !(is_key ? call.smooth_k : call.smooth_v) || !is_finite(mean)) mean = 0.f;
    const i64 where = static_cast<i64>(i_bh) * D + column;
    if (is_key) {
        call.k_mean[where] = mean;
    } else {
        // Rounding is monotone: the largest |v - mean| comes from the largest or the smallest v.
        float largest = 0.f;
        if (most >= least)
            largest = fmaxf(counted(most, __fsub_rn(most, mean)), counted(least, __fsub_rn(least, mean)));
        call.v_mean[where] = mean;
        call.v_scale[where] = scale_of(largest);
    }
}
