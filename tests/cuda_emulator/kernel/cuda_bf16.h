// What CuPy's kernels use of CUDA's bfloat16
#pragma once

struct __nv_bfloat16 {
    __nv_bfloat16() = default;
    __nv_bfloat16(float value)
    {
        const unsigned all = emulated_bits<unsigned>(value);
        // Round to nearest, ties to even; a NaN stays one
        bits = value != value ? 0x7fff : (all + 0x7fff + (all >> 16 & 1)) >> 16;
    }
    operator float() const { return emulated_bits<float>((unsigned)bits << 16); }

    unsigned short bits;
};

inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits)
{
    __nv_bfloat16 result;
    result.bits = bits;
    return result;
}
inline bool __hisnan(__nv_bfloat16 x) { return isnan((float)x); }
inline int __hisinf(__nv_bfloat16 x) { return isinf((float)x); }
