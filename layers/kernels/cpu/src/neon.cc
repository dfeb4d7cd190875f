// AArch64: NEON, as the compiler vectorizes it. Not measured.
#include "block_product.h"
#include "dense.h"

namespace ridgeline {
constexpr Dense kDenseNeon = dense_in_float32();
constexpr Blocks kBlocksNeon = blocks_of_int8();
}  // namespace ridgeline
