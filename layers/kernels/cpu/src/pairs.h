// Products of pairs of bfloat16, two neighbors in depth by two, by an instruction set's own tiles
// (dpbf16.h, bfmmla.h). As in product.h an accumulator goes through the depth in order, so a row's
// bits do not depend on the rows beside it.
//
// `Tiles` has the most rows of a single tile (kMostRows), and of each tile where there are more
// (kRows); strips(rows) of them, in powers of two, as pieces of work have strips; and their tile().
#pragma once
#include "kernels.h"
#include "product.h"
#include "vector.h"

namespace {

// Depth that many rows go through at a time: the tiles' weights, 64 KB a strip, stay in the second
// cache.
constexpr int64_t kPairDepth = 2048;

// Rows from `row` on, strips [strip, stop), depth [start, start + size). Meanwhile `num_next`
// strips are fetched, from `next` on and as deep.
struct PairPart {
  int64_t row, strip, stop, start, size;
  const uint16_t* next;
  int64_t num_next;
};

// Where a tile of a part begins, and whether it goes on with the sums that are there.
struct PairStart {
  const uint16_t *weights, *x;
  float* y;
  int64_t strip_size;
  bool continues;

  PairStart(const Product& p, const PairPart& part)
      : weights((const uint16_t*)p.strips + (part.strip * p.depth + part.start) * kStrip),
        x((const uint16_t*)p.x + part.row * p.depth + part.start),
        y(p.y + part.row * p.y_stride + part.strip * kStrip),
        strip_size(p.depth * kStrip),
        continues(p.accumulates || part.start) {}
};

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// All strips of a part, for ROWS rows.
template <class Tiles, int ROWS, int STRIPS = Tiles::strips(ROWS)>
void pair_tiles(const Product& p, PairPart part) {
  for (; part.strip + STRIPS <= part.stop; part.strip += STRIPS)
    Tiles::template tile<ROWS, STRIPS>(p, part);
  if constexpr (STRIPS > 1)
    if (part.strip < part.stop) pair_tiles<Tiles, ROWS, STRIPS / 2>(p, part);
}

template <class Tiles, int ROWS = Tiles::kMostRows>
void pair_tiles_of(int64_t rows, const Product& p, const PairPart& part) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return pair_tiles_of<Tiles, ROWS - 1>(rows, p, part);
  pair_tiles<Tiles, ROWS>(p, part);
}

// All strips for all rows. Many rows form equal groups: a few strips, a part of their depth at a
// time, go through all groups while the cache holds them, and the groups fetch the next part.
template <class Tiles>
void multiply_pairs(const Product& p) {
  constexpr int kRows = Tiles::kRows, kStrips = Tiles::strips(kRows);
  if (p.num_rows <= Tiles::kMostRows)
    return pair_tiles_of<Tiles>(p.num_rows, p, {0, 0, p.num_strips, 0, p.depth, nullptr, 0});
  const int64_t groups = (p.num_rows + kRows - 1) / kRows;
  const int64_t most_next = p.is_far ? (kStrips + groups - 1) / groups : 0;
  const int64_t strip_size = p.depth * kStrip;
  PairPart part;
  for (part.strip = 0; part.strip < p.num_strips; part.strip = part.stop) {
    part.stop = least(part.strip + kStrips, p.num_strips);
    for (part.start = 0; part.start < p.depth; part.start += part.size) {
      part.size = least(kPairDepth, p.depth - part.start);
      const int64_t below = part.start + part.size;
      const bool is_deepest = below == p.depth;
      int64_t next = is_deepest ? part.stop : part.strip;
      const int64_t end = is_deepest ? least(next + kStrips, p.num_strips) : part.stop;
      const auto* const depth = (const uint16_t*)p.strips + (is_deepest ? 0 : below * kStrip);
      for (int64_t g = 0; g < groups; g++, next += part.num_next) {
        part.row = p.num_rows * g / groups;
        part.next = depth + next * strip_size;
        part.num_next = least(most_next, end - next);
        pair_tiles_of<Tiles>(p.num_rows * (g + 1) / groups - part.row, p, part);
      }
    }
  }
}

// Arithmetic by pairs, as attention.h takes it. What is multiplied is rounded to bfloat16.
template <class Tiles>
struct InPairs {
  using Element = uint16_t;
  using Activation = uint16_t;
  struct Session {};
  static void put(const Vector& v, uint16_t* x) { narrow(v, x); }
  static void multiply(const Product& p) { multiply_pairs<Tiles>(p); }
};

}  // namespace
