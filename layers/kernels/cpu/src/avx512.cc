// AVX-512 (F, BW, DQ, VL).
#include "attention.h"
#include "product.h"
#include "rows.h"

namespace ridgeline {
const Dense kDenseAvx512 = {
    {Activations::kFloat32, put<InFloat32<Float32>>, InFloat32<Float32>::multiply},
    {Activations::kFloat32, put<InFloat32<Bfloat16>>, InFloat32<Bfloat16>::multiply},
    attend<InFloat32<Float32>>,
    attend<InFloat32<Bfloat16>>,
    kRowKernels,
};
}  // namespace ridgeline
