// AArch64: products of bfloat16 by BF16, of blocks by I8MM. Not measured.
#include "attention.h"
#include "bfmmla.h"
#include "block_product.h"
#include "scores.h"

namespace ridgeline {
constexpr Dense kBfloat16Bfmmla = {
    {Activations::kBfloat16, put<InPairs<Bfmmla>>, InPairs<Bfmmla>::multiply},
    attend<InPairs<Bfmmla>>,
    score<InPairs<Bfmmla>>};
constexpr Blocks kBlocksI8mm = blocks_of_int8();
}  // namespace ridgeline
