// The forward up to head dim 320 on Hopper: one block makes all columns of 64 rows for each of its computing warpgroups.
//
// One warpgroup loads keys and values through TMA into a ring; a slot holds PIECE chunks of BN keys x 64 columns. The
// others multiply: the scores of the next step are started, then the values of this one, and the softmax of the next
// runs under the latter. Blocks stay and take tile after tile, so that the next tile's loads overlap this one's end.
// Exponentials are relative to a reference that follows the row's maximum only when that has grown by more than SLACK.
//
// Compile-time: D, BN, GROUPS (computing warpgroups), PIECE, STAGES, TURNS (warpgroups start products in turn), BFLOAT16,
// STATS, and what call.cuh lists but DROPOUT.
#include "tma_call.cuh"

constexpr int BM = 64 * GROUPS;
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int CHUNKS = (D + 63) / 64;
constexpr int COLUMNS = (D + 15) / 16 * 16;  // that products take; TMA fills with zeros what lies past D
constexpr int PIECES = (CHUNKS + PIECE - 1) / PIECE;
static_assert(STAGES >= 2 * PIECES, "the keys and the values of a step must fit");
constexpr bool WHOLE = D % 64 == 0;                // the query in one box
constexpr bool WHOLE_PIECES = WHOLE && CHUNKS % PIECE == 0;
constexpr u32 Q_CHUNK = BM * 128;                  // bytes
constexpr u32 CHUNK = BN * 128;
constexpr u32 SLOT = PIECE * CHUNK;
constexpr u32 RING = CHUNKS * Q_CHUNK;
constexpr u32 FULL = RING + STAGES * SLOT, EMPTY = FULL + 8 * STAGES, Q_FULL = EMPTY + 8 * STAGES, Q_EMPTY = Q_FULL + 8;
// Dynamic shared memory: Q_EMPTY + 8 bytes.
constexpr float SLACK = 8.f;  // exponentials reach 2^SLACK, sums and products are fp32
constexpr bool ALWAYS_TESTED = MASK || KEY_MASK || BIAS;

// Columns of a piece.
__device__ constexpr int columns_of(int piece) { return piece + 1 < PIECES ? 64 * PIECE : COLUMNS - 64 * PIECE * piece; }

// What a computing thread carries through the steps.
struct Rows {
    float out[COLUMNS / 2];      // [64 rows, COLUMNS] of a warpgroup
    float scores[BN / 2];        // [64 rows, BN]: scores, logits, then exponentials
    u32 weights[BN / 16][4];     // exponentials as the left operand of the product with the values
    float reference[2], sum[2];  // for rows g and g + 8
    float shrink[2];             // what out is to be multiplied with, after its products
};

struct Place {
    u32 shared, group, warp, lane;  // group: of those that compute; warp: in its group
};

__device__ __forceinline__ void release(const Place& at, u32 barrier) {
    if (at.lane == 0) barrier_arrive(barrier);
}

// Start out += weights v for the piece that lies in a slot, and the pieces after it in the slots that follow.
template <int P = 0>
__device__ __forceinline__ void start_values(Rows& rows, const Place& at, Slots<STAGES>& ring) {
    barrier_wait(at.shared + FULL + 8 * ring.slot, ring.phase);
    products_begin();
    const u32 v = hidden(at.shared) + RING + ring.slot * SLOT;
#pragma unroll
    for (int i = 0; i < BN / 16; ++i)
        Product<columns_of(P)>::registers(rows.out + 32 * PIECE * P, rows.weights[i], matrix(v + 2048 * i, CHUNK, 1024));
    products_commit();
    ring.advance();
    if constexpr (P + 1 < PIECES) start_values<P + 1>(rows, at, ring);
}

// Start scores = q k^T.
template <int P = 0>
__device__ __forceinline__ void start_scores(Rows& rows, const Place& at, Slots<STAGES>& ring) {
    barrier_wait(at.shared + FULL + 8 * ring.slot, ring.phase);
    products_begin();
    const u32 q = hidden(at.shared) + PIECE * P * Q_CHUNK + at.group * 8192;
    const u32 k = hidden(at.shared) + RING + ring.slot * SLOT;
#pragma unroll
    for (int i = 0; i < columns_of(P) / 16; ++i)
        Product<BN>::shared(rows.scores, matrix(q + i / 4 * Q_CHUNK + i % 4 * 32, 16, 1024),
                            matrix(k + i / 4 * CHUNK + i % 4 * 32, 16, 1024), P || i);
    products_commit();
    ring.advance();
    if constexpr (P + 1 < PIECES) start_scores<P + 1>(rows, at, ring);
}

// Free the PIECES slots that end `behind` places before the ring's.
__device__ __forceinline__ void free_slots(const Place& at, const Slots<STAGES>& ring, int behind) {
#pragma unroll
    for (int p = PIECES; p > 0; --p) release(at, at.shared + EMPTY + 8 * ring.before(p + behind));
}

// Scores of the keys [key, key + BN) to exponentials. TESTED: some row may not see all of them.
template <bool TESTED>
__device__ __forceinline__ void exponentiate(
    Rows& rows, const Call& call, const Seen& seen, const Range (&range)[2], const int (&row)[2], int key, int t) {
    float peak[2] = {-infinity(), -infinity()};
#pragma unroll
    for (int n = 0; n < BN / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float& z = rows.scores[4 * n + e];
            if (TESTED) z = seen.logit(call, z, row[e >> 1], key + 8 * n + 2 * t + (e & 1), range[e >> 1], true);
            peak[e >> 1] = fmaxf(peak[e >> 1], z);
        }
    const float slope = TESTED ? 1.f : call.slope;
    float pivot[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        peak[r] = fmaxf(peak[r], __shfl_xor_sync(~0u, peak[r], 1));
        peak[r] = fmaxf(peak[r], __shfl_xor_sync(~0u, peak[r], 2)) * slope;
        const float now = peak[r] > rows.reference[r] + SLACK ? peak[r] : rows.reference[r];
        pivot[r] = finite(now);
        rows.shrink[r] = exp2_fast(rows.reference[r] - pivot[r]);
        rows.sum[r] *= rows.shrink[r];
        rows.reference[r] = now;
    }
#pragma unroll
    for (int n = 0; n < BN / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float& z = rows.scores[4 * n + e];
            z = exp2_fast(fmaf(z, slope, -pivot[e >> 1]));
            rows.sum[e >> 1] += z;
        }
}

__device__ __forceinline__ void softmax(Rows& rows, const Call& call, const Seen& seen, const Hull& hull,
                                        const Range (&range)[2], const int (&row)[2], int key, int t) {
    // A negative scale turns the maximum of the raw scores into the minimum of the logits.
    if (!ALWAYS_TESTED && key >= hull.inner_lo && key + BN <= hull.inner_hi && call.slope >= 0.f)
        exponentiate<false>(rows, call, seen, range, row, key, t);
    else
        exponentiate<true>(rows, call, seen, range, row, key, t);
}

// Exponentials to the left operand of the next product; a score's place in the accumulator is its place there.
__device__ __forceinline__ void take_weights(Rows& rows) {
#pragma unroll
    for (int i = 0; i < BN / 16; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
            rows.weights[i][j] = pack(rows.scores[8 * i + 2 * j], rows.scores[8 * i + 2 * j + 1]);
}

__device__ __forceinline__ void shrink_out(Rows& rows) {
    const bool grew = rows.shrink[0] != 1.f || rows.shrink[1] != 1.f;
    if (__any_sync(~0u, grew)) {
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) rows.out[4 * n + e] *= rows.shrink[e >> 1];
    }
}

struct Tile {
    int row0, lane_bh;
};

// The tile that a block takes in a round, false after the last. Where lengths differ the host starts a block for each
// tile, and they begin in this order as others end.
__device__ __forceinline__ bool tile_of(const TmaCall& tma, int round, Tile& tile) {
    const int index = round * gridDim.x + blockIdx.x;
    if (index >= tma.call.tiles * tma.lanes) return false;
    const Work work = work_at(tma, index);
    tile = {work.tile * BM, work.lane_bh};
    return true;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) tma_forward(const __grid_constant__ TmaCall tma) {
    extern __shared__ __align__(1024) u8 memory[];
    const Call& call = tma.call;
    const u32 shared = shared_address(memory);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared + FULL + 8 * i, 1);
            barrier_init(shared + EMPTY + 8 * i, 4 * GROUPS);
        }
        barrier_init(shared + Q_FULL, 1);
        barrier_init(shared + Q_EMPTY, 4 * GROUPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    Tile tile;
    u32 q_phase = 0;
    Slots<STAGES> ring;
    if (warp < 4) {
        give_registers<GROUPS == 2 ? 24 : 32>();
        if (warp == 0)
#pragma unroll 1
            for (int round = 0; tile_of(tma, round, tile); ++round) {
                const Hull hull = hull_of<BM, 1>(call, tile.lane_bh / call.heads, tile.row0, lane);
                if (lane != 0 || hull.lo >= hull.hi) continue;
                // Of the 24 registers that this warpgroup keeps, few are free: what is cheap is computed anew.
                tile_of(tma, hidden(round), tile);
                const int i_b = tile.lane_bh / call.heads, i_h = tile.lane_bh % call.heads;
                const int i_hkv = i_h / call.group;
                auto load = [&](const TensorMap* map, int key, int by_head, int by_batch) {
#pragma unroll
                    for (int p = 0; p < PIECES; ++p) {
                        const int chunks = min(PIECE, CHUNKS - PIECE * p);
                        const u32 full = shared + FULL + 8 * ring.slot, target = shared + RING + ring.slot * SLOT;
                        barrier_wait(shared + EMPTY + 8 * ring.slot, ring.phase ^ 1);
                        barrier_expect(full, chunks * CHUNK);
                        load_chunks<WHOLE_PIECES>(target, CHUNK, chunks, map, key, 64 * PIECE * p,
                                                  hidden(i_hkv) * by_head, hidden(i_b) * by_batch, full);
                        ring.advance();
                    }
                };
                barrier_wait(shared + Q_EMPTY, q_phase ^ 1);
                barrier_expect(shared + Q_FULL, CHUNKS * Q_CHUNK);
                load_chunks<WHOLE>(shared, Q_CHUNK, CHUNKS, &tma.query, tile.row0, 0, i_h, i_b, shared + Q_FULL);
                q_phase ^= 1;
                int key = hull.lo / BN * BN;
                load(&tma.key, key, tma.key_h, tma.key_b);
#pragma unroll 1
                for (; key < hull.hi; key += BN) {  // the values of a step behind the keys of the next
                    if (key + BN < hull.hi) load(&tma.key, key + BN, tma.key_h, tma.key_b);
                    load(&tma.value, key, tma.value_h, tma.value_b);
                }
            }
        return;
    }

    take_registers<GROUPS == 2 ? 240 : 160>();
    Rows rows;
    Place at;
    at.shared = shared;
    at.lane = lane;
    at.group = (warp - 4) >> 2;
    at.warp = warp & 3;
    const int g = lane >> 2, t = lane & 3;
#if TURNS
    if (at.group == GROUPS - 1) barrier_announce(1, 256);
#endif
#pragma unroll 1
    for (int round = 0; tile_of(tma, round, tile); ++round) {
        const int i_b = tile.lane_bh / call.heads, i_h = tile.lane_bh % call.heads;
        const Hull hull = hull_of<BM>(call, i_b, tile.row0, lane);
        const int begin = hull.lo / BN * BN, steps = (hull.hi - begin + BN - 1) / BN;
        int row[2];
        Range range[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            row[r] = tile.row0 + at.group * 64 + at.warp * 16 + g + 8 * r;
            range[r] = row_range(call, i_b, row[r]);
            rows.reference[r] = -infinity();
            rows.sum[r] = 0.f;
        }
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) rows.out[i] = 0.f;
        const Seen seen(call, i_b, i_h);
        int key = begin;

        if (steps > 0) {
            barrier_wait(shared + Q_FULL, q_phase);
            q_phase ^= 1;
            start_scores(rows, at, ring);
            products_wait<0>();
            settle(rows.scores);
            free_slots(at, ring, 0);
            softmax(rows, call, seen, hull, range, row, key, t);
            take_weights(rows);
#pragma unroll 1
            for (int step = 1; step < steps; ++step) {
                key += BN;
#if TURNS
                barrier(1 + at.group, 256);
#endif
                start_scores(rows, at, ring);
                start_values(rows, at, ring);
#if TURNS
                barrier_announce(1 + (at.group + 1) % GROUPS, 256);
#endif
                products_wait<PIECES>();
                settle(rows.scores);
                free_slots(at, ring, PIECES);
                softmax(rows, call, seen, hull, range, row, key, t);
                products_wait<0>();
                settle(rows.out);
                free_slots(at, ring, 0);
                shrink_out(rows);
                take_weights(rows);
            }
            release(at, shared + Q_EMPTY);
            start_values(rows, at, ring);
            products_wait<0>();
            settle(rows.out);
            free_slots(at, ring, 0);
        }

#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float total = rows.sum[r] + __shfl_xor_sync(~0u, rows.sum[r], 1);
            total += __shfl_xor_sync(~0u, total, 2);
            const bool empty = total == 0.f;
            total = empty ? 1.f : total;
            u16* target = call.out.data + i_b * call.out.b + i_h * call.out.h + row[r] * call.out.n;
            store_row<D>(target, rows.out + 2 * r, 1.f / total, t, row[r] < call.n_q);
            if (t == 0 && row[r] < call.n_q) {
                const i64 where = static_cast<i64>(tile.lane_bh) * call.n_q + row[r];
                const float log_sum = log2_fast(total);
                call.lse[where] = empty ? -infinity() : (rows.reference[r] + log_sum) * LN2;
#if STATS
                call.stats[where] = rows.reference[r];
                call.stats[call.stats_size + where] = log_sum;
#endif
            }
        }
    }
}
