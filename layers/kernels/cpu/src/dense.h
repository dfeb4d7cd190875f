// What an instruction set offers that multiplies in float32.
#pragma once
#include "attention.h"
#include "bounds.h"
#include "product.h"
#include "rows.h"

namespace {

constexpr ridgeline::Dense dense_in_float32() {
  using ridgeline::Activations;
  return {
      {Activations::kFloat32, put<InFloat32<Float32>>, InFloat32<Float32>::multiply},
      {Activations::kFloat32, put<InFloat32<Bfloat16>>, InFloat32<Bfloat16>::multiply},
      attend<InFloat32<Float32>>,
      attend<InFloat32<Bfloat16>>,
      kBoundKernels,
      kRowKernels,
  };
}

}  // namespace
