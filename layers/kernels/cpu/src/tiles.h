// How a product goes through its strips by an instruction set's own tiles. Each (row, feature) has
// one accumulator that goes through the depth in order, so a row's bits do not depend on the rows
// beside it.
//
// `Tiles` has the type of a weight (Element), the bytes of a strip's row of depth (kRowBytes) and
// of a strip (strip_bytes(depth)); the most rows of a single tile (kMostRows), and of each tile
// where there are more (kRows), the depth that these go through at a time (kDepth), and whether all
// of them fetch what comes next (kFetchesNext) or the first fetch their own weights; strips(rows)
// of a tile; and tile().
#pragma once
#include "kernels.h"
#include "vector.h"

namespace {

using ridgeline::kStrip;
using ridgeline::Product;

// Rows from `row` on, strips [strip, stop), depth [start, start + size). Meanwhile `num_next`
// strips are fetched, from `next` on and as deep.
struct Part {
  int64_t row, strip, stop, start, size;
  const char* next;
  int64_t num_next;
};

// Rows of depth that a tile takes between two fetches.
constexpr int kTogether = 4;

// Rows of activations. Three share a pointer, since there are fewer registers than rows.
template <class Activation, int ROWS>
class Rows {
 public:
  Rows(const Activation* x, int64_t stride) : stride_(stride) {
    UNROLL for (int i = 0; i < kPointers; i++) x_[i] = x + 3 * i * stride;
  }

  // Where row r is at, so many elements further.
  const Activation* at(int r, int further) const {
    return x_[r / 3] + r % 3 * stride_ + further;
  }

  void advance() {
    UNROLL for (int i = 0; i < kPointers; i++) {
      x_[i] += kTogether;
      __asm__("" : "+r"(x_[i]));  // or the compiler makes a pointer of each row
    }
  }

 private:
  static constexpr int kPointers = (ROWS + 2) / 3;

  const Activation* x_[kPointers];
  int64_t stride_;
};

// Where a tile of a part begins, and whether it goes on with the sums that are there.
template <class Tiles, class Activation>
struct Start {
  using Element = typename Tiles::Element;

  const Activation* x;
  float* y;
  int64_t strip_bytes;
  bool continues;

  Start(const Product& p, const Part& part)
      : x((const Activation*)p.x + part.row * p.x_stride() + part.start),
        y(p.y + part.row * p.y_stride + part.strip * kStrip),
        strip_bytes(Tiles::strip_bytes(p.whole_depth())),
        continues(p.accumulates || part.start),
        weights_((const char*)p.strips + part.strip * strip_bytes + part.start * kRowBytes) {}

  // Weights of a strip from its k-th row of depth on.
  const Element* weights(int64_t strip, int64_t k) const {
    return (const Element*)(weights_ + strip * strip_bytes + k * kRowBytes);
  }

  // Fetches, when a tile of so many strips is at its k-th row of depth, what it reads in a while
  // and what comes next. The tile has the strip behind each, too: near the end those of the next
  // tile are due. Inlined at once: GCC drops calls that only fetch.
  template <int STRIPS>
  __attribute__((always_inline)) void fetch(const Part& part, int64_t k) const {
    constexpr int64_t kAhead = 2 << 10;
    constexpr int kLines = (kTogether * kRowBytes + 63) / 64;
    const bool ends = (part.size - k) * kRowBytes <= kAhead;
    const char* const due =
        weights_ + k * kRowBytes + kAhead + (ends ? (STRIPS - 1) * strip_bytes : 0);
    if (Tiles::kFetchesNext || part.row == 0) UNROLL
      for (int s = 0; s < STRIPS; s++) UNROLL
        for (int line = 0; line < kLines; line++)
          __builtin_prefetch(due + s * strip_bytes + line * 64);
    if constexpr (Tiles::kFetchesNext)
      for (int64_t s = 0; s < part.num_next; s++) UNROLL
        for (int line = 0; line < kLines; line++)
          __builtin_prefetch(part.next + s * strip_bytes + k * kRowBytes + line * 64, 0, 2);
  }

 private:
  static constexpr int64_t kRowBytes = Tiles::kRowBytes;

  const char* weights_;
};

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// All strips of a part, for ROWS rows.
template <class Tiles, int ROWS, int STRIPS = Tiles::strips(ROWS)>
void tiles_of_rows(const Product& p, Part part) {
  for (; part.strip + STRIPS <= part.stop; part.strip += STRIPS)
    Tiles::template tile<ROWS, STRIPS>(p, part);
  if constexpr (STRIPS > 1)
    if (part.strip < part.stop) tiles_of_rows<Tiles, ROWS, STRIPS / 2>(p, part);
}

template <class Tiles, int ROWS = Tiles::kMostRows>
void tiles_of(int64_t rows, const Product& p, const Part& part) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return tiles_of<Tiles, ROWS - 1>(rows, p, part);
  tiles_of_rows<Tiles, ROWS>(p, part);
}

// All strips for all rows. Many rows form equal groups: a few strips, a part of their depth at a
// time, go through all groups while the cache holds them.
template <class Tiles>
void multiply_by_tiles(const Product& p) {
  constexpr int kRows = Tiles::kRows, kStrips = Tiles::strips(kRows);
  if (p.num_rows <= Tiles::kMostRows)
    return tiles_of<Tiles>(p.num_rows, p, {0, 0, p.num_strips, 0, p.depth, nullptr, 0});
  const int64_t groups = (p.num_rows + kRows - 1) / kRows;
  const int64_t most_next = p.is_far && Tiles::kFetchesNext ? (kStrips + groups - 1) / groups : 0;
  const int64_t strip_bytes = Tiles::strip_bytes(p.whole_depth());
  Part part;
  for (part.strip = 0; part.strip < p.num_strips; part.strip = part.stop) {
    part.stop = least(part.strip + kStrips, p.num_strips);
    for (part.start = 0; part.start < p.depth; part.start += part.size) {
      part.size = least(Tiles::kDepth, p.depth - part.start);
      const int64_t below = part.start + part.size;
      const bool is_deepest = below == p.depth;
      int64_t next = is_deepest ? part.stop : part.strip;
      const int64_t end = is_deepest ? least(next + kStrips, p.num_strips) : part.stop;
      const char* const depth = (const char*)p.strips +
          (is_deepest ? 0 : below * Tiles::kRowBytes);
      for (int64_t g = 0; g < groups; g++, next += part.num_next) {
        part.row = p.num_rows * g / groups;
        part.next = depth + next * strip_bytes;
        part.num_next = least(most_next, end - next);
        tiles_of<Tiles>(p.num_rows * (g + 1) / groups - part.row, p, part);
      }
    }
  }
}

}  // namespace
