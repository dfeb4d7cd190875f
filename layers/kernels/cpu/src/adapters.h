// Low-rank adapters (LoRA, arXiv 2106.09685) of a product's rows: B A x is added to x w^T.
//
// Each of N slots has matrices A [P R, D] and B [F, R]. Of P modules, one behind the other, each has
// R ranks, so that a feature reads those of its module alone. A slot uses its first ranks of each. A
// row's sum goes through the weight's depth and then through the ranks, in order, so no bit of it
// depends on the rows beside it.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "scratch.h"

namespace ridgeline {

// Rows with one slot's adapter, one behind the other as a product takes them.
struct Run {
  int64_t slot, row, num_rows;
  int64_t rank;  // that it uses, a multiple of 16
};

// What one thread computes of A x: some rows of a run, some strips of A.
struct LowPiece {
  int64_t slot, row, num_rows, strip, num_strips;
};

struct Adapters {
  const Multiplier *down_kernels = nullptr, *up_kernels = nullptr;
  int64_t element_bytes = 0;      // of A and B
  int64_t depth, strips;          // padded D, strips of F
  int64_t modules, rank;          // P, R
  const char *down, *up;          // [N, P R / 16] and [N, strips] strips
  const int32_t* ends;            // [P]: the features before each module's end
  char* x = nullptr;              // activations of the runs' rows, `x_padding` elements apart
  int64_t x_padding = 0;
  char* low = nullptr;            // A x as activations: [P, rows, R]
  int64_t num_rows = 0;           // of all runs
  std::vector<Run> runs;
  std::vector<LowPiece> pieces;

  int64_t activation_bytes() const {
    return down_kernels->activations == Activations::kFloat32 ? 4 : 2;
  }
  int64_t low_bytes() const { return modules * num_rows * rank * activation_bytes(); }

  char* x_at(int64_t row) const { return x + row * (depth + x_padding) * activation_bytes(); }

  // Divides A x into pieces that are worth a claim.
  void cut(int64_t num_threads) {
    constexpr int64_t kLeastRows = 12, kMostRows = 64, kStrips = 4;
    const int64_t share = num_rows / (2 * std::max<int64_t>(1, num_threads)) + 1;
    const int64_t rows = std::min(kMostRows, std::max(kLeastRows, share));
    for (const Run& run : runs)
      for (int64_t row = 0; row < run.num_rows; row += rows)
        for_strips(run.rank, kStrips, [&](int64_t strip, int64_t count) {
          pieces.push_back({run.slot, run.row + row, std::min(rows, run.num_rows - row), strip,
                            count});
        });
  }

  void compute(const LowPiece& piece) const {
    static thread_local Scratch scratch;
    Product p;
    p.strips = down + (piece.slot * modules * rank / kStrip + piece.strip) * depth * kStrip *
                          element_bytes;
    p.num_strips = piece.num_strips;
    p.depth = depth;
    p.x = x_at(piece.row);
    p.x_padding = x_padding;
    p.num_rows = piece.num_rows;
    p.y_stride = p.num_strips * kStrip;
    p.y = (float*)scratch.reserve(p.num_rows * p.y_stride * sizeof(float));
    p.accumulates = false;
    down_kernels->multiply(p);
    for (int64_t row = 0; row < p.num_rows; row++)
      for (int64_t strip = 0; strip < p.num_strips; strip++) {
        const int64_t first = (piece.strip + strip) * kStrip;
        char* const to = low_at(first / rank, piece.row + row) + first % rank * activation_bytes();
        down_kernels->put(p.y + row * p.y_stride + strip * kStrip, true, kStrip, kStrip, to, 0);
      }
  }

  // Fetches what `add` will read of B, while the product with the weight is computed. Inlined at
  // once, as in tiles.h.
  __attribute__((always_inline)) void fetch(const Product& base, int64_t row, int64_t strip) const {
    const int64_t strip_bytes = rank * kStrip * element_bytes;
    for (const Run& run : runs) {
      if (run.row >= row + base.num_rows || row >= run.row + run.num_rows) continue;
      const char* const from = up + (run.slot * strips + strip) * strip_bytes;
      for (int64_t at = 0; at < base.num_strips * strip_bytes; at += 64)
        __builtin_prefetch(from + at, 0, 2);
    }
  }

  // Adds B A x to rows from `row` on of a product's result, and to strips from `strip` on.
  void add(const Product& base, int64_t row, int64_t strip) const {
    const int64_t last_row = row + base.num_rows, last_strip = strip + base.num_strips;
    for (const Run& run : runs) {
      const int64_t first = std::max(row, run.row);
      const int64_t stop = std::min(last_row, run.row + run.num_rows);
      if (first >= stop) continue;
      for (int64_t m = 0; m < modules; m++) {
        const int64_t begin = m ? ends[m - 1] : 0, end = m + 1 < modules ? ends[m] : strips * kStrip;
        Product p;
        p.depth = run.rank;
        p.strip_depth = rank;
        p.x = low_at(m, first);
        p.x_padding = rank - run.rank;
        p.num_rows = stop - first;
        p.is_far = false;
        int64_t f = std::max(begin, strip * kStrip);
        const int64_t last = std::min(end, last_strip * kStrip);
        while (f < last) {
          const int64_t s = f / kStrip;
          float* const y = base.y + (first - row) * base.y_stride + (s - strip) * kStrip;
          p.strips = up + (run.slot * strips + s) * rank * kStrip * element_bytes;
          const bool is_whole = f % kStrip == 0 && f + kStrip <= last;
          p.num_strips = is_whole ? (last - f) / kStrip : 1;
          const int64_t next = std::min(last, (s + p.num_strips) * kStrip);
          if (is_whole)
            add_whole(p, y, base.y_stride);
          else
            add_part(p, y, base.y_stride, f - s * kStrip, next - s * kStrip);
          f = next;
        }
      }
    }
  }

 private:
  char* low_at(int64_t module, int64_t row) const {
    return low + (module * num_rows + row) * rank * activation_bytes();
  }

  // Calls work(strip, count) for the strips of A that a slot uses, some at a time.
  template <class Work>
  void for_strips(int64_t used, int64_t most, const Work& work) const {
    const bool is_whole = used == rank;
    const int64_t ranges = is_whole ? 1 : modules;
    const int64_t size = (is_whole ? modules * rank : used) / kStrip;
    for (int64_t range = 0; range < ranges; range++)
      for (int64_t strip = 0; strip < size; strip += most)
        work(range * rank / kStrip + strip, std::min(most, size - strip));
  }

  void add_whole(Product& p, float* y, int64_t y_stride) const {
    p.y = y;
    p.y_stride = y_stride;
    p.accumulates = true;
    up_kernels->multiply(p);
  }

  // To the features [first, stop) of a strip where modules meet.
  void add_part(Product& p, float* y, int64_t y_stride, int64_t first, int64_t stop) const {
    static thread_local Scratch scratch;
    p.y_stride = kStrip;
    p.y = (float*)scratch.reserve(p.num_rows * kStrip * sizeof(float));
    p.accumulates = false;
    up_kernels->multiply(p);
    for (int64_t row = 0; row < p.num_rows; row++)
      for (int64_t f = first; f < stop; f++) y[row * y_stride + f] += p.y[row * kStrip + f];
  }
};

}  // namespace ridgeline
