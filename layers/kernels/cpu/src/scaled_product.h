// Products of floats of few bits whose groups have scales (blocks.h: fp8_block, mxfp8, nvfp4). Each
// number meets its scale first, rounded to float32 as a matrix of float32 would hold it, then its
// activation in float32: a product has the bits of that matrix's (product.h).
#pragma once
#include "block_formats.h"
#include "blocks.h"
#include "product.h"
#include "tiles.h"
#include "vector.h"

namespace {

// Each format: numbers of kStep rows of depth, and what those of kGroup rows are multiplied with,
// the group being counted along the strip's depth.
struct Fp8Block {
  static constexpr BlockLayout kLayout = ridgeline::kFp8Block;
  static constexpr int kStep = Fp8::kStep, kGroup = 128;
  static void load(const uint8_t* row, Vector (&w)[kStep]) { Fp8::load(row, w); }
  static Vector scale(const uint8_t* scales, int64_t group) {
    float d;
    memcpy(&d, scales + 4 * group, 4);
    return Vector::splat(d * 256);
  }
};

struct Mxfp8 {
  static constexpr BlockLayout kLayout = ridgeline::kMxfp8;
  static constexpr int kStep = Fp8::kStep, kGroup = 32;
  static void load(const uint8_t* row, Vector (&w)[kStep]) { Fp8::load(row, w); }
  static Vector scale(const uint8_t* scales, int64_t group) {
    Vector d;
    UNROLL for (int i = 0; i < kRegisters; i++) {
      const Ints e = words_of<uint8_t>(scales + group * kStrip + i * kRegisterLanes) + 8;
      d.part[i] = (Floats)(e << 23);  // 2^8 of it, as numbers are 2^-8
    }
    return d;
  }
};

struct Nvfp4 {
  static constexpr BlockLayout kLayout = ridgeline::kNvfp4;
  static constexpr int kStep = 2, kGroup = 16;
  static void load(const uint8_t* row, Vector (&w)[kStep]) {
    UNROLL for (int i = 0; i < kRegisters; i++) {
      const Ints codes = words_of<uint8_t>(row + i * kRegisterLanes);
      w[0].part[i] = number(codes);
      w[1].part[i] = number(codes >> 4);
    }
  }
  // Behind the row's scales, of a half of 32 each.
  static Vector scale(const uint8_t* scales, int64_t group) {
    Vector e4m3[Fp8::kStep];
    Fp8::load(scales + kStrip * (4 + group), e4m3);
    return e4m3[0] * (Vector::load((const float*)scales) * Vector::splat(256));
  }

 private:
  // What the lowest four bits stand for.
  static Floats number(Ints codes) {
#if defined(__AVX512F__)
    const __m512 table = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3,
                                        -4, -6);
    return (Floats)_mm512_permutexvar_ps((__m512i)codes, table);
#elif defined(__AVX2__)
    const __m256 table = _mm256_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6);
    const auto size = (Ints)_mm256_permutevar8x32_ps(table, (__m256i)codes);
    return (Floats)(size | (codes & 8) << 28);
#else
    // Exponent and mantissa move into a float's; without an exponent the mantissa counts a half.
    const Ints size = codes & 7;
    const Floats small = (Floats)((size << 22) + (127 << 23)) - 1.f;
    const Floats usual = (Floats)((size << 22) + (126 << 23));
    return (Floats)((Ints)(size < 2 ? small : usual) | (codes & 8) << 28);
#endif
  }
};

// Tiles in float32 (tiles.h).
template <class Format>
struct ScaledTiles {
  using Element = uint8_t;
  static constexpr int kMostRows = FloatTiles<Fp8>::kMostRows, kRows = kMostRows;
  static constexpr int64_t kDepth = 2048;
  static constexpr bool kFetchesNext = false;
  static constexpr int64_t kRowBytes = kStrip * Format::kLayout.bits / 8;

  static int64_t strip_bytes(int64_t depth) { return Format::kLayout.strip_bytes(depth); }
  static constexpr int strips(int rows) { return float_strips(rows, 2); }

  template <int ROWS, int STRIPS>
  static void tile(const Product& p, const Part& part) {
    constexpr int kStep = Format::kStep;
    const Start<ScaledTiles, float> at(p, part);
    Vector sums[ROWS][STRIPS];
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL
      for (int s = 0; s < STRIPS; s++)
        sums[r][s] = at.continues ? Vector::load(at.y + r * p.y_stride + s * kStrip)
                                     : Vector::splat(0);
    Rows<float, ROWS> x(at.x, p.x_stride());
    for (int64_t start = 0; start < part.size; start += Format::kGroup) {
      const int64_t stop = least(start + Format::kGroup, part.size);
      Vector scale[STRIPS];
      UNROLL for (int s = 0; s < STRIPS; s++)
        scale[s] = Format::scale(at.weights(s, p.depth - part.start),
                                 (part.start + start) / Format::kGroup);
      for (int64_t k = start; k < stop; k += kTogether, x.advance()) {
        at.template fetch<STRIPS>(part, k);
        UNROLL for (int first = 0; first < kTogether; first += kStep) {
          Vector w[STRIPS][kStep];
          UNROLL for (int s = 0; s < STRIPS; s++) {
            Format::load(at.weights(s, k + first), w[s]);
            UNROLL for (auto& of_step : w[s]) of_step = of_step * scale[s];
          }
          UNROLL for (int step = 0; step < kStep; step++) UNROLL
            for (int r = 0; r < ROWS; r++) {
              const Vector factor = Vector::splat(*x.at(r, first + step));
              UNROLL for (int s = 0; s < STRIPS; s++)
                sums[r][s] = multiply_add(w[s][step], factor, sums[r][s]);
            }
        }
      }
    }
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL
      for (int s = 0; s < STRIPS; s++) sums[r][s].store(at.y + r * p.y_stride + s * kStrip);
  }
};

template <class Format>
constexpr ridgeline::Multiplier scaled_multiplier() {
  return {ridgeline::Activations::kFloat32, put<InFloat32<Float32>>,
          multiply_by_tiles<ScaledTiles<Format>>};
}

}  // namespace
