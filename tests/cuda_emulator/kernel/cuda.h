// CUDA C++ for a compiler of the host. Each thread of a kernel is a call of a function.
#pragma once

#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include <math.h>

#include "kernel.h"

#define __host__
#define __device__
#define __global__
#define __constant__
#define __shared__ static  // one block runs at a time
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __CUDACC_VER_MAJOR__ 13

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

static EmulatedPlace emulated;
#define threadIdx (emulated.thread)
#define blockIdx (emulated.block)
#define blockDim (emulated.block_size)
#define gridDim (emulated.grid)

inline void __syncthreads() { emulated.meet(); }
inline void __threadfence() {}

// ---- one of these for each kernel, at the end of the source

template <typename T>
constexpr bool may_hold_addresses = sizeof(T) >= sizeof(void*) && !std::is_arithmetic_v<T>;

template <typename Function>
struct EmulatedCall;

template <typename... Arguments>
struct EmulatedCall<void (*)(Arguments...)> {
    static constexpr size_t count = sizeof...(Arguments);
    static constexpr EmulatedArgument list[count + 1]
        = {{sizeof(Arguments), may_hold_addresses<Arguments>}...};

    template <void (*kernel)(Arguments...), size_t... i>
    static void call(void** arguments, std::index_sequence<i...>)
    {
        kernel(*static_cast<Arguments*>(arguments[i])...);
    }
    template <void (*kernel)(Arguments...)>
    static void call(void** arguments)
    {
        call<kernel>(arguments, std::make_index_sequence<count>());
    }
};

#define EMULATED_KERNEL(NAME, HAS_BARRIERS, LOOPS_OVER_GRID)                           \
    extern "C" __attribute__((visibility("default"))) const EmulatedKernel emulated_##NAME; \
    const EmulatedKernel emulated_##NAME = {                                               \
        #NAME,                                                                             \
        &emulated,                                                                         \
        EmulatedCall<decltype(&NAME)>::count,                                              \
        EmulatedCall<decltype(&NAME)>::list,                                              \
        &EmulatedCall<decltype(&NAME)>::call<&NAME>,                                       \
        HAS_BARRIERS,                                                                      \
        LOOPS_OVER_GRID,                                                                   \
    };

// ---- functions of CUDA that the host has not

template <typename To, typename From>
inline To emulated_bits(From from)
{
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

inline float __int_as_float(int x) { return emulated_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return emulated_bits<float>(x); }
inline int __float_as_int(float x) { return emulated_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return emulated_bits<unsigned>(x); }
inline double __longlong_as_double(long long x) { return emulated_bits<double>(x); }
inline long long __double_as_longlong(double x) { return emulated_bits<long long>(x); }
inline int __double2hiint(double x) { return emulated_bits<uint64_t>(x) >> 32; }
inline int __double2loint(double x) { return (int)emulated_bits<uint64_t>(x); }
inline double __hiloint2double(int high, int low)
{
    return emulated_bits<double>((uint64_t)(unsigned)high << 32 | (unsigned)low);
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }

// Each reading is later by a millisecond of a clock of 1 GHz
inline long long clock64()
{
    static long long cycles = 0;
    return cycles += 1'000'000;
}

inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }

#define EMULATED_MIN_MAX(TYPE)                               \
    inline TYPE min(TYPE a, TYPE b) { return b < a ? b : a; } \
    inline TYPE max(TYPE a, TYPE b) { return a < b ? b : a; }
EMULATED_MIN_MAX(int)
EMULATED_MIN_MAX(unsigned)
EMULATED_MIN_MAX(long)
EMULATED_MIN_MAX(unsigned long)
EMULATED_MIN_MAX(long long)
EMULATED_MIN_MAX(unsigned long long)
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

// No two threads run at the same time
#define EMULATED_ATOMIC(NAME, RESULT)             \
    template <typename T>                         \
    inline T NAME(T* address, T value)            \
    {                                             \
        const T old = *address;                   \
        *address = RESULT;                        \
        return old;                               \
    }
EMULATED_ATOMIC(atomicExch, value)
inline int atomicAdd(int* a, int value) { return (*a += value) - value; }
inline unsigned atomicAdd(unsigned* a, unsigned value) { return (*a += value) - value; }
inline unsigned long long atomicAdd(unsigned long long* a, unsigned long long value)
{
    return (*a += value) - value;
}
inline float atomicAdd(float* a, float value)
{
    const float old = *a;
    *a += value;
    return old;
}
inline double atomicAdd(double* a, double value)
{
    const double old = *a;
    *a += value;
    return old;
}
template <typename T>
inline T atomicCAS(T* address, T expected, T value)
{
    const T old = *address;
    if (old == expected)
        *address = value;
    return old;
}
