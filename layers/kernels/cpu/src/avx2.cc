// AVX2 and FMA.
#include "block_product.h"
#include "dense.h"

namespace ridgeline {
constexpr Dense kDenseAvx2 = dense_in_float32();
constexpr Blocks kBlocksAvx2 = blocks_of_int8();
}  // namespace ridgeline
