// Hopper as far as the FP8 kernels use it, on a CPU: a block's threads are fibers that take turns, in an order that a
// seed decides. Stands in for ptx.cuh, hopper.cuh and the products of fp8_hopper.cuh.
//
// What it models: mbarriers with transaction counts, bulk copies that come late and in any order, named barriers, warp
// shuffles, and warpgroup products that read their descriptors' bytes (PTX ISA 9.7.15: swizzle, fragments) as late as
// the kernel's own waits allow. A block in which nobody can go on is reported as a deadlock. What it does not: time,
// the tensor core's accumulator of about 14 bits, memory that is not consistent.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

typedef uint32_t u32;
typedef uint8_t u8;
typedef uint16_t u16;
typedef unsigned long long u64;
typedef long long i64;

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n)

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
using std::max;
using std::min;

namespace host {

constexpr u32 BASE = 1024, WINDOW = 232448 + BASE;  // where dynamic shared memory lies in the block's window, its end
alignas(1024) u8 window[WINDOW];
u8* const shared = window + BASE;

struct Meeting { int arrived = 0; long generation = 0; };
struct Barrier { int count = 0, pending = 0; i64 bytes = 0; u32 phase = 0; };
struct Copy { u32 target; const u8* source; u32 bytes, barrier; };

struct Product {  // one wgmma that was issued and not yet made
    float* c;
    const u32* a_registers;  // of this thread, null where a is in shared memory
    u64 a, b;
    int columns, accumulate;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<u8[]> stack;
    int thread = 0;
    bool done = false;
    std::vector<std::vector<Product>> groups;  // committed
    std::vector<Product> open;
};

struct Index { int x; };
Index thread_index, block_index;
ucontext_t scheduler;
std::vector<Fiber> fibers;
Fiber* current = nullptr;
std::string fault;
long progress = 0;
std::mt19937 random;
std::map<u32, Barrier> barriers;
std::map<int, Meeting> named;
std::vector<Copy> copies;
Meeting block_meeting, warp_meetings[32], group_meetings[8];
u64 slots[32][32];
u32 fragments[1024][4];
int threads = 0, smem = 0;

inline void yield() {
    Fiber* mine = current;
    swapcontext(&mine->context, &scheduler);
    thread_index.x = mine->thread;
}

[[noreturn]] inline void fail(const std::string& text) {
    if (fault.empty()) fault = text + " (thread " + std::to_string(current ? current->thread : -1) + ")";
    for (;;) swapcontext(&current->context, &scheduler);
}

inline void meet(Meeting& meeting, int size) {
    const long mine = meeting.generation;
    ++progress;
    if (++meeting.arrived == size) {
        meeting.arrived = 0;
        ++meeting.generation;
        return;
    }
    while (meeting.generation == mine) yield();
}

inline int warp() { return current->thread / 32; }
inline int lane() { return current->thread % 32; }
inline void meet_warp() { meet(warp_meetings[warp()], 32); }

template <typename T>
T read_slot(int from) {
    T value;
    std::memcpy(&value, &slots[warp()][from], sizeof value);
    return value;
}

template <typename T>
void write_slot(T value) {
    std::memcpy(&slots[warp()][lane()], &value, sizeof value);
    meet_warp();
}

template <typename T, typename F>
T reduce(T value, F combine) {
    write_slot(value);
    T all = read_slot<T>(0);
    for (int i = 1; i < 32; ++i) all = combine(all, read_slot<T>(i));
    meet_warp();
    return all;
}

inline Barrier& barrier_at(u32 address) {
    auto found = barriers.find(address);
    if (found == barriers.end()) fail("no mbarrier at " + std::to_string(address));
    return found->second;
}

inline void settle_phase(Barrier& barrier) {
    if (barrier.pending < 0) fail("more arrivals than an mbarrier expects");
    if (barrier.pending == 0 && barrier.bytes == 0) {
        barrier.phase ^= 1;
        barrier.pending = barrier.count;
    }
}

inline void finish_copy(size_t i) {
    const Copy copy = copies[i];
    copies.erase(copies.begin() + i);
    std::memcpy(window + copy.target, copy.source, copy.bytes);
    Barrier& barrier = barriers.at(copy.barrier);
    barrier.bytes -= copy.bytes;
    settle_phase(barrier);
    ++progress;
}

inline float decode(u8 code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    if ((code & 0x7f) == 0x7f) return std::nanf("");
    const float value = exponent ? std::ldexp(8.f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
    return code & 0x80 ? -value : value;
}

inline float e4m3(u8 code) {
    static const std::vector<float> values = [] {
        std::vector<float> all(256);
        for (int i = 0; i < 256; ++i) all[i] = decode(i);
        return all;
    }();
    return values[code];
}

inline u8 to_e4m3(float x) {  // nearest, ties to even, saturating
    if (x != x) return 0x7f;
    const u8 sign = std::signbit(x) ? 0x80 : 0;
    const float y = std::min(std::fabs(x), 448.f);
    if (y == 0.f) return sign;
    int exponent;
    std::frexp(y, &exponent);
    exponent = std::max(exponent - 1, -6);
    const int units = static_cast<int>(std::nearbyint(std::ldexp(y, 3 - exponent)));  // of 2^(exponent - 3); 16 carries
    return sign | static_cast<u8>(units + ((exponent + 6) << 3));
}

inline float from_half(u16 bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float value = exponent == 31 ? (mantissa ? std::nanf("") : INFINITY)
                  : exponent     ? std::ldexp(1024.f + mantissa, exponent - 25)
                                 : std::ldexp(float(mantissa), -24);
    return bits & 0x8000 ? -value : value;
}

inline u16 to_half(float x) {
    const u16 sign = std::signbit(x) ? 0x8000 : 0;
    const float y = std::fabs(x);
    if (x != x) return 0x7e00;
    if (y >= 65520.f) return sign | 0x7c00;
    if (y == 0.f) return sign;
    int exponent;
    std::frexp(y, &exponent);
    exponent = std::max(exponent - 1, -14);
    const int units = static_cast<int>(std::nearbyint(std::ldexp(y, 10 - exponent)));
    return sign | static_cast<u16>(units + ((exponent + 14) << 10));
}

inline u16 to_bfloat(float x) {
    u32 bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return 0x7fff;
    return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Byte k of row r of the matrix that a descriptor names: rows lie one swizzle width apart, eight of them a group, and
// address bits 4 to 6 (128 bytes; 4 and 5 for 64) are turned by bits 7 and up.
inline u8 matrix_byte(u64 descriptor, int r, int k) {
    const u32 start = (descriptor & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4, layout = descriptor >> 62;
    if (layout != 1 && layout != 2) fail("descriptor without a 128- or 64-byte swizzle");
    const u32 width = layout == 1 ? 128 : 64, turns = layout == 1 ? 7 : 3;
    u32 address = start + r / 8 * stride + r % 8 * width + k;
    address ^= (address >> 7 & turns) << 4;
    if (address < BASE || address >= BASE + smem) fail("a product reads outside shared memory");
    return window[address];
}

// This thread's share of a product: rows g and g + 8 of its warp, two neighbours of every eight columns.
inline void make(const Product& product) {
    const int g = current->thread % 128 / 32 * 16 + lane() / 4, t = lane() % 4;
    float a[2][32];
    for (int half = 0; half < 2; ++half)
        for (int k = 0; k < 32; ++k) {
            if (product.a_registers) {  // a register holds four neighbours of a row; 16 columns later comes register + 2
                const u32 word = fragments[current->thread - t + k % 16 / 4][half + k / 16 * 2];
                a[half][k] = e4m3(word >> 8 * (k % 4));
            } else {
                a[half][k] = e4m3(matrix_byte(product.a, g + 8 * half, k));
            }
        }
    for (int n = 0; n < product.columns / 8; ++n)
        for (int e = 0; e < 2; ++e) {
            double sum[2] = {0, 0};
            for (int k = 0; k < 32; ++k) {
                const float b = e4m3(matrix_byte(product.b, 8 * n + 2 * t + e, k));
                sum[0] += double(a[0][k]) * b;
                sum[1] += double(a[1][k]) * b;
            }
            for (int half = 0; half < 2; ++half) {
                float& c = product.c[4 * n + 2 * half + e];
                c = static_cast<float>((product.accumulate ? c : 0.f) + sum[half]);
            }
        }
}

inline void make_group() {
    const int group = current->thread / 128;
    for (const Product& product : current->groups.front()) {
        if (product.a_registers) std::memcpy(fragments[current->thread], product.a_registers, 16);
        meet(group_meetings[group], 128);
        make(product);
        meet(group_meetings[group], 128);
    }
    current->groups.erase(current->groups.begin());
    ++progress;
}

std::function<void()> kernel;
inline void enter() {
    thread_index.x = current->thread;
    kernel();
    if (!current->groups.empty() || !current->open.empty()) fail("a thread ends with products under way");
    current->done = true;
    ++progress;
    for (;;) swapcontext(&current->context, &scheduler);
}

inline bool run_block() {
    barriers.clear(), named.clear(), copies.clear();
    std::memset(window, 0xff, sizeof window);
    block_meeting = Meeting();
    for (auto& meeting : warp_meetings) meeting = Meeting();
    for (auto& meeting : group_meetings) meeting = Meeting();
    std::vector<Fiber*> order;
    for (int i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[i];
        fiber.thread = i, fiber.done = false;
        fiber.groups.clear(), fiber.open.clear();
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = 1 << 17;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
        order.push_back(&fiber);
    }
    while (!order.empty()) {
        const long before = progress;
        // Whole warpgroups change places from pass to pass: some run far ahead, as far as the barriers let them.
        const int shift = random() % (threads / 32) * 32;
        std::stable_sort(order.begin(), order.end(), [&](Fiber* x, Fiber* y) {
            return (x->thread + shift) % threads < (y->thread + shift) % threads;
        });
        for (Fiber* fiber : order) {
            if (fiber->thread % 32 == 0 && random() % 4 == 0) continue;  // the warp's leader is late
            current = fiber;
            swapcontext(&scheduler, &fiber->context);
            if (!fault.empty()) return false;
        }
        order.erase(std::remove_if(order.begin(), order.end(), [](Fiber* fiber) { return fiber->done; }), order.end());
        if (!copies.empty() && (progress == before || random() % 2)) finish_copy(random() % copies.size());
        static int idle = 0;
        idle = progress == before ? idle + 1 : 0;
        if (idle > 200) {
            fault = "deadlock: " + std::to_string(order.size()) + " threads wait, the first is " +
                    std::to_string(order[0]->thread) + " of block " + std::to_string(block_index.x);
            return false;
        }
    }
    if (!copies.empty()) fault = "a block ends with copies under way";
    for (auto& [number, meeting] : named)
        if (meeting.arrived % 128) fault = "a named barrier is left between warps";
    return fault.empty();
}

inline const char* run(std::function<void()> function, int grid, int block, int bytes, int seed) {
    kernel = function, threads = block, smem = bytes, fault.clear();
    random.seed(seed);
    if (bytes > int(WINDOW - BASE)) return "more shared memory than a block has";
    while (fibers.size() < size_t(block)) {
        fibers.emplace_back();
        fibers.back().stack.reset(new u8[1 << 17]);
    }
    for (block_index.x = 0; block_index.x < grid; ++block_index.x)
        if (!run_block()) break;
    return fault.c_str();
}

}  // namespace host

#define threadIdx host::thread_index
#define blockIdx host::block_index

// --- CUDA's own functions --------------------------------------------------------------------------------------------

template <typename To, typename From>
To same_bits(From from) {
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
inline float __int_as_float(u32 x) { return same_bits<float>(x); }
inline int __float_as_int(float x) { return same_bits<int>(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline u32 __umulhi(u32 a, u32 b) { return u64(a) * b >> 32; }
inline void __syncthreads() { host::meet(host::block_meeting, host::threads); }
inline float __shfl_xor_sync(u32, float value, int step) {
    host::write_slot(value);
    value = host::read_slot<float>(host::lane() ^ step);
    host::meet_warp();
    return value;
}
inline bool __any_sync(u32, bool value) {
    return host::reduce<int>(value, [](int a, int b) { return a | b; });
}
inline int __reduce_min_sync(u32, int value) {
    return host::reduce(value, [](int a, int b) { return min(a, b); });
}
inline int __reduce_max_sync(u32, int value) {
    return host::reduce(value, [](int a, int b) { return max(a, b); });
}

// --- ptx.cuh ---------------------------------------------------------------------------------------------------------

inline float infinity() { return INFINITY; }
inline u32 shared_address(const void* pointer) { return static_cast<const u8*>(pointer) - host::window; }
inline float exp2_fast(float x) { return std::exp2(x); }
inline float log2_fast(float x) { return std::log2(x); }
#if BFLOAT16
inline float widen(u16 bits) { return __int_as_float(u32(bits) << 16); }
inline u32 pack(float low, float high) { return host::to_bfloat(low) | u32(host::to_bfloat(high)) << 16; }
#else
inline float widen(u16 bits) { return host::from_half(bits); }
inline u32 pack(float low, float high) { return host::to_half(low) | u32(host::to_half(high)) << 16; }
#endif
inline void barrier_arrive_named(int number, int count) {
    host::Meeting& meeting = host::named[number];
    ++host::progress;
    if (++meeting.arrived == count) meeting.arrived = 0, ++meeting.generation;
    if (meeting.arrived > count) host::fail("more threads at a named barrier than it is for");
}
inline void barrier(int number, int count) {
    const long mine = host::named[number].generation;
    barrier_arrive_named(number, count);
    while (host::named[number].generation == mine) host::yield();
}

// --- fp8.cuh, hopper.cuh, fp8_hopper.cuh -----------------------------------------------------------------------------

inline u16 e4m3_pair(float low, float high) { return host::to_e4m3(low) | host::to_e4m3(high) << 8; }
inline float not_below(float x, float least) { return x != x ? x : max(x, least); }  // max.NaN
inline u32 hidden(u32 value) { return value; }
template <int N>
void give_registers() {}
template <int N>
void take_registers() {}
template <int N>
void settle(float (&)[N]) {}

inline void barrier_init(u32 address, int arrivals) {
    if (address % 8 || address + 8 > host::BASE + u32(host::smem)) host::fail("a misplaced mbarrier");
    host::barriers[address] = {arrivals, arrivals, 0, 0};
}
inline void barrier_arrive(u32 address) {
    host::Barrier& barrier = host::barrier_at(address);
    --barrier.pending;
    host::settle_phase(barrier);
    ++host::progress;
}
inline void barrier_expect(u32 address, u32 bytes) {
    host::Barrier& barrier = host::barrier_at(address);
    barrier.bytes += bytes;
    --barrier.pending;
    host::settle_phase(barrier);
    ++host::progress;
}
inline void barrier_wait(u32 address, u32 parity) {
    while (host::barrier_at(address).phase == parity) host::yield();
    ++host::progress;
}
inline void load_tile(u32 target, const u8* source, u32 bytes, u32 barrier) {
    if (target % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(source) % 16) host::fail("a misaligned copy");
    if (target < host::BASE || target + bytes > host::BASE + u32(host::smem)) host::fail("a copy past shared memory");
    host::copies.push_back({target, source, bytes, barrier});
}

inline void products_begin() {}
inline void products_commit() {
    host::current->groups.push_back(std::move(host::current->open));
    host::current->open.clear();
}
template <int PENDING>
void products_wait() {
    while (host::current->groups.size() > PENDING) host::make_group();
}
template <int N>
struct CodeProduct {
    static void shared(float (&c)[N / 2], u64 a, u64 b, int accumulate) {
        host::current->open.push_back({c, nullptr, a, b, N, accumulate});
    }
    static void registers(float (&c)[N / 2], const u32 (&a)[4], u64 b, int accumulate) {
        host::current->open.push_back({c, a, 0, b, N, accumulate});
    }
};
