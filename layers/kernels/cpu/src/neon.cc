// AArch64: NEON, as the compiler vectorizes it. Not measured.
#include "block_product.h"
#include "bounds.h"
#include "dense.h"
#include "heads.h"
#include "states.h"

namespace ridgeline {
constexpr Dense kFloat32Neon = dense_in_float32<Float32>();
constexpr Dense kBfloat16Neon = dense_in_float32<Bfloat16>();
constexpr RowKernels kRowsNeon = kRowKernels;
constexpr StateKernels kStatesNeon = kStateKernels;
constexpr BoundKernels kBoundsNeon = kBoundKernels;
constexpr Blocks kBlocksNeon = blocks_of_int8();
}  // namespace ridgeline
