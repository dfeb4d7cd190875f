// AVX-512 (F, BW, DQ, VL).
#include "dense.h"

namespace ridgeline {
constexpr Dense kDenseAvx512 = dense_in_float32();
}  // namespace ridgeline
