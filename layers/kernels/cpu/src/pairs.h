// Products of pairs of bfloat16 (AVX512_BF16): one instruction multiplies two neighbors in depth by
// two. It adds the second product to an accumulator of float32, then the first, each rounded to
// even; denormal numbers count as 0. As in product.h an accumulator goes through the depth in
// order, so a row's bits do not depend on the rows beside it.
#pragma once
#include "kernels.h"
#include "vector.h"

namespace {

using ridgeline::kStrip;
using ridgeline::Product;

// Strips of a tile: accumulators enough to hide the instruction's latency, few enough to leave
// registers for the weights, in powers of two, as pieces of work have them.
constexpr int pair_strips(int rows) { return rows <= 2 ? 8 : rows <= 6 ? 4 : 2; }

// The most rows of a single tile, and of each tile where there are more. Where rows lie a multiple
// of 4 KB apart, a cache of eight ways holds no more of them side by side.
constexpr int kMostPairRows = 8, kPairRows = 6, kPairStrips = pair_strips(kPairRows);

// Depth that many rows go through at a time: the tiles' weights, 256 KB, stay in the second cache.
constexpr int64_t kPairDepth = 2048;

// Rows from `row` on, strips [strip, stop), depth [start, start + size). Meanwhile `num_next`
// strips are fetched, from `next` on and as deep.
struct PairPart {
  int64_t row, strip, stop, start, size;
  const uint16_t* next;
  int64_t num_next;
};

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <int ROWS, int STRIPS>
void pair_tile(const Product& p, const PairPart& part) {
  constexpr int64_t kAhead = 2 << 10;  // bytes
  const int64_t strip_size = p.depth * kStrip;
  const auto* weights =
      (const uint16_t*)p.strips + part.strip * strip_size + part.start * kStrip;
  const auto* x = (const uint16_t*)p.x + part.row * p.depth + part.start;
  float* y = p.y + part.row * p.y_stride + part.strip * kStrip;
  const bool continues = p.accumulates || part.start;
  __m512 sums[ROWS][STRIPS];
  UNROLL for (int r = 0; r < ROWS; r++) UNROLL
    for (int s = 0; s < STRIPS; s++)
      sums[r][s] = continues ? _mm512_loadu_ps(y + r * p.y_stride + s * kStrip) : __m512{};
  for (int64_t k = 0; k < part.size; k += 2) {
    // The tile has the strip behind this one, too: near the end the next tile's strips are due.
    const int64_t remaining = (part.size - k) * kStrip * 2;
    const char* const due = (const char*)(weights + k * kStrip) + kAhead +
                            (remaining <= kAhead ? (STRIPS - 1) * strip_size * 2 : 0);
    for (int64_t s = 0; s < part.num_next; s++)
      _mm_prefetch((const char*)(part.next + s * strip_size + k * kStrip), _MM_HINT_T1);
    __m512bh w[STRIPS];
    UNROLL for (int s = 0; s < STRIPS; s++) {
      _mm_prefetch(due + s * strip_size * 2, _MM_HINT_T0);
      w[s] = (__m512bh)_mm512_loadu_si512(weights + s * strip_size + k * kStrip);
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
      int32_t pair;
      memcpy(&pair, x + r * p.depth + k, sizeof pair);
      const auto factor = (__m512bh)_mm512_set1_epi32(pair);
      UNROLL for (int s = 0; s < STRIPS; s++)
        sums[r][s] = _mm512_dpbf16_ps(sums[r][s], w[s], factor);
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++) UNROLL
    for (int s = 0; s < STRIPS; s++) _mm512_storeu_ps(y + r * p.y_stride + s * kStrip, sums[r][s]);
}

// All strips of a part, for ROWS rows.
template <int ROWS, int STRIPS = pair_strips(ROWS)>
void pair_tiles(const Product& p, PairPart part) {
  for (; part.strip + STRIPS <= part.stop; part.strip += STRIPS) pair_tile<ROWS, STRIPS>(p, part);
  if constexpr (STRIPS > 1)
    if (part.strip < part.stop) pair_tiles<ROWS, STRIPS / 2>(p, part);
}

template <int ROWS = kMostPairRows>
void pair_tiles_of(int64_t rows, const Product& p, const PairPart& part) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return pair_tiles_of<ROWS - 1>(rows, p, part);
  pair_tiles<ROWS>(p, part);
}

// All strips for all rows. Many rows form equal groups: a few strips, a part of their depth at a
// time, go through all groups while the cache holds them, and the groups fetch the next part.
void multiply_pairs(const Product& p) {
  if (p.num_rows <= kMostPairRows)
    return pair_tiles_of(p.num_rows, p, {0, 0, p.num_strips, 0, p.depth, nullptr, 0});
  const int64_t groups = (p.num_rows + kPairRows - 1) / kPairRows;
  const int64_t most_next = p.is_far ? (kPairStrips + groups - 1) / groups : 0;
  const int64_t strip_size = p.depth * kStrip;
  PairPart part;
  for (part.strip = 0; part.strip < p.num_strips; part.strip = part.stop) {
    part.stop = least(part.strip + kPairStrips, p.num_strips);
    for (part.start = 0; part.start < p.depth; part.start += part.size) {
      part.size = least(kPairDepth, p.depth - part.start);
      const int64_t below = part.start + part.size;
      const bool is_deepest = below == p.depth;
      int64_t next = is_deepest ? part.stop : part.strip;
      const int64_t end = is_deepest ? least(next + kPairStrips, p.num_strips) : part.stop;
      const auto* const depth = (const uint16_t*)p.strips + (is_deepest ? 0 : below * kStrip);
      for (int64_t g = 0; g < groups; g++, next += part.num_next) {
        part.row = p.num_rows * g / groups;
        part.next = depth + next * strip_size;
        part.num_next = least(most_next, end - next);
        pair_tiles_of(p.num_rows * (g + 1) / groups - part.row, p, part);
      }
    }
  }
}

// Arithmetic by pairs, as attention.h takes it. What is multiplied is rounded to bfloat16.
struct InPairs {
  using Element = uint16_t;
  using Activation = uint16_t;
  struct Session {};
  static void put(const Vector& v, uint16_t* x) { narrow(v, x); }
  static void multiply(const Product& p) { multiply_pairs(p); }
};

}  // namespace
