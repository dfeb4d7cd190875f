// AVX-512 (F, BW, DQ, VL).
#include "bounds.h"
#include "dense.h"
#include "heads.h"
#include "states.h"

namespace ridgeline {
constexpr Dense kFloat32Avx512 = dense_in_float32<Float32>();
constexpr Dense kBfloat16Avx512 = dense_in_float32<Bfloat16>();
constexpr RowKernels kRowsAvx512 = kRowKernels;
constexpr StateKernels kStatesAvx512 = kStateKernels;
constexpr BoundKernels kBoundsAvx512 = kBoundKernels;
}  // namespace ridgeline
