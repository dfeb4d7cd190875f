// AVX-512 (F, BW, DQ, VL).
#include "attention.h"
#include "product.h"

namespace ridgeline {
const InstructionSet kAvx512 = {
    "avx512",
    {4, put<InFloat32<Float32>>, InFloat32<Float32>::multiply, attend<InFloat32<Float32>>},
    {4, put<InFloat32<Bfloat16>>, InFloat32<Bfloat16>::multiply, attend<InFloat32<Bfloat16>>},
};
}
