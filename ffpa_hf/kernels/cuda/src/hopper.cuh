// Hopper's own instructions: mbarriers, TMA loads, warpgroup products, cluster memory. Device code for sm_90a only.
// Sections named are those of the PTX ISA manual. Includes nothing but ptx.cuh.
#pragma once
#include "ptx.cuh"

// --- mbarriers (PTX 9.7.13.15); addresses are shared-memory ones of this block unless a name says "remote" -----------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival, and so many bytes that must come in before the phase ends.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive_remote(u32 barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier), "r"(parity)
        : "memory");
}

// The same for data and arrivals that come from the other block of the cluster.
__device__ __forceinline__ void barrier_wait_cluster(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier), "r"(parity)
        : "memory");
}

// --- clusters --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}

// The address, in the cluster's window, of what lies at `address` in block `rank`.
__device__ __forceinline__ u32 remote_address(u32 address, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// 16 bytes into the other block's memory; they count for its barrier when they have arrived (st.async).
__device__ __forceinline__ void send16(u32 remote, u32 a, u32 b, u32 c, u32 d, u32 remote_barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
                 "r"(a), "r"(b), "r"(c), "r"(d), "r"(remote_barrier)
                 : "memory");
}

__device__ __forceinline__ void send8(u32 remote, float a, float b, u32 remote_barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(remote),
                 "f"(a), "f"(b), "r"(remote_barrier)
                 : "memory");
}

// --- TMA (cp.async.bulk.tensor) --------------------------------------------------------------------------------------

// A CUtensorMap, opaque to the device.
struct __align__(64) TensorMap {
    u64 words[16];
};

// A box of a tensor seen as (64 columns, rows, column chunks, heads, batches) to shared memory.
__device__ __forceinline__ void load_box(
    u32 target, const TensorMap* map, int row, int chunk, int head, int batch, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], "
        "[%7];" ::"r"(target),
        "l"(map), "r"(0), "r"(row), "r"(chunk), "r"(head), "r"(batch), "r"(barrier)
        : "memory");
}

// --- warpgroup products (wgmma) --------------------------------------------------------------------------------------

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Returns when at most PENDING groups of products are still under way.
template <int PENDING>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from reading or moving accumulators across a wait.
template <int N>
__device__ __forceinline__ void settle(float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// Matrix descriptor of a tile in 128-byte swizzle: rows of 64 elements, eight rows per 1024-byte group.
// Contraction along the columns: `far` is the distance of eight-row groups. Along the rows (transposed): `near` is the
// distance of 64-column blocks, `far` that of eight-row groups.
__device__ __forceinline__ u64 matrix(u32 address, u32 near, u32 far) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | static_cast<u64>(near >> 4) << 16 |
           static_cast<u64>(far >> 4) << 32 | 1ull << 62;
}

// The compiler may not know that this is loop invariant: hoisted descriptors spill.
__device__ __forceinline__ u32 hidden(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

#define RESULTS_8(c, i)                                                                                        \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), \
        "+f"(c[i + 7])
#define RESULTS_32(c, i) RESULTS_8(c, i), RESULTS_8(c, i + 8), RESULTS_8(c, i + 16), RESULTS_8(c, i + 24)

// c[64, 64] = a[64, 16] b[64, 16]^T (+ c), both from shared memory.
__device__ __forceinline__ void product_64(float (&c)[32], u64 a, u64 b, int accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." HALF_TYPE "." HALF_TYPE " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, add, 1, 1, 0, 0;\n"
        "}"
        : RESULTS_32(c, 0)
        : "l"(a), "l"(b), "r"(accumulate));
}

// c[64, 256] += a[64, 16] b[16, 256], a from registers, the rows of b in shared memory along the contraction.
__device__ __forceinline__ void product_256(float (&c)[128], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." HALF_TYPE "." HALF_TYPE " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
        "{%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
        : RESULTS_32(c, 0), RESULTS_32(c, 32), RESULTS_32(c, 64), RESULTS_32(c, 96)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Two 16-bit values times two others.
__device__ __forceinline__ u32 multiply_pair(u32 a, u32 b) {
    u32 c;
    asm("mul." HALF_TYPE "x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
