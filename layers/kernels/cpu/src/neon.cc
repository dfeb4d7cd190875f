// AArch64: NEON, as the compiler vectorizes it. Not measured.
#include "attention.h"
#include "product.h"

namespace ridgeline {
const InstructionSet kNeon = {
    "neon",
    {4, put<InFloat32<Float32>>, InFloat32<Float32>::multiply, attend<InFloat32<Float32>>},
    {4, put<InFloat32<Bfloat16>>, InFloat32<Bfloat16>::multiply, attend<InFloat32<Bfloat16>>},
};
}
