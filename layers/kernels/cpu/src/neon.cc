// AArch64: NEON, as the compiler vectorizes it. Not measured.
#include "attention.h"
#include "block_product.h"
#include "product.h"
#include "rows.h"

namespace ridgeline {
const Dense kDenseNeon = {
    {Activations::kFloat32, put<InFloat32<Float32>>, InFloat32<Float32>::multiply},
    {Activations::kFloat32, put<InFloat32<Bfloat16>>, InFloat32<Bfloat16>::multiply},
    attend<InFloat32<Float32>>,
    attend<InFloat32<Bfloat16>>,
    kRowKernels,
};
constexpr Blocks kBlocksNeon = blocks_of_int8();
}  // namespace ridgeline
