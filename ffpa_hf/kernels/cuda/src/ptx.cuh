// The PTX instructions that the kernels are made of, each wrapped once. Device code only; includes nothing, so that
// NVRTC needs no headers. Sections named are those of the PTX ISA manual.
#pragma once

typedef unsigned int u32;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

#ifndef __CUDA_ARCH__
#define __CUDA_ARCH__ 0
#endif

// fp16 and bf16 are moved as raw 16-bit patterns and only ever converted here.
#if BFLOAT16
#define HALF_TYPE "bf16"
#else
#define HALF_TYPE "f16"
#endif

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory, asynchronously; zeros instead where `there` is false (cp.async, ignore-src).
__device__ __forceinline__ void copy16(u32 target, const void* source, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(there ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Returns when at most PENDING of this thread's copy groups are still under way.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8x8 matrices of 16-bit elements, one row address per lane.
__device__ __forceinline__ void load_matrices(u32 (&into)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(into[0]), "=r"(into[1]), "=r"(into[2]), "=r"(into[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&into)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(into[0]), "=r"(into[1]), "=r"(into[2]), "=r"(into[3])
                 : "r"(address)
                 : "memory");
}

// c[16, 8] += a[16, 16] b[16, 8], accumulated in fp32 (mma.m16n8k16).
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." HALF_TYPE "." HALF_TYPE ".f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two fp32 values as a pair of 16-bit ones, rounded to nearest even; `low` in the lower half.
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 pair;
    asm("cvt.rn." HALF_TYPE "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ float widen(u16 bits) {
#if BFLOAT16
    return __int_as_float(static_cast<u32>(bits) << 16);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#endif
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A barrier among `threads` threads (whole warps); number 0 is the block's own.
__device__ __forceinline__ void barrier(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// This warp's part in such a barrier without waiting there.
__device__ __forceinline__ void barrier_announce(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// A value that the compiler knows nothing about: what follows from it is not kept in registers, but computed anew.
template <typename T>
__device__ __forceinline__ T hidden(T value) {
    static_assert(sizeof(T) == 4);
    asm volatile("" : "+r"(value));
    return value;
}
