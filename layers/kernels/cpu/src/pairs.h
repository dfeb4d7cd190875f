// Products of pairs of bfloat16, two neighbors in depth by two, by an instruction set's own tiles
// (dpbf16.h, bfmmla.h).
#pragma once
#include "kernels.h"
#include "product.h"
#include "tiles.h"
#include "vector.h"

namespace {

// Arithmetic by pairs, as attention.h takes it. What is multiplied is rounded to bfloat16.
template <class Tiles>
struct InPairs {
  using Element = uint16_t;
  using Activation = uint16_t;
  struct Session {};
  static constexpr int64_t kNearRows = 48;  // whole tiles, of 6 rows
  static void put(const Vector& v, uint16_t* x) { narrow(v, x); }
  static void put(const Vector& a, const Vector& b, uint16_t* x) { narrow(a, b, x); }
  static void multiply(const Product& p) { multiply_by_tiles<Tiles>(p); }
};

}  // namespace
