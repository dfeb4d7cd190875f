// Products and attention of an instruction set that multiplies in float32.
#pragma once
#include "attention.h"
#include "product.h"
#include "scores.h"

namespace {

// `Integers` adds up products of quantized pages, where these are integers.
template <class Format, class Integers = void>
constexpr ridgeline::Dense dense_in_float32() {
  using Arithmetic = InFloat32<Format>;
  return {{ridgeline::Activations::kFloat32, put<Arithmetic>, Arithmetic::multiply},
          attend<Arithmetic, Integers>, score<Arithmetic>};
}

}  // namespace
