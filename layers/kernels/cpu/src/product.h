// Products with strips: each (row, feature) has one accumulator that goes through the depth in
// order, so a row's bits do not depend on the rows beside it.
#pragma once
#include "kernels.h"
#include "vector.h"

namespace {

using ridgeline::kStrip;
using ridgeline::Product;

// Weights of float32, a row of depth at a time.
struct Float32 {
  using Element = float;
  static constexpr int kStep = 1;
  static constexpr bool kHasScales = false;
  static void load(const Element* strip, int64_t k, Vector (&w)[kStep]) {
    w[0] = Vector::load(strip + k * kStrip);
  }
};

// Weights of bfloat16, two rows of depth at a time, multiplied as float32.
struct Bfloat16 {
  using Element = uint16_t;
  static constexpr int kStep = 2;
  static constexpr bool kHasScales = false;
  static void load(const Element* strip, int64_t k, Vector (&w)[kStep]) {
    Words words[kRegisters];
    UNROLL for (int i = 0; i < kRegisters; i++)
      words[i] = *(const LooseWords*)(strip + k * kStrip + i * 2 * kRegisterLanes);
    w[0] = first_of_pairs(words);
    w[1] = second_of_pairs(words);
  }
};

// Weights of e4m3, as float16's bits 2^-8 of what they are; behind a strip its features' scales.
struct Fp8 {
  using Element = uint8_t;
  static constexpr int kStep = 1;
  static constexpr bool kHasScales = true;
  static void load(const Element* strip, int64_t k, Vector (&w)[kStep]) {
    const Element* p = strip + k * kStrip;
    UNROLL for (int i = 0; i < kRegisters; i++, p += kRegisterLanes) {
#if defined(__AVX512F__)
      const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
      const __m256i bits = _mm256_slli_epi16(wide, 7) & _mm256_set1_epi16((short)0xbfff);
      w[0].part[i] = (Floats)_mm512_cvtph_ps(bits);
#elif defined(__AVX2__)
      const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
      const __m128i bits = _mm_slli_epi16(wide, 7) & _mm_set1_epi16((short)0xbfff);
      w[0].part[i] = (Floats)_mm256_cvtph_ps(bits);
#else
      int32_t four;
      memcpy(&four, p, 4);
      const int16x4_t wide = vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))));
      const uint16x4_t bits = vand_u16(vreinterpret_u16_s16(vshl_n_s16(wide, 7)), vdup_n_u16(0xbfff));
      w[0].part[i] = (Floats)vcvt_f32_f16(vreinterpret_f16_u16(bits));
#endif
    }
  }
};

// Elements of a strip, and its scales if it has some.
template <class Format>
int64_t strip_size(int64_t depth) {
  return depth * kStrip + (Format::kHasScales ? kStrip * 4 : 0);
}

template <class Format, int ROWS, int STRIPS>
void tile(const Product& p, int64_t strip, int64_t row) {
  constexpr int kStep = Format::kStep;
  const int64_t size = strip_size<Format>(p.depth);
  const auto* weights = (const typename Format::Element*)p.strips + strip * size;
  const float* x = (const float*)p.x + row * p.depth;
  float* y = p.y + row * p.y_stride + strip * kStrip;
  Vector sums[ROWS][STRIPS];
  UNROLL for (int r = 0; r < ROWS; r++) UNROLL
    for (int s = 0; s < STRIPS; s++)
      sums[r][s] = p.accumulates ? Vector::load(y + r * p.y_stride + s * kStrip) : Vector::splat(0);
  for (int64_t k = 0; k < p.depth; k += kStep) {
    Vector w[STRIPS][kStep];
    UNROLL for (int s = 0; s < STRIPS; s++) {
      const auto* from = weights + s * size;
      __builtin_prefetch((const char*)(from + k * kStrip) + 2048);
      Format::load(from, k, w[s]);
    }
    UNROLL for (int step = 0; step < kStep; step++) UNROLL
      for (int r = 0; r < ROWS; r++) {
        const Vector factor = Vector::splat(x[r * p.depth + k + step]);
        UNROLL for (int s = 0; s < STRIPS; s++)
          sums[r][s] = multiply_add(w[s][step], factor, sums[r][s]);
      }
  }
  if constexpr (Format::kHasScales) UNROLL
    for (int s = 0; s < STRIPS; s++) {
      const auto* scales = weights + s * size + p.depth * kStrip;
      const Vector d = Vector::load((const float*)scales) * Vector::splat(256);
      UNROLL for (int r = 0; r < ROWS; r++) sums[r][s] = sums[r][s] * d;
    }
  UNROLL for (int r = 0; r < ROWS; r++) UNROLL
    for (int s = 0; s < STRIPS; s++) sums[r][s].store(y + r * p.y_stride + s * kStrip);
}

// Strips that a tile of so many rows has registers for. Where these are few, pairs that are taken
// apart cost some of them.
template <class Format>
constexpr int strips_for(int rows) {
  const int free = kAccumulators - (kAccumulators <= 6 && Format::kStep > 1);
  const int most = free / rows, even = rows == 1 ? 8 : rows == 2 ? 6 : rows <= 4 ? 4 : 2;
  return most < 1 ? 1 : most < even ? most : even;
}

constexpr int kMostRows = kAccumulators > 12 ? 12 : kAccumulators;

// All strips for ROWS rows.
template <class Format, int ROWS>
void tiles(const Product& p, int64_t strip, int64_t stop, int64_t row) {
  constexpr int kStrips = strips_for<Format>(ROWS);
  for (; strip + kStrips <= stop; strip += kStrips) tile<Format, ROWS, kStrips>(p, strip, row);
  for (; strip < stop; strip++) tile<Format, ROWS, 1>(p, strip, row);
}

template <class Format, int ROWS = kMostRows>
void tiles_of(int rows, const Product& p, int64_t strip, int64_t stop, int64_t row) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return tiles_of<Format, ROWS - 1>(rows, p, strip, stop, row);
  tiles<Format, ROWS>(p, strip, stop, row);
}

// `Multiplier::multiply`: rows in equal groups, a few strips at a time while they are in the cache.
template <class Format>
void multiply(const Product& p) {
  const int64_t groups = (p.num_rows + kMostRows - 1) / kMostRows;
  const int64_t together = groups == 1 ? p.num_strips : strips_for<Format>(kMostRows);
  for (int64_t strip = 0; strip < p.num_strips; strip += together) {
    const int64_t stop = strip + together < p.num_strips ? strip + together : p.num_strips;
    for (int64_t g = 0; g < groups; g++) {
      const int64_t row = p.num_rows * g / groups, end = p.num_rows * (g + 1) / groups;
      tiles_of<Format>((int)(end - row), p, strip, stop, row);
    }
  }
}

// `Multiplier::put`.
template <class Arithmetic>
void put(const void* row, bool is_float32, int64_t size, int64_t depth, void* out, int64_t index) {
  auto* x = (typename Arithmetic::Activation*)out + index * depth;
  auto load = [&](int64_t k) {
    return is_float32 ? Vector::load((const float*)row + k) : widen((const uint16_t*)row + k);
  };
  int64_t k = 0;
  for (; k + kLanes <= size; k += kLanes) Arithmetic::put(load(k), x + k);
  if (k < size) {
    const int64_t bytes = is_float32 ? 4 : 2;
    char rest[kLanes * 4] = {};
    memcpy(rest, (const char*)row + k * bytes, (size - k) * bytes);
    Arithmetic::put(is_float32 ? Vector::load((const float*)rest) : widen((const uint16_t*)rest),
                    x + k);
    k += kLanes;
  }
  memset(x + k, 0, (depth - k) * sizeof(*x));
}

// Arithmetic in float32, as attention.h takes it.
template <class Format>
struct InFloat32 {
  using Element = typename Format::Element;
  using Activation = float;
  struct Session {};
  static void put(const Vector& v, float* x) { v.store(x); }
  static void multiply(const Product& p) { ::multiply<Format>(p); }
};

}  // namespace
