// The forward for head dims 328 to 512 on Hopper: two blocks of a cluster share 128 query rows.
//
// A step takes 2 KEYS keys. Block r of the cluster scores KEYS of them for all rows, its warpgroups 64 rows each, and makes
// columns [HALF r, HALF r + HALF) of the output for all of them: every byte of K and V is loaded once per cluster. The
// probabilities of the other keys come from the other block, thread to thread: a score's place in the accumulator is its
// place in the left operand of the second product, so no layout changes on the way. The next step's scores are multiplied
// while this step's values are, and the softmax runs under the values' products.
// Exponentials are relative to a whole number, so that rescaling is exact in any dtype. It follows the row's maximum only
// when that has grown by more than SLACK, so that both blocks nearly always have the same one.
//
// Compile-time: D, KEYS, PIECE (chunks of a slot), STAGES, LATE (the other block's probabilities are multiplied a step
// later), BFLOAT16, STATS, and what call.cuh lists but DROPOUT.
#include "tma_call.cuh"

constexpr int HALF = (D / 2 + 15) / 16 * 16;  // output columns of a block; TMA fills with zeros what lies past D
constexpr int BM = 128, BN = 2 * KEYS;        // rows of a cluster, keys of a step
constexpr int STEPS_16 = KEYS / 16;
constexpr int THREADS = 384;  // a warpgroup that loads, two that compute
constexpr int COLUMNS = (D + 15) / 16 * 16, CHUNKS = (D + 63) / 64, V_CHUNKS = (HALF + 63) / 64;
// A slot of the ring holds PIECE chunks of KEYS keys x 64 columns.
static_assert(STAGES > 2 * ((V_CHUNKS + PIECE - 1) / PIECE), "a step's values and the last keys must fit");
constexpr int K_PIECES = (CHUNKS + PIECE - 1) / PIECE, V_PIECES = (V_CHUNKS + PIECE - 1) / PIECE;
constexpr bool WHOLE = D % 64 == 0 && CHUNKS % PIECE == 0;  // a piece of the keys in one box; also the query's map
constexpr bool WHOLE_VALUES = D % 128 == 0 && V_CHUNKS % PIECE == 0;
constexpr u32 Q_CHUNK = BM * 128;  // bytes
constexpr u32 CHUNK = KEYS * 128;
constexpr u32 SLOT = PIECE * CHUNK;
constexpr u32 RING = CHUNKS * Q_CHUNK;
constexpr u32 MAIL_GROUP = STEPS_16 * 2048;
constexpr u32 MAIL = RING + STAGES * SLOT;            // probabilities from the other block: [2][STEPS_16][128] of 16 bytes
constexpr u32 REFERENCES = MAIL + 2 * MAIL_GROUP;     // and what they are relative to: [2][128] pairs of fp32
constexpr u32 BARRIERS = REFERENCES + 2 * 1024;
constexpr u32 FULL = BARRIERS, EMPTY = FULL + 8 * STAGES, Q_FULL = EMPTY + 8 * STAGES, MAIL_FULL = Q_FULL + 8,
              MAIL_FREE = MAIL_FULL + 16;
constexpr u32 SUMS = MAIL_FREE + 16;  // of the other block: [128] fp32
// Dynamic shared memory: SUMS + 512 bytes.
constexpr u32 MESSAGE = 128 * (16 * STEPS_16 + 8);
constexpr float SLACK = 8.f;  // exponentials reach 2^SLACK, sums and products are fp32

// What a computing thread carries through the steps.
struct Rows {
    float out[HALF / 2];      // [64 rows, HALF] of a warpgroup
    float scores[KEYS / 2];   // [64 rows, KEYS]
    u32 own[STEPS_16][4];     // probabilities of this block's keys
    u32 other[STEPS_16][4];   // and of the other block's
    float reference[2];       // what out is relative to, for rows g and g + 8
    float own_reference[2];   // what own is relative to
    float theirs[2];          // what other is relative to
    float sum[2];             // of own probabilities, relative to own_reference between softmax and merge, else reference
};

struct Place {
    u32 shared, group, warp, lane, thread;  // group: 0 or 1, of the two that compute; thread: in its group
    u32 mail_remote, references_remote, mail_full_remote, mail_free_remote;
};

__device__ __forceinline__ void release(const Place& at, int slot) {
    if (at.lane == 0) barrier_arrive(at.shared + EMPTY + 8 * slot);
}

// Start scores = q k^T over a step's keys. Slots are freed as products finish, all but the last.
template <int P = 0>
__device__ __forceinline__ void start_scores(Rows& rows, const Place& at, Slots<STAGES>& ring) {
    constexpr int WIDTH = P + 1 < K_PIECES ? 64 * PIECE : COLUMNS - 64 * PIECE * P;
    barrier_wait(at.shared + FULL + 8 * ring.slot, ring.phase);
    products_begin();
    const u32 q = hidden(at.shared) + PIECE * P * Q_CHUNK + at.group * 8192;
    const u32 k = hidden(at.shared) + RING + ring.slot * SLOT;
#pragma unroll
    for (int i = 0; i < WIDTH / 16; ++i)
        Product<KEYS>::shared(rows.scores, matrix(q + i / 4 * Q_CHUNK + i % 4 * 32, 16, 1024),
                              matrix(k + i / 4 * CHUNK + i % 4 * 32, 16, 1024), P || i);
    products_commit();
    if (P) {
        products_wait<1>();
        release(at, ring.before(1));
    }
    ring.advance();
    if constexpr (P + 1 < K_PIECES) start_scores<P + 1>(rows, at, ring);
}

// Start out += weights v over the next V_PIECES slots.
template <int P = 0>
__device__ __forceinline__ void start_values(
    Rows& rows, const u32 (&weights)[STEPS_16][4], const Place& at, Slots<STAGES>& ring) {
    constexpr int WIDTH = P + 1 < V_PIECES ? 64 * PIECE : HALF - 64 * PIECE * P;
    barrier_wait(at.shared + FULL + 8 * ring.slot, ring.phase);
    products_begin();
    const u32 v = hidden(at.shared) + RING + ring.slot * SLOT;
#pragma unroll
    for (int i = 0; i < STEPS_16; ++i)
        Product<WIDTH>::registers(rows.out + 32 * PIECE * P, weights[i], matrix(v + 2048 * i, CHUNK, 1024));
    products_commit();
    ring.advance();
    if constexpr (P + 1 < V_PIECES) start_values<P + 1>(rows, weights, at, ring);
}

// Wait for the products FROM to TO of a step's 2 V_PIECES with the values, and free their slots. The ring stands behind.
template <int FROM, int TO>
__device__ __forceinline__ void finish_values(const Place& at, const Slots<STAGES>& ring) {
    if constexpr (FROM < TO) {
        products_wait<2 * V_PIECES - 1 - FROM>();
        release(at, ring.before(2 * V_PIECES - FROM));
        finish_values<FROM + 1, TO>(at, ring);
    }
}

// The other block's probabilities.
__device__ __forceinline__ void receive(Rows& rows, const Place& at, u32 phase) {
    barrier_wait_cluster(at.shared + MAIL_FULL + 8 * at.group, phase);
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(rows.theirs[0]), "=f"(rows.theirs[1])
                 : "r"(at.shared + REFERENCES + at.group * 1024 + at.thread * 8)
                 : "memory");
#pragma unroll
    for (int i = 0; i < STEPS_16; ++i)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(rows.other[i][0]), "=r"(rows.other[i][1]), "=r"(rows.other[i][2]), "=r"(rows.other[i][3])
                     : "r"(at.shared + MAIL + at.group * MAIL_GROUP + i * 2048 + at.thread * 16)
                     : "memory");
    __syncwarp();
    if (at.lane == 0) barrier_arrive_remote(at.mail_free_remote);
    if (at.thread == 0) barrier_expect(at.shared + MAIL_FULL + 8 * at.group, MESSAGE);  // of the next message
}

// Everything made relative to the larger reference of both blocks.
__device__ __forceinline__ void merge(Rows& rows) {
    // own_reference is not below the one of out
    const bool differ = rows.own_reference[0] != rows.reference[0] || rows.theirs[0] != rows.reference[0] ||
                        rows.own_reference[1] != rows.reference[1] || rows.theirs[1] != rows.reference[1];
    if (LATE && !__any_sync(~0u, differ)) return;  // no branch while products are under way: they would be serialised
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float now = fmaxf(rows.own_reference[r], rows.theirs[r]);
        const float pivot = finite(now);
        const float shrink = exp2_fast(rows.reference[r] - pivot);
        const float own = exp2_fast(rows.own_reference[r] - pivot), other = exp2_fast(rows.theirs[r] - pivot);
        const u32 own_pair = pack(own, own), other_pair = pack(other, other);
        rows.sum[r] *= own;
        rows.reference[r] = rows.own_reference[r] = now;
#pragma unroll
        for (int i = 0; i < STEPS_16; ++i) {
            rows.own[i][r] = multiply_pair(rows.own[i][r], own_pair);
            rows.own[i][r + 2] = multiply_pair(rows.own[i][r + 2], own_pair);
            rows.other[i][r] = multiply_pair(rows.other[i][r], other_pair);
            rows.other[i][r + 2] = multiply_pair(rows.other[i][r + 2], other_pair);
        }
#pragma unroll
        for (int n = 0; n < HALF / 8; ++n) {
            rows.out[4 * n + 2 * r] *= shrink;
            rows.out[4 * n + 2 * r + 1] *= shrink;
        }
    }
}

// Scores of the keys [key, key + KEYS) to logits, and the reference of their exponentials; returns what a score that was
// left as it is must be multiplied with. TESTED: some row of the block may not see all of them.
template <bool TESTED>
__device__ __forceinline__ float find_reference(
    Rows& rows, const Call& call, const Seen& seen, const Range (&range)[2], const int (&row)[2], int key, int t) {
    float peak[2] = {-infinity(), -infinity()};
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float& z = rows.scores[4 * n + e];
            if (TESTED) z = seen.logit(call, z, row[e >> 1], key + 8 * n + 2 * t + (e & 1), range[e >> 1], true);
            peak[e >> 1] = fmaxf(peak[e >> 1], z);
        }
    const float slope = TESTED ? 1.f : call.slope;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        peak[r] = fmaxf(peak[r], __shfl_xor_sync(~0u, peak[r], 1));
        peak[r] = fmaxf(peak[r], __shfl_xor_sync(~0u, peak[r], 2)) * slope;
        rows.own_reference[r] = peak[r] > rows.reference[r] + SLACK ? ceilf(peak[r]) : rows.reference[r];
        rows.sum[r] *= exp2_fast(rows.reference[r] - finite(rows.own_reference[r]));
    }
    return slope;
}

// Logits of the columns [16 FROM, 16 TO) to exponentials, and into the sum.
template <int FROM, int TO>
__device__ __forceinline__ void exponentiate(Rows& rows, float slope) {
    const float pivot[2] = {finite(rows.own_reference[0]), finite(rows.own_reference[1])};
#pragma unroll
    for (int n = 2 * FROM; n < 2 * TO; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float& z = rows.scores[4 * n + e];
            z = exp2_fast(fmaf(z, slope, -pivot[e >> 1]));
            rows.sum[e >> 1] += z;
        }
}

// Exponentials of the columns [16 FROM, 16 TO), rounded.
template <int FROM, int TO>
__device__ __forceinline__ void round_to(u32 (&weights)[STEPS_16][4], const Rows& rows) {
#pragma unroll
    for (int i = FROM; i < TO; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) weights[i][j] = pack(rows.scores[8 * i + 2 * j], rows.scores[8 * i + 2 * j + 1]);
}

// Give probabilities to the other block.
__device__ __forceinline__ void send(
    const Rows& rows, const u32 (&weights)[STEPS_16][4], const Place& at, u32 free_phase) {
    barrier_wait_cluster(at.shared + MAIL_FREE + 8 * at.group, free_phase);
#pragma unroll
    for (int i = 0; i < STEPS_16; ++i)
        send16(at.mail_remote + i * 2048, weights[i][0], weights[i][1], weights[i][2], weights[i][3], at.mail_full_remote);
    send8(at.references_remote, rows.own_reference[0], rows.own_reference[1], at.mail_full_remote);
}

// What a cluster makes.
struct Tile {
    int row0, i_b, i_h;
    // The roles ask for it anew: no register holds it across.
    __device__ __forceinline__ explicit Tile(const TmaCall& tma) {
        const Work work = work_at(tma, hidden(blockIdx.x) >> 1);
        row0 = work.tile * BM, i_b = work.lane_bh / tma.call.heads, i_h = work.lane_bh % tma.call.heads;
    }
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    twin_forward(const __grid_constant__ TmaCall tma) {
    extern __shared__ __align__(1024) u8 memory[];
    const Call& call = tma.call;
    const u32 shared = shared_address(memory);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

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
    const Hull hull = [&] {
        const Tile tile(tma);
        return hull_of<BM>(call, tile.i_b, tile.row0, lane);  // the same in both blocks
    }();
    const int begin = hull.lo / BN * BN;
    const int steps = (hull.hi - begin + BN - 1) / BN;
    cluster_sync();

    if (warp < 4) {
        give_registers<24>();
        if (threadIdx.x == 0 && steps > 0) {
            // Of the 24 registers that this warpgroup keeps, few are free: what is cheap is asked for anew.
            const Tile tile(tma);
            const int i_b = tile.i_b, i_hkv = tile.i_h / call.group;
            Slots<STAGES> ring;
            barrier_expect(shared + Q_FULL, CHUNKS * Q_CHUNK);
            for (int c = 0; c < CHUNKS; ++c)
                load_chunks<WHOLE>(shared + c * Q_CHUNK, Q_CHUNK, 1, &tma.query, tile.row0, 64 * c, tile.i_h, i_b,
                                   shared + Q_FULL);
            auto load_keys = [&](int step) {
#pragma unroll
                for (int p = 0; p < K_PIECES; ++p) {
                    const int chunks = min(PIECE, CHUNKS - PIECE * p);
                    const u32 full = shared + FULL + 8 * ring.slot;
                    barrier_wait(shared + EMPTY + 8 * ring.slot, ring.phase ^ 1);
                    barrier_expect(full, chunks * CHUNK);
                    load_chunks<WHOLE>(shared + RING + ring.slot * SLOT, CHUNK, chunks, &tma.key,
                                       begin + step * BN + cluster_rank() * KEYS, 64 * PIECE * p, hidden(i_hkv) * tma.key_h, hidden(i_b) * tma.key_b, full);
                    ring.advance();
                }
            };
            // `part` 0: of the keys that this block scores, 1: of the others. Before the first step: zeros.
            auto load_values = [&](int step, u32 part) {
                const int key = step < 0 ? call.n_kv : begin + step * BN + (cluster_rank() ^ part) * KEYS;
#pragma unroll
                for (int p = 0; p < V_PIECES; ++p) {
                    const int chunks = min(PIECE, V_CHUNKS - PIECE * p);
                    const u32 full = shared + FULL + 8 * ring.slot;
                    barrier_wait(shared + EMPTY + 8 * ring.slot, ring.phase ^ 1);
                    barrier_expect(full, chunks * CHUNK);
                    load_chunks<WHOLE_VALUES>(shared + RING + ring.slot * SLOT, CHUNK, chunks, &tma.value, key,
                                              cluster_rank() * HALF + 64 * PIECE * p, hidden(i_hkv) * tma.value_h,
                                              hidden(i_b) * tma.value_b, full);
                    ring.advance();
                }
            };
#pragma unroll 1
            for (int step = 0; step <= steps; ++step) {
                if (step < steps) load_keys(step);
                if (step > 0) {
                    load_values(step - 1, 0);
                    load_values(step - 1 - LATE, 1);
                }
            }
            if (LATE) load_values(steps - 1, 1);
        }
        __syncwarp();
    } else {
        take_registers<240>();
        Rows rows;
#pragma unroll
        for (int i = 0; i < HALF / 2; ++i) rows.out[i] = 0.f;
        Place at;
        at.shared = shared;
        at.lane = lane;
        at.group = (warp - 4) >> 2;
        at.warp = warp & 3;
        at.thread = threadIdx.x & 127;
        const u32 rank = cluster_rank(), peer = rank ^ 1;
        at.mail_remote = remote_address(shared + MAIL + at.group * MAIL_GROUP + at.thread * 16, peer);
        at.references_remote = remote_address(shared + REFERENCES + at.group * 1024 + at.thread * 8, peer);
        at.mail_full_remote = remote_address(shared + MAIL_FULL + 8 * at.group, peer);
        at.mail_free_remote = remote_address(shared + MAIL_FREE + 8 * at.group, peer);
        const int g = lane >> 2, t = lane & 3;
        const Tile tile(tma);
        const int row0 = tile.row0, i_b = tile.i_b, i_h = tile.i_h;
        int row[2];
        Range range[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            row[r] = row0 + at.group * 64 + at.warp * 16 + g + 8 * r;
            range[r] = row_range(call, i_b, row[r]);
            rows.reference[r] = rows.own_reference[r] = rows.theirs[r] = -infinity();
            rows.sum[r] = 0.f;
        }
        const Seen seen(call, i_b, i_h);
        Slots<STAGES> ring;
        int key = begin + rank * KEYS;
        constexpr bool ALWAYS_TESTED = MASK || KEY_MASK || BIAS;
        auto reference_of_scores = [&]() {
            // A negative scale turns the maximum of the raw scores into the minimum of the logits.
            if (!ALWAYS_TESTED && key >= hull.inner_lo && key + KEYS <= hull.inner_hi && call.slope >= 0.f)
                return find_reference<false>(rows, call, seen, range, row, key, t);
            return find_reference<true>(rows, call, seen, range, row, key, t);
        };

        if (steps > 0) {
            if (at.thread == 0) barrier_expect(shared + MAIL_FULL + 8 * at.group, MESSAGE);
            barrier_wait(shared + Q_FULL, 0);
            start_scores(rows, at, ring);
            products_wait<0>();
            settle(rows.scores);
            release(at, ring.before(1));
            exponentiate<0, STEPS_16>(rows, reference_of_scores());
            round_to<0, STEPS_16>(rows.own, rows);
#if LATE
#pragma unroll
            for (int i = 0; i < STEPS_16; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) rows.other[i][j] = 0;
            merge(rows);
#else
            send(rows, rows.own, at, 1);
#endif
#pragma unroll 1
            for (int step = 1; step < steps; ++step) {
                key += BN;
                start_scores(rows, at, ring);
#if LATE
                send(rows, rows.own, at, step & 1);
#else
                receive(rows, at, (step - 1) & 1);
                merge(rows);
#endif
                start_values(rows, rows.own, at, ring);
                start_values(rows, rows.other, at, ring);
                products_wait<2 * V_PIECES>();
                settle(rows.scores);
                release(at, ring.before(2 * V_PIECES + 1));
                const float slope = reference_of_scores();
                finish_values<0, V_PIECES / 2>(at, ring);
                exponentiate<0, STEPS_16 / 2>(rows, slope);
#if LATE
                finish_values<V_PIECES / 2, V_PIECES>(at, ring);
                exponentiate<STEPS_16 / 2, STEPS_16>(rows, slope);
                finish_values<V_PIECES, 2 * V_PIECES>(at, ring);
                settle(rows.out);
                round_to<0, STEPS_16>(rows.own, rows);
                receive(rows, at, (step - 1) & 1);
                merge(rows);
#else
                u32 next[STEPS_16][4];  // while own is still being multiplied
                round_to<0, STEPS_16 / 2>(next, rows);
                finish_values<V_PIECES / 2, V_PIECES>(at, ring);
                exponentiate<STEPS_16 / 2, STEPS_16>(rows, slope);
                round_to<STEPS_16 / 2, STEPS_16>(next, rows);
                send(rows, next, at, (step & 1) ^ 1);
                finish_values<V_PIECES, 2 * V_PIECES>(at, ring);
                settle(rows.out);
#pragma unroll
                for (int i = 0; i < STEPS_16; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) rows.own[i][j] = next[i][j];
#endif
            }
#if LATE
            send(rows, rows.own, at, steps & 1);
            start_values(rows, rows.own, at, ring);
            start_values(rows, rows.other, at, ring);
            finish_values<0, 2 * V_PIECES>(at, ring);
            settle(rows.out);
            receive(rows, at, (steps - 1) & 1);
            merge(rows);
            start_values(rows, rows.other, at, ring);
#else
            receive(rows, at, (steps - 1) & 1);
            merge(rows);
            start_values(rows, rows.own, at, ring);
            start_values(rows, rows.other, at, ring);
#endif
            products_wait<0>();
            settle(rows.out);
        }

        // Each block summed over its own keys: add what the other has.
        const float* sums = reinterpret_cast<const float*>(memory + SUMS);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            rows.sum[r] += __shfl_xor_sync(~0u, rows.sum[r], 1);
            rows.sum[r] += __shfl_xor_sync(~0u, rows.sum[r], 2);
            if (t == 0 && steps > 0)
                asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote_address(
                                 shared + SUMS + 4 * (at.group * 64 + at.warp * 16 + g + 8 * r), peer)),
                             "f"(rows.sum[r])
                             : "memory");
        }
        cluster_sync();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (steps > 0) rows.sum[r] += sums[at.group * 64 + at.warp * 16 + g + 8 * r];
            const bool empty = rows.sum[r] == 0.f;
            const float total = empty ? 1.f : rows.sum[r];
            const float norm = 1.f / total;
            u16* target = call.out.data + i_b * call.out.b + i_h * call.out.h + row[r] * call.out.n;
            const bool there = row[r] < call.n_q;
            if (rank == 0)
                store_row<HALF>(target, rows.out + 2 * r, norm, t, there);
            else
                store_row<D - HALF>(target + HALF, rows.out + 2 * r, norm, t, there);
            if (rank == 0 && t == 0 && there) {
                const i64 where = (static_cast<i64>(i_b) * call.heads + i_h) * call.n_q + row[r];
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
