// The forward for head dim 512 on Hopper: two blocks of a cluster share 128 query rows.
//
// A step takes 128 keys. Block r of the cluster scores 64 of them for all rows, its warpgroups 64 rows each, and makes
// columns [256 r, 256 r + 256) of the output for all 128 keys: every byte of K and V is loaded once per cluster. The
// probabilities of the other 64 keys come from the other block, thread to thread: a score's place in the accumulator is
// its place in the left operand of the second product, so no layout changes on the way. The next step's scores are
// multiplied while this step's values are, and the softmax runs under the values' products.
// Exponentials are relative to a whole number not below the row's maximum, so that rescaling is exact in any dtype.
//
// Compile-time: BFLOAT16, STATS, and what call.cuh lists but DROPOUT.
#include "call.cuh"
#include "hopper.cuh"

constexpr int D = 512;
constexpr int HALF = D / 2;
constexpr int BM = 128, BN = 128;  // rows of a cluster, keys of a step
constexpr int KEYS = BN / 2;       // keys that a block scores
constexpr int CHUNKS = D / 64;
constexpr int THREADS = 384;       // a warpgroup that loads, two that compute
constexpr u32 Q_CHUNK = BM * 128;  // bytes
// A slot of the ring: SLOT_CHUNKS chunks of 64 keys x 64 columns, or of 16 keys x 256 columns of the values. TMA is slow
// with boxes of 8 KB: of one chunk each, ten slots were 8% slower than five of two.
constexpr int SLOT_CHUNKS = 2;
constexpr u32 SLOT = 8192 * SLOT_CHUNKS;
constexpr int STAGES = 10 / SLOT_CHUNKS;
constexpr int K_SLOTS = 8 / SLOT_CHUNKS;  // of a step's keys
constexpr int V_SLOTS = 4 / SLOT_CHUNKS;  // of the values of 64 keys
constexpr u32 RING = CHUNKS * Q_CHUNK;
constexpr u32 MAIL = RING + STAGES * SLOT;      // probabilities from the other block: [2][4][128] of 16 bytes
constexpr u32 REFERENCES = MAIL + 2 * 8192;     // and what they are relative to: [2][128] pairs of fp32
constexpr u32 BARRIERS = REFERENCES + 2 * 1024;
constexpr u32 FULL = BARRIERS, EMPTY = FULL + 8 * STAGES, Q_FULL = EMPTY + 8 * STAGES, MAIL_FULL = Q_FULL + 8,
              MAIL_FREE = MAIL_FULL + 16;
// Dynamic shared memory: MAIL_FREE + 16 bytes.

// Kernel argument; the host packs the same fields in the same order.
struct TwinCall {
    TensorMap query, key, value;
    int key_b, key_h, value_b, value_h;  // factors of a coordinate, 0 in a broadcast dim
    Call call;
};

__device__ __forceinline__ float finite(float reference) { return reference == -infinity() ? 0.f : reference; }

struct Slots {
    int slot = 0;
    u32 phase = 0;
    __device__ __forceinline__ void advance() {
        if (++slot == STAGES) {
            slot = 0;
            phase ^= 1;
        }
    }
};

// What a computing thread carries through the steps.
struct Rows {
    float out[128];        // [64 rows, 256 columns] of a warpgroup
    float scores[32];      // [64 rows, 64 keys]
    u32 own[4][4];         // probabilities of this block's keys
    u32 other[4][4];       // and of the other block's
    u32 next[4][4];        // of the next step's own keys, while own is still being multiplied
    float reference[2];    // what out is relative to, for rows g and g + 8
    float own_reference[2];  // what own is relative to
    float sum[2];          // of own probabilities, relative to own_reference between softmax and receive, else reference
};

struct Place {
    u32 shared, group, warp, lane, thread;  // group: 0 or 1, of the two that compute; thread: in its group
    u32 rank, mail_remote, references_remote, mail_full_remote, mail_free_remote;
};

// The slot `count` places before another, 0 <= count <= STAGES.
__device__ __forceinline__ int before(int slot, int count) {
    slot -= count;
    return slot < 0 ? slot + STAGES : slot;
}

__device__ __forceinline__ void release(const Place& at, int slot) {
    if (at.lane == 0) barrier_arrive(at.shared + EMPTY + 8 * slot);
}

// Start scores = q k^T over a step's keys. Slots are freed as products finish, all but the last.
__device__ __forceinline__ void start_scores(Rows& rows, const Place& at, Slots& ring) {
#pragma unroll
    for (int s = 0; s < K_SLOTS; ++s) {
        barrier_wait(at.shared + FULL + 8 * ring.slot, ring.phase);
        products_begin();
        const u32 q = hidden(at.shared) + SLOT_CHUNKS * s * Q_CHUNK + at.group * 8192;
        const u32 k = hidden(at.shared) + RING + ring.slot * SLOT;
#pragma unroll
        for (int c = 0; c < SLOT_CHUNKS; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                product_64(rows.scores, matrix(q + c * Q_CHUNK + 32 * i, 16, 1024), matrix(k + c * 8192 + 32 * i, 16, 1024),
                           s || c || i);
        products_commit();
        if (s) {
            products_wait<1>();
            release(at, before(ring.slot, 1));
        }
        ring.advance();
    }
}

// Start out += weights v over the next V_SLOTS slots.
__device__ __forceinline__ void start_values(Rows& rows, const u32 (&weights)[4][4], const Place& at, Slots& ring) {
#pragma unroll
    for (int s = 0; s < V_SLOTS; ++s) {
        barrier_wait(at.shared + FULL + 8 * ring.slot, ring.phase);
        products_begin();
        const u32 v = hidden(at.shared) + RING + ring.slot * SLOT;
#pragma unroll
        for (int i = 0; i < SLOT_CHUNKS; ++i)
            product_256(rows.out, weights[SLOT_CHUNKS * s + i], matrix(v + 2048 * i, 2048 * SLOT_CHUNKS, 1024));
        products_commit();
        ring.advance();
    }
}

// Wait for a quarter of a step's products with the values, and free its slots. `first`: the slot of the first of all.
template <int QUARTER>
__device__ __forceinline__ void finish_values(const Place& at, int first) {
    constexpr int EACH = V_SLOTS / 2;
    products_wait<(3 - QUARTER) * EACH>();
#pragma unroll
    for (int i = QUARTER * EACH; i < (QUARTER + 1) * EACH; ++i) release(at, before(first, STAGES - i % STAGES));
}

// The other block's probabilities, and everything made relative to the larger reference of both.
__device__ __forceinline__ void receive(Rows& rows, const Place& at, u32 phase) {
    barrier_wait_cluster(at.shared + MAIL_FULL + 8 * at.group, phase);
    float theirs[2];
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(theirs[0]), "=f"(theirs[1])
                 : "r"(at.shared + REFERENCES + at.group * 1024 + at.thread * 8)
                 : "memory");
#pragma unroll
    for (int i = 0; i < 4; ++i)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(rows.other[i][0]), "=r"(rows.other[i][1]), "=r"(rows.other[i][2]), "=r"(rows.other[i][3])
                     : "r"(at.shared + MAIL + at.group * 8192 + i * 2048 + at.thread * 16)
                     : "memory");
    __syncwarp();
    if (at.lane == 0) barrier_arrive_remote(at.mail_free_remote);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float now = fmaxf(rows.own_reference[r], theirs[r]);  // own_reference is not below the one of out
        const float pivot = finite(now);
        const float shrink = exp2_fast(rows.reference[r] - pivot);
        const float own = exp2_fast(rows.own_reference[r] - pivot), other = exp2_fast(theirs[r] - pivot);
        const u32 own_pair = pack(own, own), other_pair = pack(other, other);
        rows.sum[r] *= own;
        rows.reference[r] = now;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            rows.own[i][r] = multiply_pair(rows.own[i][r], own_pair);
            rows.own[i][r + 2] = multiply_pair(rows.own[i][r + 2], own_pair);
            rows.other[i][r] = multiply_pair(rows.other[i][r], other_pair);
            rows.other[i][r + 2] = multiply_pair(rows.other[i][r + 2], other_pair);
        }
#pragma unroll
        for (int n = 0; n < 32; ++n) {
            rows.out[4 * n + 2 * r] *= shrink;
            rows.out[4 * n + 2 * r + 1] *= shrink;
        }
    }
}

// Scores of the keys [key, key + 64) to logits, and the reference of their exponentials. TESTED: some row of the block
// may not see all of them.
template <bool TESTED>
__device__ __forceinline__ void find_reference(
    Rows& rows, const Call& call, const Seen& seen, const Range (&range)[2], const int (&row)[2], int key, int t) {
    float peak[2] = {-infinity(), -infinity()};
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float& z = rows.scores[4 * n + e];
            z = seen.logit(call, z, row[e >> 1], key + 8 * n + 2 * t + (e & 1), range[e >> 1], TESTED);
            peak[e >> 1] = fmaxf(peak[e >> 1], z);
        }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        peak[r] = fmaxf(peak[r], __shfl_xor_sync(~0u, peak[r], 1));
        peak[r] = fmaxf(peak[r], __shfl_xor_sync(~0u, peak[r], 2));
        rows.own_reference[r] = fmaxf(rows.reference[r], ceilf(peak[r]));
        rows.sum[r] *= exp2_fast(rows.reference[r] - finite(rows.own_reference[r]));
    }
}

// Logits of columns [32 PART, 32 PART + 32) to rounded probabilities, and into the sum.
template <int PART>
__device__ __forceinline__ void exponentiate(Rows& rows) {
    const float pivot[2] = {finite(rows.own_reference[0]), finite(rows.own_reference[1])};
#pragma unroll
    for (int n = 4 * PART; n < 4 * PART + 4; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float& z = rows.scores[4 * n + e];
            z = exp2_fast(z - pivot[e >> 1]);
            rows.sum[e >> 1] += z;
        }
#pragma unroll
    for (int i = 2 * PART; i < 2 * PART + 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int n = 8 * i + 4 * (j >> 1) + 2 * (j & 1);
            rows.next[i][j] = pack(rows.scores[n], rows.scores[n + 1]);
        }
}

// Give the probabilities to the other block.
__device__ __forceinline__ void send(const Rows& rows, const Place& at, u32 free_phase) {
    barrier_wait_cluster(at.shared + MAIL_FREE + 8 * at.group, free_phase);
#pragma unroll
    for (int i = 0; i < 4; ++i)
        send16(at.mail_remote + i * 2048, rows.next[i][0], rows.next[i][1], rows.next[i][2], rows.next[i][3],
               at.mail_full_remote);
    send8(at.references_remote, rows.own_reference[0], rows.own_reference[1], at.mail_full_remote);
}

__device__ __forceinline__ void take_next(Rows& rows) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) rows.own[i][j] = rows.next[i][j];
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    twin_forward(const __grid_constant__ TwinCall twin) {
    extern __shared__ __align__(1024) u8 memory[];
    const Call& call = twin.call;
    const u32 shared = shared_address(memory);
    const u32 rank = cluster_rank();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

    int i_tile = (blockIdx.x >> 1) % call.tiles;
    const int lane_bh = (blockIdx.x >> 1) / call.tiles;
#if CAUSAL
    i_tile = call.tiles - 1 - i_tile;  // the longest rows first: a late long tile would run alone
#endif
    const int i_b = lane_bh / call.heads, i_h = lane_bh % call.heads, i_hkv = i_h / call.group;
    const int row0 = i_tile * BM;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared + FULL + 8 * i, 1);
            barrier_init(shared + EMPTY + 8 * i, 8);
        }
        barrier_init(shared + Q_FULL, 1);
        for (int i = 0; i < 2; ++i) {
            barrier_init(shared + MAIL_FULL + 8 * i, 1);
            barrier_init(shared + MAIL_FREE + 8 * i, 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }

    // Keys [lo, hi) that some row of the tile sees, and [inner_lo, inner_hi) that every row does: the same in both blocks.
    int lo = 0, hi = call.n_kv, inner_lo = 0, inner_hi = call.n_kv;
#if INTERVALS
    {
        int* hull = reinterpret_cast<int*>(memory + RING);  // before anything is loaded there
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
        // TMA writes there next: order these reads before it.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
#elif CAUSAL
    hi = min(hi, min(row0 + BM, call.n_q));
    inner_hi = min(inner_hi, row0 + 1);
#endif
    const int begin = lo / BN * BN;
    const int steps = (hi - begin + BN - 1) / BN;
    cluster_sync();

    if (warp < 4) {
        give_registers<24>();
        if (threadIdx.x == 0 && steps > 0) {
            const int kb = i_b * twin.key_b, kh = i_hkv * twin.key_h, vb = i_b * twin.value_b, vh = i_hkv * twin.value_h;
            Slots ring;
            barrier_expect(shared + Q_FULL, CHUNKS * Q_CHUNK);
            for (int c = 0; c < CHUNKS; ++c)
                load_box(shared + c * Q_CHUNK, &twin.query, row0, c, i_h, i_b, shared + Q_FULL);
            auto load = [&](const TensorMap* map, int key, int chunk, int h, int b) {
                barrier_wait(shared + EMPTY + 8 * ring.slot, ring.phase ^ 1);
                barrier_expect(shared + FULL + 8 * ring.slot, SLOT);
                load_box(shared + RING + ring.slot * SLOT, map, key, chunk, h, b, shared + FULL + 8 * ring.slot);
                ring.advance();
            };
            auto load_keys = [&](int step) {
                for (int s = 0; s < K_SLOTS; ++s) load(&twin.key, begin + step * BN + rank * KEYS, SLOT_CHUNKS * s, kh, kb);
            };
            auto load_values = [&](int step) {
                for (int s = 0; s < 2 * V_SLOTS; ++s) {
                    const int part = s < V_SLOTS ? rank : 1 - rank;  // this block's keys first
                    load(&twin.value, begin + step * BN + part * KEYS + s % V_SLOTS * 16 * SLOT_CHUNKS, rank * (HALF / 64), vh, vb);
                }
            };
            load_keys(0);
#pragma unroll 1
            for (int step = 1; step < steps; ++step) {
                load_keys(step);
                load_values(step - 1);
            }
            load_values(steps - 1);
        }
        __syncwarp();
    } else {
        take_registers<240>();
        Rows rows;
#pragma unroll
        for (int i = 0; i < 128; ++i) rows.out[i] = 0.f;
        Place at;
        at.shared = shared;
        at.lane = lane;
        at.group = (warp - 4) >> 2;
        at.warp = warp & 3;
        at.thread = threadIdx.x & 127;
        at.rank = rank;
        const u32 peer = rank ^ 1;
        at.mail_remote = remote_address(shared + MAIL + at.group * 8192 + at.thread * 16, peer);
        at.references_remote = remote_address(shared + REFERENCES + at.group * 1024 + at.thread * 8, peer);
        at.mail_full_remote = remote_address(shared + MAIL_FULL + 8 * at.group, peer);
        at.mail_free_remote = remote_address(shared + MAIL_FREE + 8 * at.group, peer);
        const int g = lane >> 2, t = lane & 3;
        int row[2];
        Range range[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            row[r] = row0 + at.group * 64 + at.warp * 16 + g + 8 * r;
            range[r] = row_range(call, i_b, row[r]);
            rows.reference[r] = rows.own_reference[r] = -infinity();
            rows.sum[r] = 0.f;
        }
        const Seen seen(call, i_b, i_h);
        const u32 mail_full = shared + MAIL_FULL + 8 * at.group;
        const bool arms = at.thread == 0;
        constexpr u32 MESSAGE = 128 * (64 + 8);
        Slots ring;
        int key = begin + rank * KEYS;

        if (steps > 0) {
            if (arms) barrier_expect(mail_full, MESSAGE);
            barrier_wait(shared + Q_FULL, 0);
            start_scores(rows, at, ring);
            products_wait<0>();
            settle(rows.scores);
            release(at, before(ring.slot, 1));
            find_reference<true>(rows, call, seen, range, row, key, t);
            exponentiate<0>(rows);
            exponentiate<1>(rows);
            send(rows, at, 1);
            take_next(rows);
#pragma unroll 1
            for (int step = 1; step < steps; ++step) {
                key += BN;
                start_scores(rows, at, ring);
                receive(rows, at, (step - 1) & 1);
                if (arms) barrier_expect(mail_full, MESSAGE);
                const int first_values = ring.slot;
                start_values(rows, rows.own, at, ring);
                start_values(rows, rows.other, at, ring);
                products_wait<2 * V_SLOTS>();
                settle(rows.scores);
                release(at, before(first_values, 1));
                if (key >= inner_lo && key + KEYS <= inner_hi)
                    find_reference<false>(rows, call, seen, range, row, key, t);
                else
                    find_reference<true>(rows, call, seen, range, row, key, t);
                finish_values<0>(at, first_values);
                exponentiate<0>(rows);
                finish_values<1>(at, first_values);
                exponentiate<1>(rows);
                send(rows, at, (step & 1) ^ 1);
                finish_values<2>(at, first_values);
                finish_values<3>(at, first_values);
                settle(rows.out);
                take_next(rows);
            }
            receive(rows, at, (steps - 1) & 1);
            start_values(rows, rows.own, at, ring);
            start_values(rows, rows.other, at, ring);
            products_wait<0>();
            settle(rows.out);
        }

        // Each block summed over its own keys: add what the other has, through the memory of the query, now free.
        float* sums = reinterpret_cast<float*>(memory);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            rows.sum[r] += __shfl_xor_sync(~0u, rows.sum[r], 1);
            rows.sum[r] += __shfl_xor_sync(~0u, rows.sum[r], 2);
            if (t == 0 && steps > 0)
                asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote_address(
                                 shared + 4 * (at.group * 64 + at.warp * 16 + g + 8 * r), peer)),
                             "f"(rows.sum[r])
                             : "memory");
        }
        cluster_sync();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (steps > 0) rows.sum[r] += sums[at.group * 64 + at.warp * 16 + g + 8 * r];
            if (row[r] >= call.n_q) continue;
            const bool empty = rows.sum[r] == 0.f;
            const float total = empty ? 1.f : rows.sum[r];
            const float norm = 1.f / total;
            u16* target = call.out.data + i_b * call.out.b + i_h * call.out.h + row[r] * call.out.n + rank * HALF;
#pragma unroll
            for (int n = 0; n < 32; ++n)
                *reinterpret_cast<u32*>(target + 8 * n + 2 * t) =
                    pack(rows.out[4 * n + 2 * r] * norm, rows.out[4 * n + 2 * r + 1] * norm);
            if (rank == 0 && t == 0) {
                const i64 where = static_cast<i64>(lane_bh) * call.n_q + row[r];
                const float log_sum = log2_fast(total);
                call.lse[where] = empty ? -infinity() : (rows.reference[r] + log_sum) * LN2;
#if STATS
                call.stats[where] = rows.reference[r];
                call.stats[call.stats_size + where] = log_sum;
#endif
            }
        }
        return;
    }
    cluster_sync();
}
