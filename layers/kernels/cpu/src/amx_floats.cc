// Floats of few bits beside activations of bfloat16, by the matrix unit: they are unpacked to
// bfloat16, which holds them exactly, a part of their depth at a time, and multiplied as its
// weights are (amx.cc). A few rows go without the unit, in its order of sums. A scale that bfloat16
// would round multiplies sums: block FP8's those of its 128 of depth, NVFP4's of a row the whole
// sum. MXFP8's, and NVFP4's of a group, belong to the numbers.
#include "scaled_product.h"
#include "scratch.h"

namespace {

using ridgeline::kBfloat16Amx;
using ridgeline::kDepth;

// Numbers of e4m3 without their signs, as bfloat16's bits: the lower bytes, then the upper ones.
struct Numbers {
  alignas(64) uint8_t lower[128] = {}, upper[128] = {};

  constexpr Numbers() {
    for (int code = 0; code < 128; code++) {
      int exponent = code >> 3, mantissa = code & 7;
      if (exponent == 0) {
        exponent = mantissa ? 1 : -120;
        while (mantissa && mantissa < 8) {
          mantissa *= 2;
          exponent--;
        }
      }
      const int bits = code == 127 ? 0x7fc0 : (exponent + 120) << 7 | (mantissa & 7) << 4;
      lower[code] = (uint8_t)(bits & 255);
      upper[code] = (uint8_t)(bits >> 8);
    }
  }
};
constexpr Numbers kNumbers;

// Of four rows of depth, sixteen features each, bytes in the order in which `unpack_four` makes
// pairs of them: in 16 of them four features' first two rows, then their other two.
struct Order {
  alignas(64) uint8_t from[64] = {};

  constexpr Order() {
    for (int i = 0; i < 64; i++) {
      const int feature = i / 16 * 4 + i % 8 / 2, row = i % 16 / 8 * 2 + i % 2;
      from[i] = (uint8_t)(row * 16 + feature);
    }
  }
};
constexpr Order kOrder;

// Four rows of depth of e4m3 as two rows of pairs.
inline void unpack_four(const uint8_t* from, __m512i& first, __m512i& second) {
  auto load = [](const uint8_t* p) { return _mm512_load_si512(p); };
  const __m512i codes =
      _mm512_permutexvar_epi8(load(kOrder.from), _mm512_loadu_si512(from));
  const __m512i lower =
      _mm512_permutex2var_epi8(load(kNumbers.lower), codes, load(kNumbers.lower + 64));
  const __m512i size =
      _mm512_permutex2var_epi8(load(kNumbers.upper), codes, load(kNumbers.upper + 64));
  constexpr int kOrOfAnd = 0xf8;  // size | (codes & signs)
  const __m512i upper =
      _mm512_ternarylogic_epi32(size, codes, _mm512_set1_epi8((char)0x80), kOrOfAnd);
  first = _mm512_unpacklo_epi8(lower, upper);
  second = _mm512_unpackhi_epi8(lower, upper);
}

// The first of pairs, and the second.
inline Floats first_of(__m512i pairs) { return (Floats)_mm512_slli_epi32(pairs, 16); }
inline Floats second_of(__m512i pairs) {
  return (Floats)_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000));
}

// Two rows of depth as a row of pairs: of what bfloat16 holds exactly.
inline __m512i pair(Floats first, Floats second) {
  constexpr int kOrOfAnd = 0xf8;
  return _mm512_ternarylogic_epi32(_mm512_srli_epi32((__m512i)first, 16), (__m512i)second,
                                   _mm512_set1_epi32((int)0xffff0000), kOrOfAnd);
}

inline void fetch(const uint8_t* p) { __builtin_prefetch(p + (4 << 10)); }

// Each format: four rows of a strip's depth as floats, with what a group's numbers are multiplied
// with before (kGroup of them); some rows in pairs; what their sums are multiplied with, of a part
// of the depth (kPart) or of all of it.
inline void widen_four(const uint8_t* from, Floats (&w)[4]) {
  __m512i first, second;
  unpack_four(from, first, second);
  w[0] = first_of(first);
  w[1] = second_of(first);
  w[2] = first_of(second);
  w[3] = second_of(second);
}

struct UnpackedFp8Block : Fp8Block {
  static constexpr int64_t kPart = kGroup;
  static constexpr bool kScalesParts = true, kScalesRows = false;
  static Floats group_factor(const uint8_t*, int64_t) { return Floats{}; }
  static void four(const uint8_t* from, Floats, Floats (&w)[4]) { widen_four(from, w); }
  static void unpack(const uint8_t* from, const uint8_t*, int64_t, int64_t size, uint16_t* to) {
    for (int64_t k = 0; k < size; k += 4) {
      fetch(from + k * kStrip);
      __m512i first, second;
      unpack_four(from + k * kStrip, first, second);
      _mm512_store_si512(to + k * kStrip, first);
      _mm512_store_si512(to + (k + 2) * kStrip, second);
    }
  }
  static Vector factor(const uint8_t* scales, int64_t start) {
    float d;
    memcpy(&d, scales + 4 * (start / kGroup), 4);
    return Vector::splat(d);
  }
};

// What has its scales before it is multiplied.
template <class Format>
void unpack_scaled(const uint8_t* from, const uint8_t* scales, int64_t start, int64_t size,
                   uint16_t* to) {
  constexpr int64_t kRowBytes = kStrip * Format::kLayout.bits / 8;
  for (int64_t k = 0; k < size; k += Format::kGroup) {
    const Floats factor = Format::group_factor(scales, (start + k) / Format::kGroup);
    for (int64_t row = k; row < k + Format::kGroup; row += 4) {
      fetch(from + row * kRowBytes);
      Floats w[4];
      Format::four(from + row * kRowBytes, factor, w);
      _mm512_store_si512(to + row * kStrip, pair(w[0], w[1]));
      _mm512_store_si512(to + (row + 2) * kStrip, pair(w[2], w[3]));
    }
  }
}

struct UnpackedMxfp8 : Mxfp8 {
  static constexpr int64_t kPart = 256;
  static constexpr bool kScalesParts = false, kScalesRows = false;
  static Floats group_factor(const uint8_t* scales, int64_t group) {
    return scale(scales, group).part[0] * (1 / 256.f);
  }
  static void four(const uint8_t* from, Floats factor, Floats (&w)[4]) {
    widen_four(from, w);
    UNROLL for (auto& number : w) number = number * factor;
  }
  static constexpr auto unpack = unpack_scaled<UnpackedMxfp8>;
  static Vector factor(const uint8_t*, int64_t) { return Vector::splat(1); }
};

struct UnpackedNvfp4 : Nvfp4 {
  static constexpr int64_t kPart = 256;
  static constexpr bool kScalesParts = false, kScalesRows = true;
  static Floats group_factor(const uint8_t* scales, int64_t group) {
    Vector d[Fp8::kStep];
    Fp8::load(scales + kStrip * (4 + group), d);
    return d[0].part[0] * 256.f;
  }
  static void four(const uint8_t* from, Floats factor, Floats (&w)[4]) {
    UNROLL for (int i = 0; i < 2; i++) {
      Vector two[kStep];
      load(from + i * kStrip, two);
      w[2 * i] = two[0].part[0] * factor;
      w[2 * i + 1] = two[1].part[0] * factor;
    }
  }
  static constexpr auto unpack = unpack_scaled<UnpackedNvfp4>;
  static Vector factor(const uint8_t* scales, int64_t) {
    return Vector::load((const float*)scales);
  }
};

// Some strips for a few rows, whose activations are there in float32, `x_stride` apart. As the
// matrix unit sums (Intel's manual, TDPBF16PS): of 32 of depth the products of even places by
// themselves and those of odd ones, both together, and that to what was there.
template <class Format, int ROWS, int STRIPS>
void few_rows(const Product& p, const float* x, int64_t x_stride, int64_t row, int64_t strip) {
  constexpr auto kLayout = Format::kLayout;
  constexpr int64_t kRowBytes = kStrip * kLayout.bits / 8;
  const int64_t strip_bytes = kLayout.strip_bytes(p.depth);
  const auto* const first = (const uint8_t*)p.strips + strip * strip_bytes;
  const uint8_t* const scales = first + p.depth * kRowBytes;
  float* const y = p.y + row * p.y_stride + strip * kStrip;
  Floats totals[ROWS][STRIPS] = {}, results[ROWS][STRIPS] = {};
  for (int64_t start = 0; start < p.depth; start += kDepth) {
    Floats even[ROWS][STRIPS] = {}, odd[ROWS][STRIPS] = {}, factors[STRIPS];
    UNROLL for (int k = 0; k < kDepth; k += 4) {
      if (k % Format::kGroup == 0) UNROLL
        for (int s = 0; s < STRIPS; s++)
          factors[s] = Format::group_factor(scales + s * strip_bytes, (start + k) / Format::kGroup);
      UNROLL for (int s = 0; s < STRIPS; s++) {
        const uint8_t* const from = first + s * strip_bytes + (start + k) * kRowBytes;
        fetch(from);
        Floats w[4];
        Format::four(from, factors[s], w);
        UNROLL for (int r = 0; r < ROWS; r++) {
          const float* const at = x + (row + r) * x_stride + start + k;
          UNROLL for (int i = 0; i < 4; i += 2) {
            even[r][s] = multiply_add(w[i], Vector::splat(at[i]).part[0], even[r][s]);
            odd[r][s] = multiply_add(w[i + 1], Vector::splat(at[i + 1]).part[0], odd[r][s]);
          }
        }
      }
    }
    const bool ends = start + kDepth == p.depth || (start + kDepth) % Format::kPart == 0;
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL
      for (int s = 0; s < STRIPS; s++) {
        totals[r][s] += even[r][s] + odd[r][s];
        if (!Format::kScalesParts || !ends) continue;
        const Floats d = Format::factor(scales + s * strip_bytes, start).part[0];
        results[r][s] = start < Format::kPart ? totals[r][s] * d
                                              : multiply_add(totals[r][s], d, results[r][s]);
        totals[r][s] = Floats{};
      }
  }
  UNROLL for (int r = 0; r < ROWS; r++) UNROLL
    for (int s = 0; s < STRIPS; s++) {
      Floats sum = Format::kScalesParts ? results[r][s] : totals[r][s];
      if (Format::kScalesRows) sum *= Format::factor(scales + s * strip_bytes, 0).part[0];
      *(LooseFloats*)(y + r * p.y_stride + s * kStrip) = sum;
    }
}

template <class Format, int ROWS, int STRIPS>
void all_strips(const Product& p, const float* x, int64_t x_stride, int64_t row) {
  int64_t strip = 0;
  for (; strip + STRIPS <= p.num_strips; strip += STRIPS)
    few_rows<Format, ROWS, STRIPS>(p, x, x_stride, row, strip);
  for (; strip < p.num_strips; strip++) few_rows<Format, ROWS, 1>(p, x, x_stride, row, strip);
}

constexpr int64_t kFewRows = 4;  // more are multiplied faster by the unit

// y (+)= factors x sums, of each strip.
void scale(const Product& p, const float* sums, int64_t stride, bool accumulates,
           const Vector* factors) {
  for (int64_t row = 0; row < p.num_rows; row++)
    for (int64_t s = 0; s < p.num_strips; s++) {
      float* const y = p.y + row * p.y_stride + s * kStrip;
      const Vector sum = Vector::load(sums + row * stride + s * kStrip);
      (accumulates ? multiply_add(sum, factors[s], Vector::load(y)) : sum * factors[s]).store(y);
    }
}

constexpr int64_t kTogetherStrips = 8;  // whose parts the first cache nearly holds

// Some strips for all rows.
template <class Format>
void multiply_strips(const Product& p, const uint8_t* strips, uint16_t* unpacked, float* sums) {
  constexpr auto kLayout = Format::kLayout;
  const int64_t strip_bytes = kLayout.strip_bytes(p.depth);
  const int64_t row_bytes = kStrip * kLayout.bits / 8;
  const int64_t stride = Format::kScalesParts ? p.num_strips * kStrip : p.y_stride;
  Vector factors[kTogetherStrips];
  for (int64_t start = 0; start < p.depth; start += Format::kPart) {
    const int64_t size = least(Format::kPart, p.depth - start);
    for (int64_t s = 0; s < p.num_strips; s++) {
      const uint8_t* const strip = strips + s * strip_bytes;
      const uint8_t* const scales = strip + p.depth * row_bytes;
      Format::unpack(strip + start * row_bytes, scales, start, size, unpacked + s * size * kStrip);
      factors[s] = Format::factor(scales, start);
    }
    Product part = p;
    part.strips = unpacked;
    part.depth = size;
    part.x = (const uint16_t*)p.x + start;
    part.x_padding = p.x_stride() - size;
    part.is_far = part.y_is_far = false;
    part.accumulates = !Format::kScalesParts && start;
    part.y = Format::kScalesParts ? sums : p.y;
    part.y_stride = stride;
    kBfloat16Amx.multiplier.multiply(part);
    if constexpr (Format::kScalesParts) scale(p, sums, stride, start, factors);
  }
  if constexpr (Format::kScalesRows) scale(p, p.y, p.y_stride, false, factors);
}

// `Multiplier::multiply`.
template <class Format>
void multiply_unpacked(const Product& p) {
  static thread_local Scratch scratch;
  if (p.num_rows <= kFewRows) {
    auto* const x = (float*)scratch.reserve(p.num_rows * p.depth * sizeof(float));
    for (int64_t row = 0; row < p.num_rows; row++)
      for (int64_t k = 0; k < p.depth; k += kLanes)
        widen((const uint16_t*)p.x + row * p.x_stride() + k).store(x + row * p.depth + k);
    if (p.num_rows == 4) return all_strips<Format, 4, 2>(p, x, p.depth, 0);
    if (p.num_rows >= 2) all_strips<Format, 2, 4>(p, x, p.depth, 0);
    if (p.num_rows % 2) all_strips<Format, 1, 4>(p, x, p.depth, p.num_rows - 1);
    return;
  }
  const int64_t weight_bytes = kTogetherStrips * Format::kPart * kStrip * sizeof(uint16_t);
  const int64_t sum_bytes = p.num_rows * kTogetherStrips * kStrip * sizeof(float);
  char* const memory = (char*)scratch.reserve(weight_bytes + sum_bytes);
  for (int64_t strip = 0; strip < p.num_strips; strip += kTogetherStrips) {
    Product part = p;
    part.num_strips = least(kTogetherStrips, p.num_strips - strip);
    part.y = p.y + strip * kStrip;
    const auto* strips = (const uint8_t*)p.strips + strip * Format::kLayout.strip_bytes(p.depth);
    multiply_strips<Format>(part, strips, (uint16_t*)memory, (float*)(memory + weight_bytes));
  }
}

void put_bfloat16(const void* row, bool is_float32, int64_t size, int64_t depth, void* out,
                  int64_t index) {
  kBfloat16Amx.multiplier.put(row, is_float32, size, depth, out, index);
}

template <class Format>
constexpr ridgeline::Multiplier unpacked_multiplier() {
  return {ridgeline::Activations::kBfloat16, put_bfloat16, multiply_unpacked<Format>,
          kTogetherStrips};
}

}  // namespace

namespace ridgeline {
constexpr HalfBlocks kHalfBlocksAmx = {
    unpacked_multiplier<UnpackedFp8Block>(),
    unpacked_multiplier<UnpackedMxfp8>(),
    unpacked_multiplier<UnpackedNvfp4>(),
};
}
