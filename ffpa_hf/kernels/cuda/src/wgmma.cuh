// Warpgroup products (wgmma, PTX 9.7.15): what waits for them, their descriptors, and every width from 16 to 256 columns.
// Device code for sm_90a only. Includes nothing but ptx.cuh.
#pragma once
#include "ptx.cuh"

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

// The place holders of the first so many operands, and those operands: accumulators of a thread.
#define PLACES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PLACES_16 PLACES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PLACES_24 PLACES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define PLACES_32 PLACES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define PLACES_40 PLACES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define PLACES_48 PLACES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define PLACES_56 PLACES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define PLACES_64 PLACES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define PLACES_72 PLACES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define PLACES_80 PLACES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define PLACES_88 PLACES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define PLACES_96 PLACES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define PLACES_104 PLACES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define PLACES_112 PLACES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define PLACES_120 PLACES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define PLACES_128 PLACES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define RESULTS_AT(i)                                                                                             \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), \
        "+f"(c[i + 7])
#define RESULTS_8 RESULTS_AT(0)
#define RESULTS_16 RESULTS_8, RESULTS_AT(8)
#define RESULTS_24 RESULTS_16, RESULTS_AT(16)
#define RESULTS_32 RESULTS_24, RESULTS_AT(24)
#define RESULTS_40 RESULTS_32, RESULTS_AT(32)
#define RESULTS_48 RESULTS_40, RESULTS_AT(40)
#define RESULTS_56 RESULTS_48, RESULTS_AT(48)
#define RESULTS_64 RESULTS_56, RESULTS_AT(56)
#define RESULTS_72 RESULTS_64, RESULTS_AT(64)
#define RESULTS_80 RESULTS_72, RESULTS_AT(72)
#define RESULTS_88 RESULTS_80, RESULTS_AT(80)
#define RESULTS_96 RESULTS_88, RESULTS_AT(88)
#define RESULTS_104 RESULTS_96, RESULTS_AT(96)
#define RESULTS_112 RESULTS_104, RESULTS_AT(104)
#define RESULTS_120 RESULTS_112, RESULTS_AT(112)
#define RESULTS_128 RESULTS_120, RESULTS_AT(120)

// c[64, COLUMNS] in fp32: COLUMNS / 2 values of a thread.
template <int COLUMNS>
struct Product;

// shared: c = a[64, 16] b[COLUMNS, 16]^T (+ c), both from shared memory, contraction along the columns of both.
// registers: c += a[64, 16] b[16, COLUMNS], a from registers, the rows of b in shared memory along the contraction.
// O1 to O5: the numbers of the operands behind the COUNT accumulators.
#define PRODUCT(COLUMNS, COUNT, O1, O2, O3, O4, O5)                                                                   \
    template <>                                                                                                       \
    struct Product<COLUMNS> {                                                                                         \
        static __device__ __forceinline__ void shared(float* c, u64 a, u64 b, int accumulate) {                       \
            asm volatile(                                                                                             \
                "{\n"                                                                                                 \
                ".reg .pred add;\n"                                                                                   \
                "setp.ne.b32 add, %" #O3 ", 0;\n"                                                                     \
                "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." HALF_TYPE "." HALF_TYPE " {" PLACES_##COUNT   \
                "}, %" #O1 ", %" #O2 ", add, 1, 1, 0, 0;\n"                                                           \
                "}"                                                                                                   \
                : RESULTS_##COUNT                                                                                     \
                : "l"(a), "l"(b), "r"(accumulate));                                                                   \
        }                                                                                                             \
        static __device__ __forceinline__ void registers(float* c, const u32 (&a)[4], u64 b) {                        \
            asm volatile(                                                                                             \
                "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." HALF_TYPE "." HALF_TYPE " {" PLACES_##COUNT   \
                "}, {%" #O1 ", %" #O2 ", %" #O3 ", %" #O4 "}, %" #O5 ", 1, 1, 1, 1;"                                  \
                : RESULTS_##COUNT                                                                                     \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                \
        }                                                                                                             \
    };
PRODUCT(16, 8, 8, 9, 10, 11, 12)
PRODUCT(32, 16, 16, 17, 18, 19, 20)
PRODUCT(48, 24, 24, 25, 26, 27, 28)
PRODUCT(64, 32, 32, 33, 34, 35, 36)
PRODUCT(80, 40, 40, 41, 42, 43, 44)
PRODUCT(96, 48, 48, 49, 50, 51, 52)
PRODUCT(112, 56, 56, 57, 58, 59, 60)
PRODUCT(128, 64, 64, 65, 66, 67, 68)
PRODUCT(144, 72, 72, 73, 74, 75, 76)
PRODUCT(160, 80, 80, 81, 82, 83, 84)
PRODUCT(176, 88, 88, 89, 90, 91, 92)
PRODUCT(192, 96, 96, 97, 98, 99, 100)
PRODUCT(208, 104, 104, 105, 106, 107, 108)
PRODUCT(224, 112, 112, 113, 114, 115, 116)
PRODUCT(240, 120, 120, 121, 122, 123, 124)
PRODUCT(256, 128, 128, 129, 130, 131, 132)
#undef PRODUCT
