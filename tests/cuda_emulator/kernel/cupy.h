// What each of CuPy's kernels includes; compiled once, by `build`
#pragma once

#include "cuda.h"

#include <cupy/complex.cuh>
#include <cupy/carray.cuh>
#include <cupy/atomics.cuh>
#include <cupy/math_constants.h>

// The last index is written by the kernel, and holds anything before
template <int dimensions, bool is_narrow>
constexpr bool may_hold_addresses<CIndexer<dimensions, is_narrow>> = false;
