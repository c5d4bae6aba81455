// The FP8 forward on Hopper: one warpgroup loads, GROUPS warpgroups of 64 query rows each compute.
//
// A step takes 128 keys. Operands come as e4m3 codes in the tiles of fp8.cuh. A thread's scores, four neighbours of a
// value row each (the quantiser reordered the values), are its share of the left operand of the second product, so
// probabilities go from one product to the next without leaving the thread.
// Exponentials are relative to a whole number r not below the row's largest score: exp2(z - r + 8) is at most 256, and
// which r it was moves no code but the subnormal ones.
// Wider heads than 256 split their output columns over SLICES blocks, each of which makes all scores.
// The tensor core keeps about 14 bits of a sum of e4m3 products and drops the rest of each: over thousands of values of one
// sign the sum falls short by a tenth and more. PROMOTE: the values' products of a step are made in a cleared accumulator
// and added to the output in fp32. Otherwise the next step's scores are multiplied beside them; FOLD: every so many steps
// the output is then emptied into fp32 sums (0: never).
//
// Compile-time: BFLOAT16, D, SLICES, GROUPS, K_SLOTS, V_SLOTS, PROMOTE, FOLD, TAKE_TURNS, POLYNOMIAL (how many of each eight
// exponentials leave the special function unit to the multipliers), STATS, what call.cuh lists.
#include "call.cuh"
#include "fp8_hopper.cuh"

constexpr int DV = D / SLICES;              // output columns of a block
constexpr int BM = ROW_BLOCK * GROUPS, BN = KEY_TILE;
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int K_STEPS = D / 32;             // products of a row of scores
constexpr int CHUNK_STEPS = KW / 32;
constexpr int REGISTERS = GROUPS == 2 ? 240 : 160, LOADER_REGISTERS = GROUPS == 2 ? 24 : 32;
constexpr u32 V_TILE = DV * VALUE_ROW;
constexpr u32 K_RING = GROUPS * CHUNKS * Q_TILE;
constexpr u32 V_RING = K_RING + K_SLOTS * K_TILE;
constexpr u32 K_FULL = V_RING + V_SLOTS * V_TILE, K_EMPTY = K_FULL + 8 * K_SLOTS, V_FULL = K_EMPTY + 8 * K_SLOTS,
              V_EMPTY = V_FULL + 8 * V_SLOTS, Q_FULL = V_EMPTY + 8 * V_SLOTS;
// Dynamic shared memory: Q_FULL + 8 bytes.
constexpr int PART = DV % 64 == 0 && DV != 192 ? 64 : DV > 96 ? DV / 2 : DV;  // columns promoted at a time
constexpr float SHIFT = 8.f;                // a probability p is rounded as p * 2^8

// Kernel argument; the host packs the same fields in the same order.
struct Fp8Call {
    const u8 *q, *k, *v;                    // tiles
    const float *q_scale, *k_scale, *v_scale, *v_mean, *moved;  // as in fp8_call.cuh
    int k_b, k_h, v_b, v_h;                 // place of (batch, head) among the keys and values that differ
    int width, first_tile;                  // columns of the output, tiles that are left out
    float slope;                            // |softmax scale| * log2(e)
    Call call;                              // its own slope is 1
};

__device__ __forceinline__ float finite(float reference) { return reference == -infinity() ? 0.f : reference; }

// exp2 for x up to 127: 2^n times a cubic in x - n, |x - n| <= 1/2, whose coefficients give the least largest relative
// error, 7.5e-5. Below 2^-126 it stays there; NaN stays NaN.
__device__ __forceinline__ float exp2_cubic(float x) {
    asm("max.NaN.f32 %0, %0, 0fC2FC0000;" : "+f"(x));  // -126
    const float shifted = __fadd_rn(x, 12582912.f);    // 1.5 * 2^23: the whole part is in the low bits
    const float part = __fsub_rn(x, __fsub_rn(shifted, 12582912.f));
    const float cubic = fmaf(fmaf(fmaf(0.055171627551317215f, part, 0.2426111400127411f), part, 0.6932609677314758f), part,
                             0.9999280571937561f);
    return cubic * __int_as_float((__float_as_int(shifted) << 23) + 0x3f800000);
}

// An output in the range of its dtype: rounding may carry a mean past the largest fp16 value. NaN stays NaN.
__device__ __forceinline__ float in_range(float x) {
#if BFLOAT16
    return x;
#else
    return x > 65504.f ? 65504.f : x < -65504.f ? -65504.f : x;
#endif
}

template <int SLOTS>
struct Ring {
    int slot = 0;
    u32 phase = 0;
    __device__ __forceinline__ void advance() {
        if (++slot == SLOTS) {
            slot = 0;
            phase ^= 1;
        }
    }
};

struct Rows {
    float out[DV / 2];     // [64 rows, DV columns] of a warpgroup
#if FOLD
    float total[DV / 2];   // what was folded so far
#endif
    float scores[BN / 2];  // [64 rows, 128 keys]; then their exponentials
    u32 weights[BN / 32][4];
    float reference[2], sum[2], shrink[2];  // of rows g and g + 8; shrink: from the reference of out to the present one
};

struct Place {
    u32 shared, group, lane;
};

__device__ __forceinline__ void start_scores(Rows& rows, const Place& at, Ring<K_SLOTS>& ring) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        barrier_wait(at.shared + K_FULL + 8 * ring.slot, ring.phase);
        products_begin();
        const u32 q = hidden(at.shared) + (at.group * CHUNKS + c) * Q_TILE;
        const u32 k = hidden(at.shared) + K_RING + ring.slot * K_TILE;
#pragma unroll
        for (int i = 0; i < CHUNK_STEPS; ++i)
            if (c * CHUNK_STEPS + i < K_STEPS)
                CodeProduct<BN>::shared(rows.scores, tile_matrix<KW>(q + 32 * i), tile_matrix<KW>(k + 32 * i), c || i);
        ring.advance();
    }
    products_commit();
}

__device__ __forceinline__ void release_keys(const Place& at, Ring<K_SLOTS>& ring) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (at.lane == 0) barrier_arrive(at.shared + K_EMPTY + 8 * ring.slot);
        ring.advance();
    }
}

// Start out += weights v.
__device__ __forceinline__ void start_values(Rows& rows, const Place& at, const Ring<V_SLOTS>& ring) {
    barrier_wait(at.shared + V_FULL + 8 * ring.slot, ring.phase);
    products_begin();
    const u32 v = hidden(at.shared) + V_RING + ring.slot * V_TILE;
#pragma unroll
    for (int i = 0; i < BN / 32; ++i)
        CodeProduct<DV>::registers(rows.out, rows.weights[i], tile_matrix<128>(v + 32 * i), 1);
    products_commit();
}

__device__ __forceinline__ void release_values(const Place& at, Ring<V_SLOTS>& ring) {
    if (at.lane == 0) barrier_arrive(at.shared + V_EMPTY + 8 * ring.slot);
    ring.advance();
}

#if PROMOTE
__device__ __forceinline__ void start_part(float (&part)[PART / 2], const Rows& rows, u32 v) {
#pragma unroll
    for (int i = 0; i < BN / 32; ++i) CodeProduct<PART>::registers(part, rows.weights[i], tile_matrix<128>(v + 32 * i), i);
    products_commit();
}

template <int FIRST>
__device__ __forceinline__ void add_part(Rows& rows, float (&part)[PART / 2]) {
    settle(part);
#pragma unroll
    for (int i = 0; i < PART / 2; ++i) rows.out[FIRST * (PART / 2) + i] += part[i];
}

// out += weights v, a part of the columns in each of two accumulators in turn.
__device__ __forceinline__ void add_values(Rows& rows, const Place& at, Ring<V_SLOTS>& ring) {
    constexpr int PARTS = DV / PART;
    barrier_wait(at.shared + V_FULL + 8 * ring.slot, ring.phase);
    products_begin();
    const u32 v = hidden(at.shared) + V_RING + ring.slot * V_TILE;
    float even[PART / 2], odd[PART / 2];
    start_part(even, rows, v);
    if constexpr (PARTS > 1) {
        start_part(odd, rows, v + PART * VALUE_ROW);
        products_wait<1>();
        add_part<0>(rows, even);
    }
    if constexpr (PARTS > 2) {
        products_begin();
        start_part(even, rows, v + 2 * PART * VALUE_ROW);
        products_wait<1>();
        add_part<1>(rows, odd);
        products_begin();
        start_part(odd, rows, v + 3 * PART * VALUE_ROW);
        products_wait<1>();
        add_part<2>(rows, even);
    }
    products_wait<0>();
    if constexpr (PARTS == 1) add_part<0>(rows, even);
    if constexpr (PARTS > 1) add_part<PARTS - 1>(rows, odd);
    release_values(at, ring);
}
#endif

// Raw products of the keys [key, key + 128) to exponentials. f[r][half]: what a product of row r and of either half of the
// keys is worth in base 2. TESTED: some row of the tile may not see all of them.
template <bool TESTED>
__device__ __forceinline__ void exponentiate(
    Rows& rows, const Call& call, const Seen& seen, const Range (&range)[2], const int (&row)[2], const float (&f)[2][2],
    int key, int t) {
    float peak[2] = {-infinity(), -infinity()};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float most[2] = {-infinity(), -infinity()};
#pragma unroll
        for (int n = 8 * half; n < 8 * half + 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float& z = rows.scores[4 * n + e];
                if (TESTED)
                    z = seen.logit(call, z * f[e >> 1][half], row[e >> 1], key + 8 * n + 2 * t + (e & 1), range[e >> 1], true);
                most[e >> 1] = fmaxf(most[e >> 1], z);
            }
#pragma unroll
        for (int r = 0; r < 2; ++r) peak[r] = fmaxf(peak[r], TESTED ? most[r] : most[r] * f[r][half]);
    }
    float offset[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        peak[r] = fmaxf(peak[r], __shfl_xor_sync(~0u, peak[r], 1));
        peak[r] = fmaxf(peak[r], __shfl_xor_sync(~0u, peak[r], 2));
        const float now = fmaxf(rows.reference[r], ceilf(peak[r])), pivot = finite(now);
        rows.shrink[r] = exp2_fast(rows.reference[r] - pivot);
        rows.reference[r] = now;
        offset[r] = SHIFT - pivot;
        rows.sum[r] *= rows.shrink[r];
    }
#pragma unroll
    for (int n = 0; n < BN / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float& z = rows.scores[4 * n + e];
            if (TESTED)
                z = exp2_fast(z + offset[e >> 1]);
            else if (n % 8 < POLYNOMIAL)
                z = exp2_cubic(fmaf(z, f[e >> 1][n / 8], offset[e >> 1]));
            else
                z = exp2_fast(fmaf(z, f[e >> 1][n / 8], offset[e >> 1]));
            rows.sum[e >> 1] += z;
        }
}

// Exponentials to e4m3, and the output to their reference.
__device__ __forceinline__ void round_weights(Rows& rows) {
    if (__any_sync(~0u, rows.shrink[0] != 1.f || rows.shrink[1] != 1.f))
#pragma unroll
        for (int n = 0; n < DV / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                rows.out[4 * n + e] *= rows.shrink[e >> 1];
#if FOLD
                rows.total[4 * n + e] *= rows.shrink[e >> 1];
#endif
            }
#pragma unroll
    for (int i = 0; i < BN / 32; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int n = 16 * i + 8 * (j >> 1) + 2 * (j & 1);
            rows.weights[i][j] = e4m3_four(rows.scores[n], rows.scores[n + 1], rows.scores[n + 4], rows.scores[n + 5]);
        }
}

#if FOLD
__device__ __forceinline__ void fold(Rows& rows) {
#pragma unroll
    for (int i = 0; i < DV / 2; ++i) {
        rows.total[i] += rows.out[i];
        rows.out[i] = 0.f;
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_forward(const __grid_constant__ Fp8Call fp8) {
    extern __shared__ __align__(1024) u8 memory[];
    const Call& call = fp8.call;
    const u32 shared = shared_address(memory);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

    const int tiles = call.tiles - fp8.first_tile;
    int i_tile = blockIdx.x % tiles + fp8.first_tile;
#if CAUSAL
    i_tile = call.tiles - 1 - blockIdx.x % tiles;  // the longest rows first: a late long tile would run alone
#endif
    const int i_slice = blockIdx.x / tiles % SLICES, lane_bh = blockIdx.x / tiles / SLICES;
    const int i_b = lane_bh / call.heads, i_h = lane_bh % call.heads, i_hkv = i_h / call.group;
    const int row0 = i_tile * BM;
    const int k_head = i_b * fp8.k_b + i_hkv * fp8.k_h, v_head = i_b * fp8.v_b + i_hkv * fp8.v_h;
    const int key_tiles = (call.n_kv + KEY_TILE - 1) / KEY_TILE;

    if (threadIdx.x == 0) {
        for (int i = 0; i < K_SLOTS; ++i) {
            barrier_init(shared + K_FULL + 8 * i, 1);
            barrier_init(shared + K_EMPTY + 8 * i, 4 * GROUPS);
        }
        for (int i = 0; i < V_SLOTS; ++i) {
            barrier_init(shared + V_FULL + 8 * i, 1);
            barrier_init(shared + V_EMPTY + 8 * i, 4 * GROUPS);
        }
        barrier_init(shared + Q_FULL, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }

    // Keys [lo, hi) that some row of the tile sees, and [inner_lo, inner_hi) that every row does.
    int lo = 0, hi = call.n_kv, inner_lo = 0, inner_hi = call.n_kv;
#if INTERVALS
    {
        int* hull = reinterpret_cast<int*>(memory + K_RING);  // before anything is loaded there
        lo = 0x7fffffff, hi = 0, inner_hi = 0x7fffffff;
        if (threadIdx.x < BM && row0 + threadIdx.x < call.n_q) {
            const Range range = row_range(call, i_b, row0 + threadIdx.x);
            if (range.start < range.end) lo = range.start, hi = range.end;
            inner_lo = range.start, inner_hi = range.end;
        }
        lo = __reduce_min_sync(~0u, lo);
        hi = __reduce_max_sync(~0u, hi);
        inner_lo = __reduce_max_sync(~0u, inner_lo);
        inner_hi = __reduce_min_sync(~0u, inner_hi);
        if (lane == 0) {
            hull[4 * warp] = lo;
            hull[4 * warp + 1] = hi;
            hull[4 * warp + 2] = inner_lo;
            hull[4 * warp + 3] = inner_hi;
        }
        __syncthreads();
        for (int i = 0; i < BM / 32; ++i) {
            lo = min(lo, hull[4 * i]);
            hi = max(hi, hull[4 * i + 1]);
            inner_lo = max(inner_lo, hull[4 * i + 2]);
            inner_hi = min(inner_hi, hull[4 * i + 3]);
        }
        lo = min(lo, hi);
        // Tiles are written there next: order these reads before it.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
#elif CAUSAL
    hi = min(hi, min(row0 + BM, call.n_q));
    inner_hi = min(inner_hi, row0 + 1);
#endif
    const int first = lo / BN, steps = (hi - first * BN + BN - 1) / BN;
    __syncthreads();

    if (warp < 4) {
        give_registers<LOADER_REGISTERS>();
        if (threadIdx.x == 0 && steps > 0) {
            const int row_blocks = (call.n_q + ROW_BLOCK - 1) / ROW_BLOCK;
            const u32 q_bytes = min(GROUPS, row_blocks - i_tile * GROUPS) * CHUNKS * Q_TILE;
            barrier_expect(shared + Q_FULL, q_bytes);
            load_tile(shared, fp8.q + (static_cast<i64>(lane_bh) * row_blocks + i_tile * GROUPS) * CHUNKS * Q_TILE, q_bytes,
                      shared + Q_FULL);
            const u8* k = fp8.k + (static_cast<i64>(k_head) * key_tiles + first) * CHUNKS * K_TILE;
            const u8* v = fp8.v + (static_cast<i64>(v_head) * key_tiles + first) * D * VALUE_ROW + i_slice * V_TILE;
            Ring<K_SLOTS> keys;
            Ring<V_SLOTS> values;
            auto load_keys = [&]() {
                for (int c = 0; c < CHUNKS; ++c) {
                    barrier_wait(shared + K_EMPTY + 8 * keys.slot, keys.phase ^ 1);
                    barrier_expect(shared + K_FULL + 8 * keys.slot, K_TILE);
                    load_tile(shared + K_RING + keys.slot * K_TILE, k, K_TILE, shared + K_FULL + 8 * keys.slot);
                    keys.advance();
                    k += K_TILE;
                }
            };
            auto load_values = [&]() {
                barrier_wait(shared + V_EMPTY + 8 * values.slot, values.phase ^ 1);
                barrier_expect(shared + V_FULL + 8 * values.slot, V_TILE);
                load_tile(shared + V_RING + values.slot * V_TILE, v, V_TILE, shared + V_FULL + 8 * values.slot);
                values.advance();
                v += D * VALUE_ROW;
            };
            load_keys();
#pragma unroll 1
            for (int step = 1; step < steps; ++step) {
                load_keys();
                load_values();
            }
            load_values();
        }
        return;
    }

    take_registers<REGISTERS>();
    Rows rows;
#pragma unroll
    for (int i = 0; i < DV / 2; ++i) {
        rows.out[i] = 0.f;
#if FOLD
        rows.total[i] = 0.f;
#endif
    }
    Place at;
    at.shared = shared;
    at.lane = lane;
    at.group = (warp - 4) >> 2;
    const int g = lane >> 2, t = lane & 3;
    int row[2];
    Range range[2];
    float worth[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        row[r] = row0 + at.group * 64 + (warp & 3) * 16 + g + 8 * r;
        range[r] = row_range(call, i_b, row[r]);
        worth[r] = row[r] < call.n_q ? fp8.q_scale[static_cast<i64>(lane_bh) * call.n_q + row[r]] * fp8.slope : 0.f;
        rows.reference[r] = -infinity();
        rows.sum[r] = 0.f;
    }
    const Seen seen(call, i_b, i_h);
    const float* k_scale = fp8.k_scale + 2 * (static_cast<i64>(k_head) * key_tiles + first);
    int key = first * BN;
    Ring<K_SLOTS> keys, used_keys;
    Ring<V_SLOTS> values;

    // One warpgroup's softmax runs while another has the tensor core, if they take turns at giving it work.
    auto my_turn = [&]() {
#if TAKE_TURNS
        barrier(1 + at.group, 256);
#endif
    };
    auto next_turn = [&]() {
#if TAKE_TURNS
        asm volatile("bar.arrive %0, 256;" ::"r"(1 + (at.group + 1) % GROUPS) : "memory");
#endif
    };
    auto softmax = [&]() {
        float f[2][2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float scale = k_scale[half];
#pragma unroll
            for (int r = 0; r < 2; ++r) f[r][half] = fminf(worth[r] * scale, 3.4028234663852886e38f);  // inf * 0 is NaN
        }
        const bool tested = MASK || KEY_MASK || BIAS || key < inner_lo || key + BN > inner_hi;
        if (tested)
            exponentiate<true>(rows, call, seen, range, row, f, key, t);
        else
            exponentiate<false>(rows, call, seen, range, row, f, key, t);
        k_scale += 2;
        key += BN;
    };

    if (steps > 0) {
#if TAKE_TURNS
        if (at.group == GROUPS - 1) next_turn();
#endif
        barrier_wait(shared + Q_FULL, 0);
#if PROMOTE
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            my_turn();
            start_scores(rows, at, keys);
            next_turn();
            products_wait<0>();
            settle(rows.scores);
            release_keys(at, used_keys);
            softmax();
            round_weights(rows);
            add_values(rows, at, values);
        }
#else
        my_turn();
        start_scores(rows, at, keys);
        next_turn();
        products_wait<0>();
        settle(rows.scores);
        release_keys(at, used_keys);
        softmax();
        round_weights(rows);
#pragma unroll 1
        for (int step = 1; step < steps; ++step) {
            my_turn();
            start_scores(rows, at, keys);
            start_values(rows, at, values);
            next_turn();
            products_wait<1>();
            settle(rows.scores);
            release_keys(at, used_keys);
            softmax();
            products_wait<0>();
            settle(rows.out);
            release_values(at, values);
#if FOLD
            if (step % FOLD == 0) fold(rows);
#endif
            round_weights(rows);
        }
        start_values(rows, at, values);
        products_wait<0>();
        settle(rows.out);
#if FOLD
#pragma unroll
        for (int i = 0; i < DV / 2; ++i) rows.out[i] += rows.total[i];
#endif
#endif
    }

    const float* v_scale = fp8.v_scale + static_cast<i64>(v_head) * D + i_slice * DV;
    const float* v_mean = fp8.v_mean + static_cast<i64>(v_head) * D + i_slice * DV;
    float norm[2];
    u16* target[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        rows.sum[r] += __shfl_xor_sync(~0u, rows.sum[r], 1);
        rows.sum[r] += __shfl_xor_sync(~0u, rows.sum[r], 2);
        const bool empty = rows.sum[r] == 0.f;
        const float total = empty ? 1.f : rows.sum[r];
        norm[r] = empty ? 0.f : 1.f / total;
        target[r] = call.out.data + i_b * call.out.b + i_h * call.out.h + row[r] * call.out.n + i_slice * DV;
        if (row[r] < call.n_q && t == 0 && i_slice == 0) {
            const i64 where = static_cast<i64>(lane_bh) * call.n_q + row[r];
            const float log_sum = log2_fast(total), moved = fp8.moved[where];
            call.lse[where] = empty ? -infinity() : (rows.reference[r] - SHIFT + log_sum) * LN2 + moved;
#if STATS
            call.stats[where] = rows.reference[r] - SHIFT + moved * LOG2E;
            call.stats[call.stats_size + where] = log_sum;
#endif
        }
    }
#pragma unroll
    for (int n = 0; n < DV / 8; ++n) {
        const int column = 8 * n + 2 * t;
        if (i_slice * DV + column >= fp8.width) continue;
        const float2 scale = *reinterpret_cast<const float2*>(v_scale + column);
        const float2 mean = *reinterpret_cast<const float2*>(v_mean + column);
#pragma unroll
        for (int r = 0; r < 2; ++r)
            if (row[r] < call.n_q) {
                const float a = rows.out[4 * n + 2 * r] * norm[r], b = rows.out[4 * n + 2 * r + 1] * norm[r];
                const bool empty = norm[r] == 0.f;
                *reinterpret_cast<u32*>(target[r] + column) =
                    pack(empty ? 0.f : in_range(fmaf(a, scale.x, mean.x)), empty ? 0.f : in_range(fmaf(b, scale.y, mean.y)));
            }
    }
}
