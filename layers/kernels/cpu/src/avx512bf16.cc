// Products of pairs of bfloat16 by AVX-512 (BF16).
#include "attention.h"
#include "dpbf16.h"
#include "scores.h"

namespace ridgeline {
constexpr Dense kBfloat16Pairs = {
    {Activations::kBfloat16, put<InPairs<Dpbf16>>, InPairs<Dpbf16>::multiply,
     Dpbf16::strips(Dpbf16::kRows)},
    attend<InPairs<Dpbf16>, IntegersByVnni>,
    score<InPairs<Dpbf16>>};
}
