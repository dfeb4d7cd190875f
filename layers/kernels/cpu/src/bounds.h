// What the scores of a page's keys do not exceed, by the smallest and the largest of each of their
// elements (Quest, layers/sparse/quest.py). Extremes are read where they lie, once for all queries
// of a row; a sum has one order, whatever is computed beside it.
#pragma once
#include "kernels.h"
#include "rows.h"
#include "vector.h"

namespace {

using ridgeline::Bounds;

// Of a query token and each KV head, what is positive in its query heads, added up in their order,
// and what is negative.
void sum_signs(const Bounds& b, int64_t token) {
  const int64_t group = b.num_heads / b.kv_heads;
  const Vector zero = Vector::splat(0);
  for (int64_t head = 0; head < b.kv_heads; head++) {
    float* const sums = b.sums_of(token, head);
    by_sixteen(b.width, [&](int64_t i, int count) {
      const int64_t first = (token * b.num_heads + head * group) * b.width + i;
      Vector positive = zero, negative = zero;
      for (int64_t g = 0; g < group; g++) {
        const Vector q = load_elements(b.q, b.is_float32, first + g * b.width, count);
        positive = positive + maximum(zero, q);  // in this order NaN stays NaN
        negative = negative + minimum(zero, q);
      }
      positive.store(sums + i);
      negative.store(sums + b.padded_width() + i);
    });
  }
}

// The bounds of pages [first, stop) of row y, for all its tokens. The next ones' extremes are
// fetched meanwhile.
template <bool is_float32>
void bound_pages(const Bounds& b, int64_t y, int64_t first, int64_t stop) {
  constexpr int kTogether = 4, kAhead = 8;
  constexpr int64_t kElementBytes = is_float32 ? 4 : 2, kLineBytes = 64;
  const int64_t row = b.kv_heads * b.width, head_bytes = b.width * kElementBytes;
  auto page_at = [&](int64_t column) {
    const int64_t table_page = b.table[y * b.columns + (column < stop ? column : stop - 1)];
    const int64_t last = b.num_pages - 1;
    const int64_t page = table_page < 0 ? 0 : table_page < last ? table_page : last;
    return (const char*)b.extremes + page * 2 * row * kElementBytes;
  };
  for (int64_t column = first; column < stop; column += kTogether) {
    const char *page[kTogether], *next[kTogether];
    for (int p = 0; p < kTogether; p++) {
      page[p] = page_at(column + p);
      next[p] = page_at(column + kAhead + p);
    }
    const int count = stop - column < kTogether ? (int)(stop - column) : kTogether;
    for (int64_t head = 0; head < b.kv_heads; head++) {
      const int64_t smallest = head * b.width, largest = row + smallest;
      for (int p = 0; p < kTogether; p++)
        for (int64_t at : {smallest * kElementBytes, largest * kElementBytes})
          for (int64_t byte = 0; byte < head_bytes; byte += kLineBytes)
            __builtin_prefetch(next[p] + at + byte, 0, 2);
      for (int64_t token = y * b.num_tokens; token < (y + 1) * b.num_tokens; token++) {
        const float* const sums = b.sums_of(token, head);
        Vector total[kTogether];
        for (Vector& page_total : total) page_total = Vector::splat(0);
        by_sixteen(b.width, [&](int64_t i, int size) {
          const Vector positive = Vector::load(sums + i);
          const Vector negative = Vector::load(sums + b.padded_width() + i);
          UNROLL for (int p = 0; p < kTogether; p++) {
            const Vector low = load_elements(page[p], is_float32, smallest + i, size);
            const Vector high = load_elements(page[p], is_float32, largest + i, size);
            total[p] = multiply_add(positive, high, multiply_add(negative, low, total[p]));
          }
        });
        float* const out = b.out + (token * b.kv_heads + head) * b.columns + column;
        for (int p = 0; p < count; p++) out[p] = sum(total[p]);
      }
    }
  }
}

constexpr ridgeline::BoundKernels kBoundKernels = {sum_signs, bound_pages<true>,
                                                   bound_pages<false>};

}  // namespace
