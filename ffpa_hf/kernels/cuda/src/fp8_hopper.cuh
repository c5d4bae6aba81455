// Hopper's products of e4m3 operands (wgmma, PTX ISA 9.7.15): fp32 accumulators, both operands along the contraction.
// Device code for sm_90a only.
#pragma once
#include "fp8.cuh"
#include "hopper.cuh"
#include "wgmma.cuh"

// Matrix descriptor of a tile whose rows are WIDTH bytes, eight of them a swizzle group.
template <int WIDTH>
__device__ __forceinline__ u64 tile_matrix(u32 address) {
    constexpr u64 layout = WIDTH == 128 ? 1 : 2;  // 128- or 64-byte swizzle
    return static_cast<u64>((address & 0x3FFFF) >> 4) | 1ull << 16 | static_cast<u64>(WIDTH * 8 >> 4) << 32 | layout << 62;
}

// One linear copy of a tile from global memory (cp.async.bulk); `bytes` is a multiple of 16.
__device__ __forceinline__ void load_tile(u32 target, const u8* source, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
                 "l"(source), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Operand lists of accumulators in runs of eight.
#define OPERANDS_8(c, i)                                                                                               \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]),        \
        "+f"(c[i + 7])
#define NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_1 NAMES_0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_2 NAMES_1 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_3 NAMES_2 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_4 NAMES_3 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_5 NAMES_4 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_6 NAMES_5 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_7 NAMES_6 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_8 NAMES_7 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define NAMES_9 NAMES_8 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_10 NAMES_9 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define NAMES_11 NAMES_10 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_12 NAMES_11 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define NAMES_13 NAMES_12 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES_14 NAMES_13 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define NAMES_15 NAMES_14 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define VALUES_0(c) OPERANDS_8(c, 0)
#define VALUES_1(c) VALUES_0(c), OPERANDS_8(c, 8)
#define VALUES_2(c) VALUES_1(c), OPERANDS_8(c, 16)
#define VALUES_3(c) VALUES_2(c), OPERANDS_8(c, 24)
#define VALUES_4(c) VALUES_3(c), OPERANDS_8(c, 32)
#define VALUES_5(c) VALUES_4(c), OPERANDS_8(c, 40)
#define VALUES_6(c) VALUES_5(c), OPERANDS_8(c, 48)
#define VALUES_7(c) VALUES_6(c), OPERANDS_8(c, 56)
#define VALUES_8(c) VALUES_7(c), OPERANDS_8(c, 64)
#define VALUES_9(c) VALUES_8(c), OPERANDS_8(c, 72)
#define VALUES_10(c) VALUES_9(c), OPERANDS_8(c, 80)
#define VALUES_11(c) VALUES_10(c), OPERANDS_8(c, 88)
#define VALUES_12(c) VALUES_11(c), OPERANDS_8(c, 96)
#define VALUES_13(c) VALUES_12(c), OPERANDS_8(c, 104)
#define VALUES_14(c) VALUES_13(c), OPERANDS_8(c, 112)
#define VALUES_15(c) VALUES_14(c), OPERANDS_8(c, 120)

// c[64, N] (+)= a[64, 32] b[N, 32]^T for one width N of 16 * (LAST + 1); A..F are the operands after the accumulators.
template <int N>
struct CodeProduct;

#define CODE_PRODUCT(N, LAST, A, B, C, D_, E, F)                                                                       \
    template <>                                                                                                        \
    struct CodeProduct<N> {                                                                                            \
        static __device__ __forceinline__ void shared(float (&c)[N / 2], u64 a, u64 b, int accumulate) {               \
            asm volatile(                                                                                              \
                "{\n.reg .pred add;\nsetp.ne.b32 add, %" #C ", 0;\n"                                                   \
                "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" NAMES_##LAST "}, %" #A ", %" #B           \
                ", add, 1, 1;\n}"                                                                                      \
                : VALUES_##LAST(c)                                                                                     \
                : "l"(a), "l"(b), "r"(accumulate));                                                                    \
        }                                                                                                              \
        static __device__ __forceinline__ void registers(float (&c)[N / 2], const u32 (&a)[4], u64 b, int add) {       \
            asm volatile(                                                                                              \
                "{\n.reg .pred add;\nsetp.ne.b32 add, %" #F ", 0;\n"                                                   \
                "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" NAMES_##LAST "}, {%" #A ", %" #B          \
                ", %" #C ", %" #D_ "}, %" #E ", add, 1, 1;\n}"                                                         \
                : VALUES_##LAST(c)                                                                                     \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                                       \
        }                                                                                                              \
    };

CODE_PRODUCT(64, 3, 32, 33, 34, 35, 36, 37)
CODE_PRODUCT(80, 4, 40, 41, 42, 43, 44, 45)
CODE_PRODUCT(96, 5, 48, 49, 50, 51, 52, 53)
CODE_PRODUCT(128, 7, 64, 65, 66, 67, 68, 69)
CODE_PRODUCT(160, 9, 80, 81, 82, 83, 84, 85)
CODE_PRODUCT(192, 11, 96, 97, 98, 99, 100, 101)
CODE_PRODUCT(256, 15, 128, 129, 130, 131, 132, 133)
#undef CODE_PRODUCT
