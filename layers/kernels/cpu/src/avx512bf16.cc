// Products of pairs of bfloat16 by AVX-512 (BF16).
#include "attention.h"
#include "pairs.h"
#include "product.h"

namespace ridgeline {
constexpr Dense kBfloat16Pairs = {{Activations::kBfloat16, put<InPairs>, InPairs::multiply},
                                  attend<InPairs>};
}
