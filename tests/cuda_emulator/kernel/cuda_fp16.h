// What CuPy's kernels use of CUDA's numbers of 16 bits
#pragma once

struct __half_raw {
    unsigned short x;
};

struct __half {
    __half() = default;
    __half(const __half_raw& raw) : bits(raw.x) {}
    template <typename T>
    __half(T value) : bits(emulated_bits<unsigned short>((_Float16)value)) {}
    operator float() const { return emulated_bits<_Float16>(bits); }
    operator __half_raw() const { return {bits}; }

    unsigned short bits;
};
typedef __half half;

inline unsigned short __half_as_ushort(half x) { return x.bits; }
inline half __ushort_as_half(unsigned short bits) { return half(__half_raw{bits}); }
inline half __float2half_rn(float x) { return half(x); }
inline float __half2float(half x) { return x; }
