// Blocks by AVX-512's products of four bytes (VNNI).
#include "block_product.h"

namespace ridgeline {
constexpr Blocks kBlocksVnni = blocks_of_int8();
}
