// First pass of the quantiser: sums of the keys, and sums, largest and smallest of the values, over chunks of 128 tokens.
//
// One block per chunk and head, keys first; a thread per column. Numbers that are not finite are left out.
// The order of additions is that of kernels/quantised_reference.py. Compile-time: BFLOAT16, D.
#define CAUSAL 0
#define INTERVALS 0
#define MASK 0
#define KEY_MASK 0
#define BIAS 0
#define DROPOUT 0
#include "call.cuh"
#include "fp8_call.cuh"

extern "C" __global__ void __launch_bounds__(D) fp8_statistics(const __grid_constant__ Quantise call) {
    extern __shared__ float sums[];  // [8][width]
    const int chunks = (call.n_kv + CHUNK - 1) / CHUNK;
    const int i_chunk = blockIdx.x % chunks, head = blockIdx.x / chunks;
    const bool is_key = head < call.k_count;
    const int i_bh = is_key ? head : head - call.k_count;
    const int heads = is_key ? call.k_heads : call.v_heads;
    const View& x = is_key ? call.key : call.value;
    const u16* base = x.data + (i_bh / heads) * x.b + (i_bh % heads) * x.h;
    const int groups = call.width / 8;
    const int strand = threadIdx.x / groups, column = threadIdx.x % groups * 8;  // a block has `width` threads

    float sum[8], most[8], least[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        sum[i] = 0.f;
        most[i] = -infinity();
        least[i] = infinity();
    }
#pragma unroll
    for (int i = 0; i < CHUNK / STRANDS; ++i) {
        const int row = i_chunk * CHUNK + STRANDS * i + strand;
        if (row < call.n_kv) {
            float values[8];
            load_eight(values, base + row * x.n + column);
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (is_finite(values[j])) {
                    sum[j] = __fadd_rn(sum[j], values[j]);
                    most[j] = fmaxf(most[j], values[j]);
                    least[j] = fminf(least[j], values[j]);
                }
        }
    }
    const i64 where = (static_cast<i64>(i_bh) * chunks + i_chunk) * call.width + threadIdx.x;
    auto share = [&](const float (&values)[8]) {
        __syncthreads();
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[strand * call.width + column + j] = values[j];
        __syncthreads();
    };
    share(sum);
    float total = sums[threadIdx.x];
    for (int s = 1; s < STRANDS; ++s) total = __fadd_rn(total, sums[s * call.width + threadIdx.x]);
    (is_key ? call.k_sums : call.v_sums)[where] = total;
    if (is_key) return;
    share(most);
    float high = sums[threadIdx.x];
    for (int s = 1; s < STRANDS; ++s) high = fmaxf(high, sums[s * call.width + threadIdx.x]);
    call.v_most[where] = high;
    share(least);
    float low = sums[threadIdx.x];
    for (int s = 1; s < STRANDS; ++s) low = fminf(low, sums[s * call.width + threadIdx.x]);
    call.v_least[where] = low;
}
