// AVX2 and FMA.
#include "block_product.h"
#include "bounds.h"
#include "dense.h"
#include "heads.h"
#include "states.h"

namespace ridgeline {
constexpr Dense kFloat32Avx2 = dense_in_float32<Float32>();
constexpr Dense kBfloat16Avx2 = dense_in_float32<Bfloat16>();
constexpr RowKernels kRowsAvx2 = kRowKernels;
constexpr StateKernels kStatesAvx2 = kStateKernels;
constexpr BoundKernels kBoundsAvx2 = kBoundKernels;
constexpr Blocks kBlocksAvx2 = blocks_of_int8();
}  // namespace ridgeline
