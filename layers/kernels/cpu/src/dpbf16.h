// Tiles of pairs.h by AVX512_BF16: one instruction multiplies two neighbors in depth by two. It
// adds the second product to an accumulator of float32, then the first, each rounded to even;
// denormal numbers count as 0.
#pragma once
#include "pairs.h"

namespace {

struct Dpbf16 {
  using Element = uint16_t;
  // Where rows lie a multiple of 4 KB apart, a cache of eight ways holds no more of them side by
  // side.
  static constexpr int kMostRows = 8, kRows = 6;
  static constexpr int64_t kDepth = 2048;
  static constexpr bool kFetchesNext = true;

  static constexpr int64_t kRowBytes = kStrip * sizeof(Element);
  static int64_t strip_bytes(int64_t depth) { return depth * kRowBytes; }
  // Accumulators enough to hide the instruction's latency, few enough to leave registers for the
  // weights.
  static constexpr int strips(int rows) { return rows <= 2 ? 8 : rows <= 6 ? 4 : 2; }

  template <int ROWS, int STRIPS>
  static void tile(const Product& p, const Part& part) {
    const Start<Dpbf16, uint16_t> at(p, part);
    __m512 sums[ROWS][STRIPS];
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL
      for (int s = 0; s < STRIPS; s++)
        sums[r][s] = at.continues ? _mm512_loadu_ps(at.y + r * p.y_stride + s * kStrip) : __m512{};
    Rows<uint16_t, ROWS> x(at.x, p.x_stride());
    for (int64_t k = 0; k < part.size; k += kTogether, x.advance()) {
      at.template fetch<STRIPS>(part, k);
      UNROLL for (int first = 0; first < kTogether; first += 2) {
        __m512bh w[STRIPS];
        UNROLL for (int s = 0; s < STRIPS; s++)
          w[s] = (__m512bh)_mm512_loadu_si512(at.weights(s, k + first));
        UNROLL for (int r = 0; r < ROWS; r++) {
          int32_t pair;
          memcpy(&pair, x.at(r, first), sizeof pair);
          const auto factor = (__m512bh)_mm512_set1_epi32(pair);
          UNROLL for (int s = 0; s < STRIPS; s++)
            sums[r][s] = _mm512_dpbf16_ps(sums[r][s], w[s], factor);
        }
      }
    }
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL
      for (int s = 0; s < STRIPS; s++)
        _mm512_storeu_ps(at.y + r * p.y_stride + s * kStrip, sums[r][s]);
  }
};

}  // namespace
