// Products in float32, and what puts activations where products take them.
#pragma once
#include "kernels.h"
#include "tiles.h"
#include "vector.h"

namespace {

// Weights of float32, a row of depth at a time.
struct Float32 {
  using Element = float;
  static constexpr int kStep = 1;
  static constexpr bool kHasScales = false;
  static void load(const Element* row, Vector (&w)[kStep]) {
    w[0] = Vector::load(row);
  }
};

// Weights of bfloat16, two rows of depth at a time, multiplied as float32.
struct Bfloat16 {
  using Element = uint16_t;
  static constexpr int kStep = 2;
  static constexpr bool kHasScales = false;
  static void load(const Element* row, Vector (&w)[kStep]) {
    Words words[kRegisters];
    UNROLL for (int i = 0; i < kRegisters; i++)
      words[i] = *(const LooseWords*)(row + i * 2 * kRegisterLanes);
    w[0] = first_of_pairs(words);
    w[1] = second_of_pairs(words);
  }
};

// Weights of e4m3, as float16's bits 2^-8 of what they are; behind a strip its features' scales.
struct Fp8 {
  using Element = uint8_t;
  static constexpr int kStep = 1;
  static constexpr bool kHasScales = true;
  static void load(const Element* row, Vector (&w)[kStep]) {
    const Element* p = row;
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

// Strips of a tile of so many rows in float32: as many as there are registers for. Where these are
// few, rows of depth that are taken apart, `step` at a time, cost some of them.
constexpr int float_strips(int rows, int step) {
  const int free = kAccumulators - (kAccumulators <= 6 && step > 1);
  const int fitting = free / rows, even = rows <= 2 ? 8 : rows <= 4 ? 4 : 2;
  int strips = 1;
  while (2 * strips <= fitting && 2 * strips <= even) strips *= 2;
  return strips;
}

// Tiles in float32 (tiles.h).
template <class Format>
struct FloatTiles {
  using Element = typename Format::Element;
  static constexpr int kMostRows = kAccumulators > 12 ? 12 : kAccumulators, kRows = kMostRows;
  static constexpr int64_t kDepth = 2048;
  static constexpr bool kFetchesNext = false;  // it would delay the rows that tiles read

  static constexpr int64_t kRowBytes = kStrip * sizeof(Element);

  static int64_t strip_bytes(int64_t depth) {
    return depth * kRowBytes + (Format::kHasScales ? kStrip * sizeof(float) : 0);
  }
  static constexpr int strips(int rows) { return float_strips(rows, Format::kStep); }

  template <int ROWS, int STRIPS>
  static void tile(const Product& p, const Part& part) {
    constexpr int kStep = Format::kStep;
    const Start<FloatTiles, float> at(p, part);
    Vector sums[ROWS][STRIPS];
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL
      for (int s = 0; s < STRIPS; s++)
        sums[r][s] = at.continues ? Vector::load(at.y + r * p.y_stride + s * kStrip)
                                     : Vector::splat(0);
    Rows<float, ROWS> x(at.x, p.x_stride());
    for (int64_t k = 0; k < part.size; k += kTogether, x.advance()) {
      at.template fetch<STRIPS>(part, k);
      UNROLL for (int first = 0; first < kTogether; first += kStep) {
        Vector w[STRIPS][kStep];
        UNROLL for (int s = 0; s < STRIPS; s++) Format::load(at.weights(s, k + first), w[s]);
        UNROLL for (int step = 0; step < kStep; step++) UNROLL
          for (int r = 0; r < ROWS; r++) {
            const Vector factor = Vector::splat(*x.at(r, first + step));
            UNROLL for (int s = 0; s < STRIPS; s++)
              sums[r][s] = multiply_add(w[s][step], factor, sums[r][s]);
          }
      }
    }
    if constexpr (Format::kHasScales)
      if (part.start + part.size == p.depth) UNROLL
        for (int s = 0; s < STRIPS; s++) {
          const Vector scale =
              Vector::load((const float*)at.weights(s, part.size)) * Vector::splat(256);
          UNROLL for (int r = 0; r < ROWS; r++) sums[r][s] = sums[r][s] * scale;
        }
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL
      for (int s = 0; s < STRIPS; s++) sums[r][s].store(at.y + r * p.y_stride + s * kStrip);
  }
};

// `Multiplier::multiply`.
template <class Format>
void multiply(const Product& p) {
  multiply_by_tiles<FloatTiles<Format>>(p);
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
    alignas(64) char tail[kLanes * 4] = {};
    memcpy(tail, (const char*)row + k * bytes, (size - k) * bytes);
    Arithmetic::put(is_float32 ? Vector::load((const float*)tail) : widen((const uint16_t*)tail),
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
  static constexpr int64_t kNearRows = 48;  // whole tiles, of 6 or of 12 rows
  static void put(const Vector& v, float* x) { v.store(x); }
  static void put(const Vector& a, const Vector& b, float* x) {
    a.store(x);
    b.store(x + kLanes);
  }
  static void multiply(const Product& p) { ::multiply<Format>(p); }
};

}  // namespace
