// The product of two matrices, which is what CuPy's `@` takes of cuBLAS.

#include <vector>

#include "emulator.h"

namespace {

enum CublasStatus { cublas_success = 0, cublas_invalid_value = 7, cublas_not_supported = 15 };
enum Type { float32 = 0, float64 = 1 };  // cudaDataType

struct Handle {
    void* stream = nullptr;
};

// Stored column by column, or transposed
struct Matrix {
    const void* place;
    size_t row_step, column_step;

    Matrix(const void* at, int leading, bool is_transposed)
        : place(alias(at)),
          row_step(is_transposed ? leading : 1),
          column_step(is_transposed ? 1 : leading)
    {
    }
};

template <typename T>
void multiply(int m, int n, int k, T alpha, Matrix a, Matrix b, T beta, T* c, int leading)
{
    std::vector<double> sums(m);
    for (int column = 0; column < n; ++column) {
        sums.assign(m, 0);
        for (int inner = 0; inner < k; ++inner) {
            const T* left = static_cast<const T*>(a.place) + inner * a.column_step;
            const double factor
                = static_cast<const T*>(b.place)[inner * b.row_step + column * b.column_step];
            for (int row = 0; row < m; ++row)
                sums[row] += factor * left[row * a.row_step];
        }
        for (int row = 0; row < m; ++row) {
            T& to = c[row + size_t(column) * leading];
            to = T(alpha * sums[row]) + (beta ? beta * to : 0);
        }
    }
}

}  // namespace

API CublasStatus cublasCreate_v2(Handle** handle)
{
    *handle = new Handle;
    return cublas_success;
}

API CublasStatus cublasDestroy_v2(Handle* handle)
{
    delete handle;
    return cublas_success;
}

API CublasStatus cublasSetStream_v2(Handle* handle, void* stream)
{
    handle->stream = stream;
    return cublas_success;
}

API CublasStatus cublasGemmEx(Handle* handle, int transpose_a, int transpose_b, int m, int n, int k,
                              const void* alpha, const void* a, int type_a, int leading_a,
                              const void* b, int type_b, int leading_b, const void* beta, void* c,
                              int type_c, int leading_c, int, int)
{
    const auto stream = find_stream(handle->stream);
    for (const void* matrix : {a, b, static_cast<const void*>(c)})
        if (!stream || !find_allocation(matrix, 1))
            return cublas_invalid_value;
    if (type_a != type_c || type_b != type_c || (type_c != float32 && type_c != float64))
        return cublas_not_supported;
    const Matrix left(a, leading_a, transpose_a != 0);
    const Matrix right(b, leading_b, transpose_b != 0);
    const auto enqueue_for = [&](auto zero) {
        using T = decltype(zero);
        const T factor = *static_cast<const T*>(alpha), kept = *static_cast<const T*>(beta);
        T* to = reinterpret_cast<T*>(alias(c));
        enqueue(stream, [=] { multiply<T>(m, n, k, factor, left, right, kept, to, leading_c); });
    };
    type_c == float32 ? enqueue_for(0.0f) : enqueue_for(0.0);
    return cublas_success;
}
