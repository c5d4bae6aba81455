// The forward for any GPU from sm_80 on: cp.async, ldmatrix and mma.sync.
//
// One block makes BM = 16 ROW_WARPS query rows times one slice of output columns. Query, key and value pass through a
// ring of shared-memory chunks 64 columns wide, so that shared memory does not grow with the head dim; with Q_RESIDENT
// the query tile stays. COL_WARPS warps share 16 rows: each scores its part of the keys and makes its part of every 64
// output columns, so that a thread holds 8 WIDTH / COL_WARPS fp32 outputs per 64 columns (head dim / 4 in all for two).
// Online softmax in base 2 (Milakov and Gimelshein 2018; Dao et al. 2022).
//
// Compile-time: D head dim, SLICES, WIDTH output chunks of 64 columns per slice, ROW_WARPS, COL_WARPS, BN keys per step,
// STAGES ring slots of STEP chunks, Q_RESIDENT, BLOCKS per multiprocessor, BFLOAT16, STATS, and what call.cuh lists.
#include "call.cuh"

constexpr int THREADS = 32 * ROW_WARPS * COL_WARPS;
constexpr int BM = 16 * ROW_WARPS;
constexpr int CHUNKS = (D + 63) / 64;            // of the head dim
constexpr int KEYS = BN / COL_WARPS;             // keys that a warp scores
constexpr int SCORE_TILES = KEYS / 8;            // 16 x 8 tiles of scores per warp
constexpr int OUT_TILES = 8 / COL_WARPS;         // 16 x 8 tiles of output per warp and chunk
constexpr int PAIR = 32 * COL_WARPS;             // threads that share 16 rows
constexpr u32 Q_CHUNK = BM * 128;                // bytes
constexpr u32 KV_CHUNK = BN * 128;
constexpr u32 PART = KV_CHUNK + (Q_RESIDENT ? 0 : Q_CHUNK);
constexpr u32 SLOT = STEP * PART;
constexpr int K_STEPS = (CHUNKS + STEP - 1) / STEP, V_STEPS = (WIDTH + STEP - 1) / STEP;
constexpr u32 RING = Q_RESIDENT ? CHUNKS * Q_CHUNK : 0;
constexpr u32 WEIGHTS = RING + STAGES * SLOT;    // [BN / 64] chunks of BM x 64 probabilities, where warps share rows
constexpr u32 EXCHANGE = WEIGHTS + (COL_WARPS > 1 ? BM * BN * 2 : 0);
constexpr u32 HULL = EXCHANGE + COL_WARPS * BM * 4;
// Dynamic shared memory: HULL + 16 bytes per row warp.

// A chunk is rows of 64 elements; its eight 16-byte units are permuted by the row, so that ldmatrix meets no bank twice.
__device__ __forceinline__ u32 unit_address(u32 chunk, int row, int unit) {
    return chunk + row * 128 + ((unit ^ (row & 7)) << 4);
}

// A thread's share of a chunk: one 16-byte unit of every PASS-th row.
constexpr int PASS = THREADS / 8;

struct Share {
    const u16* data;  // of the tensor's first row
    i64 row, pass;    // elements between rows, and between this thread's rows
    int rows;         // of the tensor, counted from this thread's first one

    __device__ __forceinline__ Share(const u16* tensor, i64 stride, int count)
        : data(tensor + (threadIdx.x >> 3) * stride + (threadIdx.x & 7) * 8),
          row(stride),
          pass(PASS * stride),
          rows(count - (threadIdx.x >> 3)) {}

    template <int ROWS>
    __device__ __forceinline__ void load(u32 chunk, int row0, int col0) const {
        const u16* source = data + row0 * row + col0;
        const int left = col0 + (threadIdx.x & 7) * 8 < D ? rows - row0 : 0;
        const u32 target = unit_address(chunk, threadIdx.x >> 3, threadIdx.x & 7);
#pragma unroll
        for (int i = 0; i < ROWS / PASS; ++i) copy16(target + i * PASS * 128, source + i * pass, i * PASS < left);
    }
};

// The block's walk over the ring: what is loaded next, and where. Keys first, then values, block after block.
struct Loader {
    Share query, key, value;
    int row, col_chunk, block, stop, step, slot;
    u32 ring;

    __device__ __forceinline__ void next() {
        if (block < stop) {
            const bool values = step >= K_STEPS;
#pragma unroll
            for (int i = 0; i < STEP; ++i) {
                const u32 at = ring + slot * SLOT + i * PART;
                const int chunk = (values ? step - K_STEPS : step) * STEP + i;
                if (values) {
                    if (chunk < WIDTH) value.load<BN>(at, block, (col_chunk + chunk) * 64);
                } else if (chunk < CHUNKS) {
                    key.load<BN>(at, block, chunk * 64);
                    if (!Q_RESIDENT) query.load<BM>(at + KV_CHUNK, row, chunk * 64);
                }
            }
            if (++step == K_STEPS + V_STEPS) {
                step = 0;
                block += BN;
            }
        }
        commit_copies();  // an empty group too: groups are counted
        slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
};

__device__ __forceinline__ float over_quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float over_quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) native_forward(const __grid_constant__ Call call) {
    extern __shared__ __align__(128) u8 memory[];
    const u32 shared = shared_address(memory);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int row_warp = warp / COL_WARPS, col_warp = warp % COL_WARPS;
    const int g = lane >> 2, t = lane & 3;  // a thread holds rows g and g + 8, columns 2t and 2t + 1 of each tile

    int i_slice = blockIdx.x % SLICES;
    int i_tile = blockIdx.x / SLICES % call.tiles;
    int lane_bh = blockIdx.x / SLICES / call.tiles;
#if CAUSAL
    i_tile = call.tiles - 1 - i_tile;  // the longest rows first: a late long tile would run alone
#endif
    const int i_b = lane_bh / call.heads, i_h = lane_bh % call.heads, i_hkv = i_h / call.group;
    const int row0 = i_tile * BM;
    const int rows[2] = {row0 + row_warp * 16 + g, row0 + row_warp * 16 + g + 8};

    // Keys that some row sees, [lo, hi), and those that every row sees, [inner_lo, inner_hi).
    Range range[2];
    int lo = 0, hi = call.n_kv, inner_lo = 0, inner_hi = call.n_kv;
    range[0] = row_range(call, i_b, rows[0]);
    range[1] = row_range(call, i_b, rows[1]);
#if INTERVALS
    {
        lo = 0x7fffffff, hi = 0, inner_lo = 0, inner_hi = 0x7fffffff;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (range[i].start < range[i].end) {
                lo = min(lo, range[i].start);
                hi = max(hi, range[i].end);
            }
            if (rows[i] < call.n_q) {
                inner_lo = max(inner_lo, range[i].start);
                inner_hi = min(inner_hi, range[i].end);
            }
        }
        lo = __reduce_min_sync(~0u, lo);
        hi = __reduce_max_sync(~0u, hi);
        inner_lo = __reduce_max_sync(~0u, inner_lo);
        inner_hi = __reduce_min_sync(~0u, inner_hi);
        int* hull = reinterpret_cast<int*>(memory + HULL);
        if (lane == 0 && col_warp == 0) {
            hull[4 * row_warp] = lo;
            hull[4 * row_warp + 1] = hi;
            hull[4 * row_warp + 2] = inner_lo;
            hull[4 * row_warp + 3] = inner_hi;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ROW_WARPS; ++i) {
            lo = min(lo, hull[4 * i]);
            hi = max(hi, hull[4 * i + 1]);
            inner_lo = max(inner_lo, hull[4 * i + 2]);
            inner_hi = min(inner_hi, hull[4 * i + 3]);
        }
        lo = min(lo, hi);
    }
#elif CAUSAL
    hi = min(hi, min(row0 + BM, call.n_q));
    inner_hi = min(inner_hi, row0 + 1);
#endif
    const int begin = lo / BN * BN;

    const Share query(call.query.data + i_b * call.query.b + i_h * call.query.h, call.query.n, call.n_q);
    Loader loader = {query,
                     Share(call.key.data + i_b * call.key.b + i_hkv * call.key.h, call.key.n, call.n_kv),
                     Share(call.value.data + i_b * call.value.b + i_hkv * call.value.h, call.value.n, call.n_kv),
                     row0,
                     i_slice * WIDTH,
                     begin,
                     hi,
                     0,
                     0,
                     shared + RING};
    if (Q_RESIDENT && begin < hi) {
#pragma unroll 1
        for (int c = 0; c < CHUNKS; ++c) query.load<BM>(shared + c * Q_CHUNK, row0, c * 64);
    }
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) loader.next();

    const Seen seen(call, i_b, i_h);
#if DROPOUT
    const u64 seed = static_cast<u64>(call.rng[0]);
    const u32 offset = static_cast<u32>(call.rng[1]);
#endif
    float out[WIDTH][OUT_TILES][4] = {};
    float top[2] = {-infinity(), -infinity()}, sum[2] = {0.f, 0.f};
    int slot = 0;
    // Row and unit of the 16-byte piece that a lane points ldmatrix to.
    const int a_row = row_warp * 16 + (lane & 15), a_unit = lane >> 4;
    const int k_row = col_warp * KEYS + (lane & 7) + ((lane >> 4) << 3), k_unit = (lane >> 3) & 1;

#pragma unroll 1
    for (int block = begin; block < hi; block += BN) {
        // scores[16, KEYS] = q k^T
        float scores[SCORE_TILES][4] = {};
#pragma unroll 1
        for (int step = 0; step < K_STEPS; ++step) {
            wait_copies<STAGES - 2>();
            __syncthreads();
            loader.next();
#pragma unroll
            for (int i = 0; i < STEP; ++i) {
                const int c = step * STEP + i;
                if (CHUNKS % STEP && c >= CHUNKS) break;
                const u32 k_chunk = shared + RING + slot * SLOT + i * PART;
                const u32 q_chunk = Q_RESIDENT ? shared + c * Q_CHUNK : k_chunk + KV_CHUNK;
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    u32 a[4];
                    load_matrices(a, unit_address(q_chunk, a_row, k * 2 + a_unit));
#pragma unroll
                    for (int n = 0; n < SCORE_TILES; n += 2) {
                        u32 b[4];
                        load_matrices(b, unit_address(k_chunk, k_row + n * 8, k * 2 + k_unit));
                        multiply(scores[n], a, b[0], b[1]);
                        multiply(scores[n + 1], a, b[2], b[3]);
                    }
                }
            }
            slot = slot + 1 == STAGES ? 0 : slot + 1;
        }

        // scores become base-2 logits, then probabilities
        const bool tested = block < inner_lo || block + BN > inner_hi;
        const bool plain = !(BIAS || MASK || KEY_MASK) && !tested;
        float peak[2] = {-infinity(), -infinity()};
        if (plain) {
#pragma unroll
            for (int n = 0; n < SCORE_TILES; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) scores[n][e] *= call.slope;
        } else {
#pragma unroll
            for (int n = 0; n < SCORE_TILES; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    int key = block + col_warp * KEYS + n * 8 + 2 * t + (e & 1);
                    scores[n][e] = seen.logit(call, scores[n][e], rows[e >> 1], key, range[e >> 1], tested);
                }
        }
#pragma unroll
        for (int n = 0; n < SCORE_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) peak[e >> 1] = fmaxf(peak[e >> 1], scores[n][e]);
#pragma unroll
        for (int i = 0; i < 2; ++i) peak[i] = over_quad_max(peak[i]);
        if (COL_WARPS > 1) {
            float* exchange = reinterpret_cast<float*>(memory + EXCHANGE);
            if (t == 0) {
                exchange[col_warp * BM + row_warp * 16 + g] = peak[0];
                exchange[col_warp * BM + row_warp * 16 + g + 8] = peak[1];
            }
            barrier(1 + row_warp, PAIR);
#pragma unroll
            for (int w = 0; w < COL_WARPS; ++w) {
                peak[0] = fmaxf(peak[0], exchange[w * BM + row_warp * 16 + g]);
                peak[1] = fmaxf(peak[1], exchange[w * BM + row_warp * 16 + g + 8]);
            }
        }
        float shrink[2], pivot[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float now = fmaxf(top[i], peak[i]);
            pivot[i] = now == -infinity() ? 0.f : now;  // no key yet: keep -inf - -inf out
            shrink[i] = exp2_fast(top[i] - pivot[i]);
            top[i] = now;
            sum[i] *= shrink[i];
        }
#pragma unroll
        for (int n = 0; n < SCORE_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                scores[n][e] = exp2_fast(scores[n][e] - pivot[e >> 1]);
                sum[e >> 1] += scores[n][e];
            }
#if DROPOUT
#pragma unroll
        for (int n = 0; n < SCORE_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                u32 pair[2];
                random_pair(pair, seed, offset, lane_bh, rows[i], block + col_warp * KEYS + n * 8 + 2 * t);
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (pair[e] < call.threshold) scores[n][2 * i + e] = 0.f;
            }
#endif
        if (__any_sync(~0u, shrink[0] != 1.f || shrink[1] != 1.f)) {
#pragma unroll
            for (int c = 0; c < WIDTH; ++c)
#pragma unroll
                for (int n = 0; n < OUT_TILES; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) out[c][n][e] *= shrink[e >> 1];
        }

        // weights[16, BN] as the left operand of the second product: the layouts of result and operand agree
        u32 weights[BN / 16][4];
        if (COL_WARPS == 1) {
#pragma unroll
            for (int k = 0; k < BN / 16; ++k) {
                const int n = COL_WARPS == 1 ? 2 * k : 0;
                weights[k][0] = pack(scores[n][0], scores[n][1]);
                weights[k][1] = pack(scores[n][2], scores[n][3]);
                weights[k][2] = pack(scores[n + 1][0], scores[n + 1][1]);
                weights[k][3] = pack(scores[n + 1][2], scores[n + 1][3]);
            }
        } else {
#pragma unroll
            for (int n = 0; n < SCORE_TILES; ++n) {
                const int col = col_warp * KEYS + n * 8;
                const u32 chunk = shared + WEIGHTS + col / 64 * Q_CHUNK;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    u32 at = unit_address(chunk, row_warp * 16 + g + 8 * i, col % 64 / 8) + 4 * t;
                    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(pack(scores[n][2 * i], scores[n][2 * i + 1]))
                                 : "memory");
                }
            }
            barrier(1 + row_warp, PAIR);
#pragma unroll
            for (int k = 0; k < BN / 16; ++k)
                load_matrices(weights[k], unit_address(shared + WEIGHTS + k / 4 * Q_CHUNK, a_row, k % 4 * 2 + a_unit));
        }

        // out[16, 64 WIDTH] += weights v
#pragma unroll
        for (int step = 0; step < V_STEPS; ++step) {
            wait_copies<STAGES - 2>();
            __syncthreads();
            loader.next();
#pragma unroll
            for (int i = 0; i < STEP; ++i) {
                const int c = step * STEP + i;
                if (c >= WIDTH) break;
                const u32 v_chunk = shared + RING + slot * SLOT + i * PART;
#pragma unroll
                for (int k = 0; k < BN / 16; ++k)
#pragma unroll
                    for (int n = 0; n < OUT_TILES; n += 2) {
                        u32 b[4];
                        const int unit = col_warp * OUT_TILES + n + (lane >> 4);
                        load_matrices_transposed(b, unit_address(v_chunk, k * 16 + (lane & 15), unit));
                        multiply(out[c][n], weights[k], b[0], b[1]);
                        multiply(out[c][n + 1], weights[k], b[2], b[3]);
                    }
            }
            slot = slot + 1 == STAGES ? 0 : slot + 1;
        }
    }

    wait_copies<0>();
#pragma unroll
    for (int i = 0; i < 2; ++i) sum[i] = over_quad_sum(sum[i]);
    if (COL_WARPS > 1) {
        float* exchange = reinterpret_cast<float*>(memory + EXCHANGE);
        barrier(1 + row_warp, PAIR);  // the last maxima were read
        if (t == 0) {
            exchange[col_warp * BM + row_warp * 16 + g] = sum[0];
            exchange[col_warp * BM + row_warp * 16 + g + 8] = sum[1];
        }
        barrier(1 + row_warp, PAIR);
        sum[0] = sum[1] = 0.f;
#pragma unroll
        for (int w = 0; w < COL_WARPS; ++w) {
            sum[0] += exchange[w * BM + row_warp * 16 + g];
            sum[1] += exchange[w * BM + row_warp * 16 + g + 8];
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (rows[i] >= call.n_q) continue;
        const bool empty = sum[i] == 0.f;
        const float total = empty ? 1.f : sum[i];
        const float norm = (DROPOUT ? call.keep_scale : 1.f) / total;
        u16* target = call.out.data + i_b * call.out.b + i_h * call.out.h + rows[i] * call.out.n;
#pragma unroll
        for (int c = 0; c < WIDTH; ++c)
#pragma unroll
            for (int n = 0; n < OUT_TILES; ++n) {
                const int col = (i_slice * WIDTH + c) * 64 + (col_warp * OUT_TILES + n) * 8 + 2 * t;
                if (col < D)
                    *reinterpret_cast<u32*>(target + col) = pack(out[c][n][2 * i] * norm, out[c][n][2 * i + 1] * norm);
            }
        if (i_slice == 0 && col_warp == 0 && t == 0) {
            const i64 at = static_cast<i64>(lane_bh) * call.n_q + rows[i];
            const float log_sum = log2_fast(total);
            call.lse[at] = empty ? -infinity() : (top[i] + log_sum) * LN2;
#if STATS
            call.stats[at] = top[i];
            call.stats[call.stats_size + at] = log_sum;
#endif
        }
    }
}
