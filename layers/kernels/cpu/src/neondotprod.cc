// AArch64: blocks by products of four bytes (DotProd). Not measured.
#include "block_product.h"

namespace ridgeline {
constexpr Blocks kBlocksDotprod = blocks_of_int8();
}
