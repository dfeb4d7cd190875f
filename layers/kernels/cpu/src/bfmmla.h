// Tiles of pairs.h by AArch64's BF16: `bfmmla` multiplies two rows by two features, four of depth,
// `bfdot` one row by four features, two of depth. The architecture defines both by one step, which
// adds the sum of a pair's products to an accumulator of float32. Both sums are rounded to odd, and
// denormal numbers count as 0. `bfmmla` takes two such steps in the order of depth, so that a row
// has the same bits by either. (FPCR.EBF, which rounds otherwise, is 0 in a process that does not
// set it.)
#pragma once
#include "pairs.h"

namespace {

struct Bfmmla {
  // Registers hold 24 accumulators, three pairs of rows' activations and the weights at hand.
  using Element = uint16_t;
  static constexpr int kMostRows = 6, kRows = 6;
  static constexpr int64_t kDepth = 2048;
  static constexpr bool kFetchesNext = true;

  static constexpr int64_t kRowBytes = kStrip * sizeof(Element);
  static int64_t strip_bytes(int64_t depth) { return depth * kRowBytes; }
  static constexpr int strips(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

  template <int ROWS, int STRIPS>
  static void tile(const Product& p, const Part& part) {
    if constexpr (ROWS == 1)
      one_row<STRIPS>(p, part);
    else
      rows<ROWS, STRIPS>(p, part);
  }

 private:
  static constexpr int kQuads = kStrip / 4;   // of features

  static bfloat16x8_t load(const uint16_t* p) { return vreinterpretq_bf16_u16(vld1q_u16(p)); }

  template <int STRIPS>
  static void one_row(const Product& p, const Part& part) {
    const Start<Bfmmla, uint16_t> at(p, part);
    float32x4_t sums[STRIPS][kQuads];
    UNROLL for (int s = 0; s < STRIPS; s++) UNROLL
      for (int q = 0; q < kQuads; q++)
        sums[s][q] = at.continues ? vld1q_f32(at.y + s * kStrip + 4 * q) : vdupq_n_f32(0);
    for (int64_t k = 0; k < part.size; k += 2) {
      if (k % kTogether == 0) at.template fetch<STRIPS>(part, k);
      uint32_t pair;
      memcpy(&pair, at.x + k, sizeof pair);
      const auto factor = vreinterpretq_bf16_u32(vdupq_n_u32(pair));
      UNROLL for (int s = 0; s < STRIPS; s++) {
        const uint16_t* const w = at.weights(s, k);
        UNROLL for (int q = 0; q < kQuads; q++)
          sums[s][q] = vbfdotq_f32(sums[s][q], load(w + 8 * q), factor);
      }
    }
    UNROLL for (int s = 0; s < STRIPS; s++) UNROLL
      for (int q = 0; q < kQuads; q++) vst1q_f32(at.y + s * kStrip + 4 * q, sums[s][q]);
  }

  // Of an odd number of rows the last is multiplied twice.
  template <int ROWS, int STRIPS>
  static void rows(const Product& p, const Part& part) {
    constexpr int kPairs = (ROWS + 1) / 2;
    const Start<Bfmmla, uint16_t> at(p, part);
    const auto second_row = [](int pair) { return 2 * pair + (2 * pair + 1 < ROWS); };
    // Of two rows and two features each: f0 and f1 of the first row, then of the second.
    float32x4_t sums[kPairs][STRIPS][kQuads][2];
    UNROLL for (int r = 0; r < kPairs; r++) UNROLL
      for (int s = 0; s < STRIPS; s++) UNROLL
        for (int q = 0; q < kQuads; q++) {
          const int64_t place = s * kStrip + 4 * q;
          const auto before = [&](int row) {
            return vreinterpretq_f64_f32(at.continues ? vld1q_f32(at.y + row * p.y_stride + place)
                                                      : vdupq_n_f32(0));
          };
          const float64x2_t a = before(2 * r), b = before(second_row(r));
          sums[r][s][q][0] = vreinterpretq_f32_f64(vzip1q_f64(a, b));
          sums[r][s][q][1] = vreinterpretq_f32_f64(vzip2q_f64(a, b));
        }
    for (int64_t k = 0; k < part.size; k += 4) {
      at.template fetch<STRIPS>(part, k);
      bfloat16x8_t x[kPairs];
      UNROLL for (int r = 0; r < kPairs; r++)
        x[r] = vreinterpretq_bf16_u16(vcombine_u16(vld1_u16(at.x + 2 * r * p.x_stride() + k),
                                                   vld1_u16(at.x + second_row(r) * p.x_stride() + k)));
      UNROLL for (int s = 0; s < STRIPS; s++) {
        const uint16_t* const w = at.weights(s, k);
        UNROLL for (int q = 0; q < kQuads; q++) {
          const uint32x4_t first = vreinterpretq_u32_u16(vld1q_u16(w + 8 * q));
          const uint32x4_t second = vreinterpretq_u32_u16(vld1q_u16(w + 2 * kStrip + 8 * q));
          const auto low = vreinterpretq_bf16_u32(vzip1q_u32(first, second));
          const auto high = vreinterpretq_bf16_u32(vzip2q_u32(first, second));
          UNROLL for (int r = 0; r < kPairs; r++) {
            sums[r][s][q][0] = vbfmmlaq_f32(sums[r][s][q][0], x[r], low);
            sums[r][s][q][1] = vbfmmlaq_f32(sums[r][s][q][1], x[r], high);
          }
        }
      }
    }
    UNROLL for (int r = 0; r < kPairs; r++) UNROLL
      for (int s = 0; s < STRIPS; s++) UNROLL
        for (int q = 0; q < kQuads; q++) {
          const float64x2_t a = vreinterpretq_f64_f32(sums[r][s][q][0]);
          const float64x2_t b = vreinterpretq_f64_f32(sums[r][s][q][1]);
          float* const y = at.y + s * kStrip + 4 * q;
          vst1q_f32(y + 2 * r * p.y_stride, vreinterpretq_f32_f64(vzip1q_f64(a, b)));
          if (2 * r + 1 < ROWS)
            vst1q_f32(y + (2 * r + 1) * p.y_stride, vreinterpretq_f32_f64(vzip2q_f64(a, b)));
        }
  }
};

}  // namespace
