// Hopper's own instructions but products (wgmma.cuh): mbarriers, clusters, TMA loads. Device code for sm_90a only.
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

// A box of a five-dimensional tensor to shared memory; the innermost coordinate first.
__device__ __forceinline__ void load_box(
    u32 target, const TensorMap* map, int c0, int c1, int c2, int c3, int c4, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], "
        "[%7];" ::"r"(target),
        "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(barrier)
        : "memory");
}

// --- registers -------------------------------------------------------------------------------------------------------

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
