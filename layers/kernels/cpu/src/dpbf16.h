// Tiles of pairs.h by AVX512_BF16: one instruction multiplies two neighbors in depth by two. It
// adds the second product to an accumulator of float32, then the first, each rounded to even;
// denormal numbers count as 0.
#pragma once
#include "pairs.h"

namespace {

struct Dpbf16 {
  // Where rows lie a multiple of 4 KB apart, a cache of eight ways holds no more of them side by
  // side.
  static constexpr int kMostRows = 8, kRows = 6;
  // Accumulators enough to hide the instruction's latency, few enough to leave registers for the
  // weights.
  static constexpr int strips(int rows) { return rows <= 2 ? 8 : rows <= 6 ? 4 : 2; }

  template <int ROWS, int STRIPS>
  static void tile(const Product& p, const PairPart& part) {
    constexpr int64_t kAhead = 2 << 10;  // bytes
    const PairStart at(p, part);
    __m512 sums[ROWS][STRIPS];
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL
      for (int s = 0; s < STRIPS; s++)
        sums[r][s] = at.continues ? _mm512_loadu_ps(at.y + r * p.y_stride + s * kStrip) : __m512{};
    for (int64_t k = 0; k < part.size; k += 2) {
      // The tile has the strip behind this one, too: near the end the next tile's strips are due.
      const int64_t remaining = (part.size - k) * kStrip * 2;
      const char* const due = (const char*)(at.weights + k * kStrip) + kAhead +
                              (remaining <= kAhead ? (STRIPS - 1) * at.strip_size * 2 : 0);
      for (int64_t s = 0; s < part.num_next; s++)
        _mm_prefetch((const char*)(part.next + s * at.strip_size + k * kStrip), _MM_HINT_T1);
      __m512bh w[STRIPS];
      UNROLL for (int s = 0; s < STRIPS; s++) {
        _mm_prefetch(due + s * at.strip_size * 2, _MM_HINT_T0);
        w[s] = (__m512bh)_mm512_loadu_si512(at.weights + s * at.strip_size + k * kStrip);
      }
      UNROLL for (int r = 0; r < ROWS; r++) {
        int32_t pair;
        memcpy(&pair, at.x + r * p.depth + k, sizeof pair);
        const auto factor = (__m512bh)_mm512_set1_epi32(pair);
        UNROLL for (int s = 0; s < STRIPS; s++)
          sums[r][s] = _mm512_dpbf16_ps(sums[r][s], w[s], factor);
      }
    }
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL
      for (int s = 0; s < STRIPS; s++)
        _mm512_storeu_ps(at.y + r * p.y_stride + s * kStrip, sums[r][s]);
  }
};

}  // namespace
