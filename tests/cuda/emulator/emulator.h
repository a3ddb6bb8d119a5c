// CUDA's language for kernels, as plain C++: what a kernel source sees when g++ compiles it for the
// emulated device. The build includes it before common.cuh and each *.cu, and defines
// PHALANX_EMULATOR, by which kernels may choose other code than inline PTX.
//
// Limits: one OS thread runs everything, so atomics are plain operations and shared memory is static
// memory; no textures, cooperative groups, half types, device-side launch or managed memory. The
// fast intrinsics (__expf, ...) are as exact as the library's functions.
#pragma once
#include <cassert>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdint.h>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#ifdef PHALANX_EMULATOR  // in kernels only: the standard library uses this name
#define __noinline__ __attribute__((noinline))
#endif
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// What the build makes of `extern __shared__ type name[];`.
#define DYNAMIC_SHARED(type, name) type* const name = reinterpret_cast<type*>(emulator::dynamic_shared)

// ---- vector types, aligned as in CUDA --------------------------------------------------------------
#define EMULATOR_VECTORS(base, type)                                                               \
    struct base##1 { type x; };                                                                    \
    struct alignas(2 * sizeof(type)) base##2 { type x, y; };                                       \
    struct base##3 { type x, y, z; };                                                              \
    struct alignas(4 * sizeof(type) < 16 ? 4 * sizeof(type) : 16) base##4 { type x, y, z, w; };    \
    inline base##1 make_##base##1(type x) { return {x}; }                                          \
    inline base##2 make_##base##2(type x, type y) { return {x, y}; }                               \
    inline base##3 make_##base##3(type x, type y, type z) { return {x, y, z}; }                    \
    inline base##4 make_##base##4(type x, type y, type z, type w) { return {x, y, z, w}; }
EMULATOR_VECTORS(char, signed char)
EMULATOR_VECTORS(uchar, unsigned char)
EMULATOR_VECTORS(short, short)
EMULATOR_VECTORS(ushort, unsigned short)
EMULATOR_VECTORS(int, int)
EMULATOR_VECTORS(uint, unsigned)
EMULATOR_VECTORS(longlong, long long)
EMULATOR_VECTORS(ulonglong, unsigned long long)
EMULATOR_VECTORS(float, float)
EMULATOR_VECTORS(double, double)
#undef EMULATOR_VECTORS

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// The running thread's place: plain globals, set by threads.cpp at each switch of threads.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

// ---- what threads.cpp offers -----------------------------------------------------------------------
namespace emulator {
enum class WarpOperation { sync, shuffle, ballot };
extern unsigned char* dynamic_shared;
int lane();
void block_barrier();
// Waits for the threads of `mask` and returns the value of lane `source` (shuffle) or the lanes with
// a value other than zero (ballot). A source that takes no part gives all ones: undefined in CUDA.
uint64_t warp_exchange(WarpOperation operation, unsigned mask, uint64_t value, int source);
[[noreturn]] void kernel_failure(const char* what);

using Invoke = void (*)(void (*kernel)(), void** arguments);
struct Parameter {
    size_t size, alignment;
};
void register_kernel(const char* name, void (*kernel)(), Invoke invoke,
                     std::vector<Parameter> parameters, int max_threads);

template <class... Arguments, size_t... place>
void call(void (*kernel)(), void** arguments, std::index_sequence<place...>) {
    reinterpret_cast<void (*)(Arguments...)>(kernel)(*static_cast<Arguments*>(arguments[place])...);
}
// Called by the registrations that the build generates.
template <class... Arguments>
void add_kernel(const char* name, void (*kernel)(Arguments...), int max_threads) {
    Invoke invoke = [](void (*kernel)(), void** arguments) {
        call<Arguments...>(kernel, arguments, std::index_sequence_for<Arguments...>());
    };
    register_kernel(name, reinterpret_cast<void (*)()>(kernel), invoke,
                    {Parameter{sizeof(Arguments), alignof(Arguments)}...}, max_threads);
}

template <class T>
T shuffle(unsigned mask, T value, int source) {
    static_assert(sizeof(T) <= 8, "shuffles carry at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = warp_exchange(WarpOperation::shuffle, mask, bits, source);
    memcpy(&value, &bits, sizeof value);
    return value;
}
}  // namespace emulator

// ---- synchronisation -------------------------------------------------------------------------------
inline void __syncthreads() { emulator::block_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
    emulator::warp_exchange(emulator::WarpOperation::sync, mask, 0, 0);
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
[[noreturn]] inline void __trap() { emulator::kernel_failure("__trap()"); }

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize) {
    int first = emulator::lane() & ~(width - 1);
    return emulator::shuffle(mask, value, first + (source & (width - 1)));
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
    int lane = emulator::lane(), source = lane - static_cast<int>(delta);
    return emulator::shuffle(mask, value, source < (lane & ~(width - 1)) ? lane : source);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
    int lane = emulator::lane(), source = lane + static_cast<int>(delta);
    return emulator::shuffle(mask, value, source > (lane | (width - 1)) ? lane : source);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = warpSize) {
    int lane = emulator::lane(), source = lane ^ bits;
    return emulator::shuffle(mask, value, source > (lane | (width - 1)) ? lane : source);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return static_cast<unsigned>(
        emulator::warp_exchange(emulator::WarpOperation::ballot, mask, predicate != 0, 0));
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

// ---- atomics: plain, as one OS thread runs everything ------------------------------------------------
namespace emulator {
template <class T>
using same = std::common_type_t<T>;  // so that the operand converts to the target's type
}
#define EMULATOR_ATOMIC(name, expression)                                                          \
    template <class T>                                                                             \
    T name(T* address, emulator::same<T> value) {                                                  \
        T old = *address;                                                                          \
        *address = (expression);                                                                   \
        return old;                                                                                \
    }
EMULATOR_ATOMIC(atomicAdd, old + value)
EMULATOR_ATOMIC(atomicSub, old - value)
EMULATOR_ATOMIC(atomicMax, old < value ? value : old)
EMULATOR_ATOMIC(atomicMin, value < old ? value : old)
EMULATOR_ATOMIC(atomicExch, value)
EMULATOR_ATOMIC(atomicAnd, old & value)
EMULATOR_ATOMIC(atomicOr, old | value)
EMULATOR_ATOMIC(atomicXor, old ^ value)
EMULATOR_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
#undef EMULATOR_ATOMIC
template <class T>
T atomicCAS(T* address, emulator::same<T> expected, emulator::same<T> desired) {
    T old = *address;
    if (old == expected) *address = desired;
    return old;
}

// ---- memory, bits ------------------------------------------------------------------------------------
template <class T>
T __ldg(const T* address) { return *address; }
template <class T>
T __ldcs(const T* address) { return *address; }
template <class T>
void __stcs(T* address, emulator::same<T> value) { *address = value; }

namespace emulator {
template <class To, class From>
To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
}  // namespace emulator
inline unsigned __float_as_uint(float x) { return emulator::bits_as<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return emulator::bits_as<float>(x); }
inline int __float_as_int(float x) { return emulator::bits_as<int>(x); }
inline float __int_as_float(int x) { return emulator::bits_as<float>(x); }
inline long long __double_as_longlong(double x) { return emulator::bits_as<long long>(x); }
inline double __longlong_as_double(long long x) { return emulator::bits_as<double>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>((static_cast<uint64_t>(a) * b) >> 32);
}
inline int __mulhi(int a, int b) { return static_cast<int>((static_cast<int64_t>(a) * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; ++bit) reversed |= ((x >> bit) & 1u) << (31 - bit);
    return reversed;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    uint64_t both = (static_cast<uint64_t>(high) << 32) | low;
    return static_cast<unsigned>((both << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    uint64_t both = (static_cast<uint64_t>(high) << 32) | low;
    return static_cast<unsigned>(both >> (shift & 31));
}

// ---- arithmetic --------------------------------------------------------------------------------------
// min and max as in CUDA: of floats, the one that is a number; of a signed and an unsigned, unsigned.
template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    using C = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<C>)
        return std::fmin(static_cast<C>(a), static_cast<C>(b));
    else
        return static_cast<C>(a) < static_cast<C>(b) ? static_cast<C>(a) : static_cast<C>(b);
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    using C = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<C>)
        return std::fmax(static_cast<C>(a), static_cast<C>(b));
    else
        return static_cast<C>(a) < static_cast<C>(b) ? static_cast<C>(b) : static_cast<C>(a);
}
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __fdividef(float x, float y) { return x / y; }
// A rounded result, which the compiler does not contract with another operation.
inline float phalanx_rounded(float x) {
    asm("" : "+m"(x));
    return x;
}
inline float __fadd_rn(float x, float y) { return phalanx_rounded(phalanx_rounded(x) + phalanx_rounded(y)); }
inline float __fsub_rn(float x, float y) { return phalanx_rounded(x - y); }
inline float __fmul_rn(float x, float y) { return phalanx_rounded(x * y); }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
inline int __float2int_rn(float x) { return static_cast<int>(nearbyintf(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline int __float2int_rd(float x) { return static_cast<int>(floorf(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
