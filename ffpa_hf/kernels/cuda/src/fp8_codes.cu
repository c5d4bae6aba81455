// Last pass of the quantiser: codes, in the tiles that the forward loads, and the scales of query rows and key blocks.
//
// Blocks of 256 threads: first 64 query rows each, then 64 keys, then 128 keys x 64 channels of the values, turned and
// reordered within 16 keys (value_order in kernels/quantised_reference.py). Compile-time: BFLOAT16, D.
#define CAUSAL 0
#define INTERVALS 0
#define MASK 0
#define KEY_MASK 0
#define BIAS 0
#define DROPOUT 0
#include "call.cuh"
#include "fp8_call.cuh"

// Lanes that share a row, and the runs of eight columns that each holds.
constexpr int LANES = D <= 64 ? 8 : D <= 128 ? 16 : 32;
constexpr int RUNS = (D / 8 + LANES - 1) / LANES;
constexpr int AT_ONCE = 32 / LANES;       // rows of a warp at a time
constexpr int TURNS = 8 / AT_ONCE;        // a warp has 8 of the 64 rows
constexpr int COLUMN_BLOCKS = (D + 63) / 64;

// Eight codes of one row to their place in a 64-row or 128-row tile.
__device__ __forceinline__ void store_codes(u8* tiles, u32 tile_bytes, u32 row, u32 column, const float (&x)[8], float inverse) {
    uint2 codes;
    codes.x = e4m3_four(__fmul_rn(x[0], inverse), __fmul_rn(x[1], inverse), __fmul_rn(x[2], inverse), __fmul_rn(x[3], inverse));
    codes.y = e4m3_four(__fmul_rn(x[4], inverse), __fmul_rn(x[5], inverse), __fmul_rn(x[6], inverse), __fmul_rn(x[7], inverse));
    *reinterpret_cast<uint2*>(tiles + column / KW * tile_bytes + swizzled<KW>(row, column % KW)) = codes;
}

__device__ __forceinline__ void quantise_query(const Quantise& call, int block, int warp, int lane) {
    const int blocks = (call.n_q + ROW_BLOCK - 1) / ROW_BLOCK;
    const int i_block = block % blocks, i_bh = block / blocks, i_b = i_bh / call.heads, i_h = i_bh % call.heads;
    const u16* base = call.query.data + i_b * call.query.b + i_h * call.query.h;
    const float* mean = call.k_mean + static_cast<i64>(i_b * call.k_b + i_h / call.group * call.k_h) * D;
    u8* tiles = call.q_codes + static_cast<i64>(block) * CHUNKS * Q_TILE;
    const int place = lane % LANES;
    const float sign = call.scale < 0.f ? -1.f : 1.f;
    float means[RUNS][8];
#pragma unroll
    for (int run = 0; run < RUNS; ++run)
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int column = (place + LANES * run) * 8 + j;
            means[run][j] = column < D ? mean[column] : 0.f;
        }
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int r = warp * 8 + turn * AT_ONCE + lane / LANES, row = i_block * ROW_BLOCK + r;
        float x[RUNS][8], largest = 0.f, moved = 0.f;
#pragma unroll
        for (int run = 0; run < RUNS; ++run) {
            const int column = (place + LANES * run) * 8;
#pragma unroll
            for (int j = 0; j < 8; ++j) x[run][j] = 0.f;
            if (row < call.n_q && column < call.width) load_eight(x[run], base + row * call.query.n + column);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                moved = fmaf(x[run][j], means[run][j], moved);
                largest = fmaxf(largest, counted(x[run][j], x[run][j]));
            }
        }
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
            moved += __shfl_xor_sync(~0u, moved, step);
        }
        const float scale = scale_of(largest), inverse = sign * inverse_of(scale);
#pragma unroll
        for (int run = 0; run < RUNS; ++run) {
            const int column = (place + LANES * run) * 8;
            if (column < D) store_codes(tiles, Q_TILE, r, column, x[run], inverse);
        }
        if (place == 0 && row < call.n_q) {
            const i64 where = static_cast<i64>(i_bh) * call.n_q + row;
            call.q_scale[where] = scale;
            call.moved[where] = is_finite(moved) ? moved * call.scale : 0.f;
        }
    }
}

__device__ __forceinline__ void quantise_keys(const Quantise& call, int block, int warp, int lane, float* shared) {
    const int blocks = 2 * ((call.n_kv + KEY_TILE - 1) / KEY_TILE);
    const int i_block = block % blocks, i_bh = block / blocks;
    const u16* base = call.key.data + (i_bh / call.k_heads) * call.key.b + (i_bh % call.k_heads) * call.key.h;
    const float* mean = call.k_mean + static_cast<i64>(i_bh) * D;
    u8* tiles = call.k_codes + static_cast<i64>(block / 2) * CHUNKS * K_TILE;
    const int place = lane % LANES;
    uint4 raw[TURNS][RUNS];
    float means[RUNS][8], largest = 0.f;
#pragma unroll
    for (int run = 0; run < RUNS; ++run)
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int column = (place + LANES * run) * 8 + j;
            means[run][j] = column < D ? mean[column] : 0.f;
        }
    auto row_of = [&](int turn) { return warp * 8 + turn * AT_ONCE + lane / LANES; };
    auto there = [&](int turn, int run) {
        return i_block * KEY_BLOCK + row_of(turn) < call.n_kv && (place + LANES * run) * 8 < call.width;
    };
    auto take = [&](float (&x)[8], int turn, int run) {  // the numbers to be rounded; the originals stay in raw
        const u32 words[4] = {raw[turn][run].x, raw[turn][run].y, raw[turn][run].z, raw[turn][run].w};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float original = widen(static_cast<u16>(words[j / 2] >> 16 * (j % 2)));
            x[j] = there(turn, run) ? __fsub_rn(original, means[run][j]) : 0.f;
            if (there(turn, run)) largest = fmaxf(largest, counted(original, x[j]));
        }
    };
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn)
#pragma unroll
        for (int run = 0; run < RUNS; ++run)
            if (there(turn, run))
                raw[turn][run] = *reinterpret_cast<const uint4*>(
                    base + (i_block * KEY_BLOCK + row_of(turn)) * call.key.n + (place + LANES * run) * 8);
            else
                raw[turn][run] = make_uint4(0, 0, 0, 0);
    float x[8];
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn)
#pragma unroll
        for (int run = 0; run < RUNS; ++run) take(x, turn, run);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    if (lane == 0) shared[warp] = largest;
    __syncthreads();
    for (int w = 0; w < 8; ++w) largest = fmaxf(largest, shared[w]);
    const float scale = scale_of(largest), inverse = inverse_of(scale);
    if (threadIdx.x == 0) call.k_scale[block] = scale;
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn)
#pragma unroll
        for (int run = 0; run < RUNS; ++run) {
            const int column = (place + LANES * run) * 8;
            take(x, turn, run);
            if (column < D) store_codes(tiles, K_TILE, i_block % 2 * KEY_BLOCK + row_of(turn), column, x, inverse);
        }
}

__device__ __forceinline__ void quantise_values(const Quantise& call, int block, u32* shared) {
    const int tiles = (call.n_kv + KEY_TILE - 1) / KEY_TILE;
    const int part = block % COLUMN_BLOCKS, tile = block / COLUMN_BLOCKS % tiles, i_bh = block / COLUMN_BLOCKS / tiles;
    const u16* base = call.value.data + (i_bh / call.v_heads) * call.value.b + (i_bh % call.v_heads) * call.value.h;
    const float* mean = call.v_mean + static_cast<i64>(i_bh) * D;
    const float* scale = call.v_scale + static_cast<i64>(i_bh) * D;
    constexpr int PITCH = 33;  // words of a channel in shared memory: 128 keys and one against bank conflicts
    {
        // Places 4 word .. 4 word + 3 of eight channels hold these keys.
        const int run = threadIdx.x & 7, word = threadIdx.x >> 3, column = part * 64 + run * 8;
        const int first = tile * KEY_TILE + word / 4 * 16 + word % 4 * 2;
        float x[4][8];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int key = first + e / 2 * 8 + e % 2;
            if (key < call.n_kv && column < call.width) {
                load_eight(x[e], base + key * call.value.n + column);
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    x[e][j] = __fmul_rn(__fsub_rn(x[e][j], mean[column + j]), inverse_of(scale[column + j]));
            } else {
#pragma unroll
                for (int j = 0; j < 8; ++j) x[e][j] = 0.f;
            }
        }
#pragma unroll
        for (int j = 0; j < 8; ++j)
            shared[(run * 8 + j) * PITCH + word] = e4m3_four(x[0][j], x[1][j], x[2][j], x[3][j]);
    }
    __syncthreads();
    u8* target = call.v_codes + (static_cast<i64>(i_bh) * tiles + tile) * D * VALUE_ROW;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int piece = threadIdx.x & 7, channel = (threadIdx.x >> 3) + 32 * i, row = part * 64 + channel;
        const u32* words = shared + channel * PITCH + 4 * piece;
        if (row < D)
            *reinterpret_cast<uint4*>(target + swizzled<128>(row, 16 * piece)) =
                make_uint4(words[0], words[1], words[2], words[3]);
    }
}

extern "C" __global__ void __launch_bounds__(256, 2) fp8_codes(const __grid_constant__ Quantise call) {
    __shared__ u32 shared[64 * 33];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int for_query = (call.n_q + ROW_BLOCK - 1) / ROW_BLOCK * call.batch * call.heads;
    const int for_keys = 2 * ((call.n_kv + KEY_TILE - 1) / KEY_TILE) * call.k_count;
    const int block = blockIdx.x;
    if (block < for_query)
        quantise_query(call, block, warp, lane);
    else if (block < for_query + for_keys)
        quantise_keys(call, block - for_query, warp, lane, reinterpret_cast<float*>(shared));
    else
        quantise_values(call, block - for_query - for_keys, shared);
}
