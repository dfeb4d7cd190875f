// AVX2 and FMA.
#include "attention.h"
#include "block_product.h"
#include "product.h"
#include "rows.h"

namespace ridgeline {
const Dense kDenseAvx2 = {
    {Activations::kFloat32, put<InFloat32<Float32>>, InFloat32<Float32>::multiply},
    {Activations::kFloat32, put<InFloat32<Bfloat16>>, InFloat32<Bfloat16>::multiply},
    attend<InFloat32<Float32>>,
    attend<InFloat32<Bfloat16>>,
    kRowKernels,
};
constexpr Blocks kBlocksAvx2 = blocks_of_int8();
}  // namespace ridgeline
