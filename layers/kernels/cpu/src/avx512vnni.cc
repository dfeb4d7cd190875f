// Blocks, and attention over quantized pages, by AVX-512's products of four bytes (VNNI).
#include "block_product.h"
#include "dense.h"

namespace ridgeline {
constexpr Dense kBfloat16Vnni = dense_in_float32<Bfloat16, IntegersByVnni>();
constexpr Blocks kBlocksVnni = blocks_of_int8();
}
