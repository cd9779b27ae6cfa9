// mpidist's kernels: sums of the arrays of all ranks, and packing.
//
// They are bound by memory bandwidth, so threads access 16 bytes at a time where the
// alignment allows it.

typedef unsigned char u1;
typedef unsigned short u2;
typedef unsigned int u4;
typedef unsigned long long u8;

#define MOST_PARTS 64
#define SPAN_BYTES 32768

// The addresses of the arrays of several ranks
struct Parts {
    const void* of[MOST_PARTS];
};

// 16-bit numbers, as raw bits
struct float16 {
    u2 bits;
};
struct bfloat16 {
    u2 bits;
};

__device__ inline float as_float(u4 bits) { return __int_as_float((int)bits); }

#ifdef __CUDA_ARCH__
// CuPy compiles with -ftz=true, which flushes float32 numbers below 1.2e-38 to 0. PTX
// instructions without .ftz keep them.
__device__ inline float add(float a, float b)
{
    float sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
}
__device__ inline float widen(float16 x)
{
    float wide;
    asm("{ .reg .b16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(wide) : "h"(x.bits));
    return wide;
}
#else  // compiled for a CPU, which flushes nothing to 0
__device__ inline float add(float a, float b) { return a + b; }
__device__ inline float widen(float16 x)
{
    const u4 sign = (u4)(x.bits & 0x8000u) << 16;
    const u4 rest = (u4)(x.bits & 0x7fffu) << 13;
    if (rest >= 0x0f800000u)  // infinite, or not a number
        return as_float(sign | 0x70000000u | rest);
    // The exponent is off by 112
    return as_float(sign | rest) * as_float(0x77800000u);  // 2**112
}
#endif

template <typename T>
__device__ inline T add(T a, T b) { return a + b; }

// Convert a number to the type in which it is summed
template <typename T>
__device__ inline T widen(T x) { return x; }
__device__ inline float widen(bfloat16 x) { return as_float((u4)x.bits << 16); }

template <typename T>
struct alignas(16) Vector {
    T item[16 / sizeof(T)];
};

// totals[i] = parts[0][i] + parts[1][i] + ..., in this order. If `goes_on` is not 0, add
// to totals[i] instead: totals[i] + parts[0][i] + ...
template <typename T, typename Wide>
__device__ void add_one_by_one(
    const Parts& parts, int count, int goes_on, Wide* totals, u8 first, u8 size)
{
    const u8 step = (u8)gridDim.x * blockDim.x;
    for (u8 i = first + (u8)blockIdx.x * blockDim.x + threadIdx.x; i < size; i += step) {
        Wide total = goes_on ? totals[i] : widen(((const T*)parts.of[0])[i]);
        for (int part = goes_on ? 0 : 1; part < count; part++)
            total = add(total, widen(((const T*)parts.of[part])[i]));
        totals[i] = total;
    }
}

template <typename T>
__device__ void add_vectors(
    const Parts& parts, int count, int goes_on, T* totals, u8 size)
{
    const int width = 16 / sizeof(T);
    const u8 step = (u8)gridDim.x * blockDim.x;
    for (u8 i = (u8)blockIdx.x * blockDim.x + threadIdx.x; i < size / width; i += step) {
        Vector<T> total = ((const Vector<T>*)(goes_on ? totals : parts.of[0]))[i];
        for (int part = goes_on ? 0 : 1; part < count; part++) {
            const Vector<T> more = ((const Vector<T>*)parts.of[part])[i];
            for (int j = 0; j < width; j++)
                total.item[j] = add(total.item[j], more.item[j]);
        }
        ((Vector<T>*)totals)[i] = total;
    }
    add_one_by_one<T, T>(parts, count, goes_on, totals, size / width * width, size);
}

template <typename T>
__device__ void add_alike(
    const Parts& parts, int count, int goes_on, T* totals, u8 size)
{
    u8 addresses = (u8)totals;
    for (int part = 0; part < count; part++)
        addresses |= (u8)parts.of[part];
    if (addresses % 16 == 0)
        add_vectors<T>(parts, count, goes_on, totals, size);
    else
        add_one_by_one<T, T>(parts, count, goes_on, totals, 0, size);
}

// Signed integers are summed as unsigned ones, so that overflow wraps around as in NumPy
#define ADD(NAME, TYPE)                                                             \
    extern "C" __global__ void add_##NAME(                                          \
        Parts parts, int count, int goes_on, TYPE* totals, u8 size)                 \
    {                                                                               \
        add_alike<TYPE>(parts, count, goes_on, totals, size);                       \
    }
ADD(u1, u1)
ADD(u2, u2)
ADD(u4, u4)
ADD(u8, u8)
ADD(f4, float)
ADD(f8, double)

#define ADD_WIDE(NAME, TYPE)                                                        \
    extern "C" __global__ void add_##NAME(                                          \
        Parts parts, int count, int goes_on, float* totals, u8 size)                \
    {                                                                               \
        add_one_by_one<TYPE, float>(parts, count, goes_on, totals, 0, size);        \
    }
ADD_WIDE(float16, float16)
ADD_WIDE(bfloat16, bfloat16)

template <typename Word>
__device__ void copy_words(void* to, const void* from, u8 count)
{
    for (u8 i = threadIdx.x; i < count; i += blockDim.x)
        ((Word*)to)[i] = ((const Word*)from)[i];
}

// Copy `size` bytes by all threads of one block
__device__ void copy(u1* to, const u1* from, u8 size)
{
    const u8 addresses = (u8)to | (u8)from;
    u8 done = 0;
    if (addresses % 16 == 0) {
        copy_words<Vector<u4>>(to, from, size / 16);
        done = size / 16 * 16;
    } else if (addresses % 4 == 0) {
        copy_words<u4>(to, from, size / 4);
        done = size / 4 * 4;
    }
    copy_words<u1>(to + done, from + done, size - done);
}

// Copy bytes first..first+size of the concatenation of several arrays.
// `table` holds the address of each array, then the offset of each in the concatenation,
// then the length of the concatenation.
extern "C" __global__ void pack(
    const u8* table, int arrays, u8 first, u8 size, u1* to)
{
    const u8* starts = table + arrays;
    for (u8 span = (u8)blockIdx.x * SPAN_BYTES; span < size;
         span += (u8)gridDim.x * SPAN_BYTES) {
        u8 place = first + span;
        const u8 end = first + (size - span < SPAN_BYTES ? size : span + SPAN_BYTES);
        // Find the array that holds this byte, by binary search
        int low = 0, high = arrays;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (starts[middle] <= place)
                low = middle;
            else
                high = middle;
        }
        for (int array = low; place < end; array++) {
            const u8 stop = starts[array + 1] < end ? starts[array + 1] : end;
            if (stop > place)
                copy(to + (place - first),
                     (const u1*)table[array] + (place - starts[array]), stop - place);
            place = stop;
        }
    }
}
