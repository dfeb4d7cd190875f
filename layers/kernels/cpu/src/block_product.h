// Products of blocks (blocks.h): exact sums of int8 over a group (or half of one), which one
// accumulator of float32 a (row, feature) takes in the order of depth, and another the minima. So a
// row's bits depend neither on the rows beside it nor on what sums the integers. Each tile of rows
// unpacks strips anew: sums that wait for other tiles, part by part, cost more.
#pragma once
#include "block_formats.h"
#include "blocks.h"
#include "kernels.h"
#include "product.h"
#include "scaled_product.h"
#include "vector.h"

namespace {

using ridgeline::kDepth;
using ridgeline::padded;

typedef uint8_t Bytes __attribute__((vector_size(kRegisterBytes)));

// Integers whose bits, as those of a float, are kZero more than they are: below 2^22 no conversion
// is needed.
constexpr float kZero = 12582912;  // 1.5 * 2^23
constexpr int32_t kZeroBits = 0x4b400000;
struct Sums {
  Ints part[kRegisters];

  static Sums splat(int32_t value) {
    Sums v;
    UNROLL for (auto& part : v.part)
      part = Ints{} + value;
    return v;
  }
};

// What signed weights count as more than they are.
#if defined(__AVX512VNNI__)
constexpr int kSignedOffset = 128;
#else
constexpr int kSignedOffset = 0;
#endif

// sums + the products of four numbers each: of weights, and of the same four int8 for all lanes.
// Unsigned weights go from 0 to 127, to 255 with VNNI, which does not saturate and has no others.
template <bool is_signed>
inline Ints dot(Ints sums, Words w, Words x) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, (__m512i)x);
#elif defined(__AVX2__)
  const __m256i weights = (__m256i)w;
  const __m256i size = is_signed ? _mm256_abs_epi8(weights) : weights;
  const __m256i turned = is_signed ? _mm256_sign_epi8((__m256i)x, weights) : (__m256i)x;
  const __m256i pairs = _mm256_maddubs_epi16(size, turned);
  return sums + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
  return (Ints)vdotq_s32((int32x4_t)sums, (int8x16_t)w, (int8x16_t)x);
#else
  const int8x16_t a = (int8x16_t)w, b = (int8x16_t)x;
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
  const int32x4_t high = vpaddlq_s16(vmull_high_s8(a, b));
  return sums + (Ints)vpaddq_s32(low, high);
#endif
}

// Halves of a group whose sums begin with different integers, and halves that have minima.
template <class Format>
constexpr int kStarts = Format::kHasHalves && !Format::kHasMinimum ? 2 : 1;
template <class Format>
constexpr int kMinima = Format::kHasMinimum ? 1 + Format::kHasHalves : 0;

// Integers as `dot` takes them: by VNNI unsigned ones, which count as so much more than they are.
template <class Format>
constexpr int kOffset = Format::kIsSigned ? kSignedOffset : Format::kOffset;

template <class Format>
inline Words16 integers_of(const uint8_t* group, int quad) {
  Words16 w = Format::integers(group, quad);
  if constexpr (Format::kIsSigned && kSignedOffset) UNROLL
    for (auto& part : w.part) part ^= 0x80808080u;
  return w;
}

// What a group's sums are multiplied with.
template <class Format>
struct GroupFactors {
  static constexpr bool kIsWide = Format::kLayout.group_bytes == 0;  // d has all of a float's bits
  static constexpr bool kIsWhole = Format::kLayout.shift == ridgeline::kWholeRow;
  static constexpr int kHalves = Format::kHasHalves ? 2 : 1;
  Vector d[kHalves], zero[kHalves];  // that their numbers are too large by

  GroupFactors(const GroupScales& scales) {
    if constexpr (kIsWhole) return;
    d[0] = scales.d;
    if constexpr (Format::kHasHalves) d[1] = scales.second;
    if constexpr (!kIsWide) UNROLL
      for (int half = 0; half < kHalves; half++) zero[half] = d[half] * Vector::splat(-kZero);
  }
  // sum + x d products, which are exact numbers: once rounded when they meet d, once when x. A d of
  // the whole row waits for the sum.
  Vector add(const Vector& sum, const Sums& products, int half, const Vector& x) const {
    Vector numbers;
    UNROLL for (int i = 0; i < kRegisters; i++)
      numbers.part[i] = kIsWide ? (Floats)products.part[i] - kZero : (Floats)products.part[i];
    if constexpr (kIsWhole) return multiply_add(numbers, x, sum);
    if constexpr (kIsWide) return multiply_add(numbers * d[0], x, sum);
    return multiply_add(multiply_add(numbers, d[half], zero[half]), x, sum);
  }
};

// A strip, and its parts of a group.
template <class Format>
struct BlockStrip {
  const uint8_t *groups, *scales;
  int shift;

  BlockStrip(const Product& p, int64_t strip)
      : groups((const uint8_t*)p.strips + strip * layout(p.shift).strip_bytes(p.depth)),
        scales(groups + p.depth / kDepth * Format::kLayout.integer_bytes()),
        shift(p.shift) {}
  static constexpr BlockLayout layout(int shift) {  // sizes of ours are known when it runs
    return Format::kLayout.group_bytes ? Format::kLayout : Format::kLayout.sharing(shift);
  }
  const uint8_t* group(int64_t g) const { return groups + g * Format::kLayout.integer_bytes(); }
  Words16 integers(int64_t g, int quad) const { return integers_of<Format>(group(g), quad); }
  const uint8_t* shared(int64_t g) const { return scales + layout(shift).super_offset(g); }
  const uint8_t* scales_at(int64_t g) const { return shared(g) + layout(shift).group_offset(g); }
  GroupScales scales_of(int64_t g) const {
    GroupScales out;
    Format::scales(scales_at(g), shared(g), out);
    return out;
  }
  GroupFactors<Format> factors(int64_t g) const { return scales_of(g); }
  Vector minimum(int64_t g, int half) const {
    return Format::minimum(scales_at(g) + half * kStrip, shared(g));
  }
  // Integers come from memory, in the order of their addresses: those that are due in a while are
  // fetched, which beyond a strip's end are the next one's.
  void fetch_ahead(int64_t g) const {
    constexpr int64_t kAhead = 8 << 10;
    for (int line = 0; line < Format::kLayout.integer_bytes(); line += 64)
      __builtin_prefetch(group(g) + kAhead + line);
  }
};

// Strips side by side.
template <class Format>
struct BlockStrips {
  const Product& p;
  int64_t first;

  BlockStrip<Format> operator[](int s) const { return {p, first + s}; }
};

// Activations of rows. Sixteen lie together, a group after the other: int8 [row, 32]; then [row]
// what these are multiplied with, the sum of their numbers after that (float32), and what the sums
// of products with each half of them begin with (int32): less what weights that count as more add.
// Where halves have minima, both begin with the first of these, and the sum of the second half's
// numbers is in place of the other.
struct Int8Rows {
  static constexpr int64_t kTogether = ridgeline::kRowsTogether;
  static constexpr int64_t kGroupBytes = kTogether * (kDepth + 16);
  int8_t* q;
  float* scales;

  Int8Rows(const void* x, int64_t row, int64_t depth) {
    const int64_t place = row % kTogether;
    auto* start =
        (int8_t*)x + bytes_of_rows(ridgeline::Activations::kInt8, row - place, depth);
    q = start + place * kDepth;
    scales = (float*)(start + kTogether * kDepth) + place;
  }
  int8_t* integers(int64_t g, int row = 0) const { return q + g * kGroupBytes + row * kDepth; }
  float& d(int64_t g, int row = 0) const { return scales[g * kGroupBytes / 4 + row]; }
  float& sum(int64_t g, int half, int row = 0) const {
    return (&d(g, row))[(1 + 2 * half) * kTogether];
  }
  int32_t& start(int64_t g, int half, int row = 0) const {
    return ((int32_t*)&d(g, row))[(2 + half) * kTogether];
  }
  int32_t quad(int64_t g, int quad, int row) const {
    int32_t four;
    memcpy(&four, integers(g, row) + 4 * quad, 4);
    return four;
  }
};

// Holds a value in a register, which the compiler would load anew for each use.
inline Words in_register(Words w) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(w));
#endif
  return w;
}

// Sums of a group's half with ROWS rows.
template <class Format, int ROWS, int STRIPS>
inline void multiply_half(const BlockStrips<Format>& strips, const Int8Rows& x, int64_t g, int half,
                          Sums (&products)[ROWS][STRIPS]) {
  constexpr int kQuads = 8 / GroupFactors<Format>::kHalves;
  UNROLL for (int r = 0; r < ROWS; r++) UNROLL
    for (int s = 0; s < STRIPS; s++)
      products[r][s] = Sums::splat(x.start(g, half % kStarts<Format>, r));
  UNROLL for (int quad = half * kQuads; quad < (half + 1) * kQuads; quad++) {
    Words16 w[STRIPS];
    UNROLL for (int s = 0; s < STRIPS; s++) {
      w[s] = strips[s].integers(g, quad);
      UNROLL for (auto& part : w[s].part) part = in_register(part);
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
      const Words four = Words{} + (uint32_t)x.quad(g, quad, r);
      UNROLL for (int s = 0; s < STRIPS; s++) UNROLL
        for (int i = 0; i < kRegisters; i++) {
          Ints& sum = products[r][s].part[i];
          sum = dot<Format::kIsSigned>(sum, w[s].part[i], four);
        }
    }
  }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// The same by products of two rows with two features, eight of depth at a time.
template <class Format, int ROWS>
inline void multiply_half_in_pairs(const BlockStrips<Format>& strips, const Int8Rows& x, int64_t g,
                                   int half, Sums (&products)[ROWS][1]) {
  constexpr int kQuads = 8 / GroupFactors<Format>::kHalves, kPairs = ROWS / 2;
  // Of two features each: both of the first row, then of the second.
  int32x4_t sums[kPairs][kRegisters][2];
  UNROLL for (int r = 0; r < kPairs; r++) {
    const int start = half % kStarts<Format>;
    const int32x2_t first = vdup_n_s32(x.start(g, start, 2 * r));
    const int32x2_t second = vdup_n_s32(x.start(g, start, 2 * r + 1));
    UNROLL for (auto& of_four : sums[r])
      of_four[0] = of_four[1] = vcombine_s32(first, second);
  }
  UNROLL for (int quad = half * kQuads; quad < (half + 1) * kQuads; quad += 2) {
    const Words16 first = strips[0].integers(g, quad), second = strips[0].integers(g, quad + 1);
    int8x16_t four[kPairs];
    UNROLL for (int r = 0; r < kPairs; r++)
      four[r] = vcombine_s8(vld1_s8(x.integers(g, 2 * r) + 4 * quad),
                            vld1_s8(x.integers(g, 2 * r + 1) + 4 * quad));
    UNROLL for (int i = 0; i < kRegisters; i++) {
      const auto a = (uint32x4_t)first.part[i], b = (uint32x4_t)second.part[i];
      const int8x16_t low = vreinterpretq_s8_u32(vzip1q_u32(a, b));
      const int8x16_t high = vreinterpretq_s8_u32(vzip2q_u32(a, b));
      UNROLL for (int r = 0; r < kPairs; r++) {
        sums[r][i][0] = vmmlaq_s32(sums[r][i][0], four[r], low);
        sums[r][i][1] = vmmlaq_s32(sums[r][i][1], four[r], high);
      }
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++) UNROLL
    for (int i = 0; i < kRegisters; i++) {
      const int64x2_t low = vreinterpretq_s64_s32(sums[r / 2][i][0]);
      const int64x2_t high = vreinterpretq_s64_s32(sums[r / 2][i][1]);
      products[r][0].part[i] = (Ints)(r % 2 ? vzip2q_s64(low, high) : vzip1q_s64(low, high));
    }
}
#endif

// Stores what groups came to for `rows` rows, at most ROWS. Minima are added up only here: before,
// their accumulators would take the registers of other rows.
template <class Format, int ROWS, int STRIPS>
void store_results(const Vector (&sums)[ROWS][STRIPS], const Product& p, int64_t strip,
                   int64_t row, int rows) {
  const Int8Rows x(p.x, row, p.depth);
  UNROLL for (int s = 0; s < STRIPS; s++) {
    const BlockStrip<Format> weights(p, strip + s);
    Vector minima[ROWS];
    if constexpr (Format::kHasMinimum) {
      UNROLL for (auto& minimum : minima) minimum = Vector::splat(0);
      for (int64_t g = 0; g < p.depth / kDepth; g++) UNROLL
        for (int half = 0; half < kMinima<Format>; half++) {
          const Vector minimum = weights.minimum(g, half);
          UNROLL for (int r = 0; r < ROWS; r++)
            minima[r] = multiply_add(minimum, Vector::splat(x.sum(g, half, r)), minima[r]);
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
      Vector y = sums[r][s];
      if constexpr (GroupFactors<Format>::kIsWhole) y = y * weights.scales_of(0).d;
      if constexpr (Format::kHasMinimum) y = y + minima[r];
      if (r < rows) y.store(p.y + (row + r) * p.y_stride + (strip + s) * kStrip);
    }
  }
}

// STRIPS strips for `rows` rows that lie together, of at most ROWS.
template <class Format, int ROWS, int STRIPS>
void multiply_tile(const Product& p, int64_t strip, int64_t row, int rows) {
  const Int8Rows x(p.x, row, p.depth);
  const BlockStrips<Format> strips{p, strip};
  Vector sums[ROWS][STRIPS];
  UNROLL for (auto& of_row : sums) UNROLL
    for (auto& sum : of_row) sum = Vector::splat(0);
  for (int64_t g = 0; g < p.depth / kDepth; g++) {
    UNROLL for (int s = 0; s < STRIPS; s++) strips[s].fetch_ahead(g);
    UNROLL for (int half = 0; half < GroupFactors<Format>::kHalves; half++) {
      Sums products[ROWS][STRIPS];
#if defined(__ARM_FEATURE_MATMUL_INT8)
      if constexpr (ROWS > 1)
        multiply_half_in_pairs<Format>(strips, x, g, half, products);
      else
#endif
        multiply_half<Format>(strips, x, g, half, products);
      UNROLL for (int s = 0; s < STRIPS; s++) {
        const GroupFactors<Format> factors = strips[s].factors(g);
        UNROLL for (int r = 0; r < ROWS; r++)
          sums[r][s] = factors.add(sums[r][s], products[r][s], half, Vector::splat(x.d(g, r)));
      }
    }
  }
  store_results<Format>(sums, p, strip, row, rows);
}

// Rows that tiles may have, of which one that is too large multiplies what lies behind, and strips
// beside them. Of eight rows some sums wait in the nearest cache: unpacking less often is worth it.
#if defined(__AVX512F__)
using TileRows = std::integer_sequence<int, 1, 2, 4, 6, 8>;
#elif defined(__ARM_FEATURE_MATMUL_INT8)
using TileRows = std::integer_sequence<int, 1, 2, 4>;
#else
using TileRows = std::integer_sequence<int, 1, 2, 3>;
#endif
constexpr int strips_beside(int rows) {
  return kRegisters > 1 ? 1 : rows > 2 ? 2 : 4;
}

// All strips for some rows that lie together; how many these were.
template <class Format, int ROWS, int... MORE>
int64_t multiply_rows(const Product& p, int64_t row, int64_t rows,
                      std::integer_sequence<int, ROWS, MORE...>) {
  if constexpr (sizeof...(MORE) > 0)
    if (rows > ROWS)
      return multiply_rows<Format>(p, row, rows, std::integer_sequence<int, MORE...>());
  constexpr int kStrips = strips_beside(ROWS);
  const int taken = (int)(rows < ROWS ? rows : ROWS);
  int64_t strip = 0;
  for (; strip + kStrips <= p.num_strips; strip += kStrips)
    multiply_tile<Format, ROWS, kStrips>(p, strip, row, taken);
  for (; strip < p.num_strips; strip++) multiply_tile<Format, ROWS, 1>(p, strip, row, taken);
  return taken;
}

// `Multiplier::multiply`.
template <class Format>
void multiply_blocks(const Product& p) {
  constexpr int64_t kTogether = Int8Rows::kTogether;
  for (int64_t row = 0; row < p.num_rows;) {
    const int64_t end = padded(row + 1, kTogether);
    row += multiply_rows<Format>(p, row, (p.num_rows < end ? p.num_rows : end) - row, TileRows());
  }
}

// Numbers of a row that share a scale, zeros behind its end.
struct Numbers32 {
  Vector half[2];

  Numbers32(const void* row, bool is_float32, int64_t size, int64_t from) {
    const char* numbers = (const char*)row + from * (is_float32 ? 4 : 2);
    float with_zeros[kDepth];
    if (size - from < kDepth) {
      put<InFloat32<Float32>>(numbers, is_float32, size - from, kDepth, with_zeros, 0);
      numbers = (const char*)with_zeros;
      is_float32 = true;
    }
    UNROLL for (int i = 0; i < 2; i++)
      half[i] = is_float32 ? Vector::load((const float*)numbers + i * kLanes)
                           : widen((const uint16_t*)numbers + i * kLanes);
  }
};

// The larger of lanes' bits without their signs, which order as numbers do; what is not finite is
// the largest.
inline Floats larger(Floats a, Floats b) {
  const Ints x = (Ints)a & INT32_MAX, y = (Ints)b & INT32_MAX;
  return (Floats)(x > y ? x : y);
}
inline Vector larger(const Vector& a, const Vector& b) {
  Vector v;
  UNROLL for (int i = 0; i < kRegisters; i++) v.part[i] = larger(a.part[i], b.part[i]);
  return v;
}
inline float size_of(const Vector& v) {
  return reduce(v, [](Floats a, Floats b) { return larger(a, b); });
}

// Sixteen numbers of at most 127, rounded to the nearest.
inline Sums rounded(const Vector& v) {
  Sums sums;
  UNROLL for (int i = 0; i < kRegisters; i++) {
#if defined(__AVX512F__)
    sums.part[i] = (Ints)_mm512_cvtps_epi32((__m512)v.part[i]);
#elif defined(__AVX2__)
    sums.part[i] = (Ints)_mm256_cvtps_epi32((__m256)v.part[i]);
#else
    sums.part[i] = (Ints)vcvtnq_s32_f32((float32x4_t)v.part[i]);
#endif
  }
  return sums;
}
inline void store_int8(const Sums& sums, int8_t* out) {
  typedef int8_t Few __attribute__((vector_size(kRegisterLanes), aligned(1), may_alias));
  UNROLL for (int i = 0; i < kRegisters; i++)
    *(Few*)(out + i * kRegisterLanes) = __builtin_convertvector(sums.part[i], Few);
}
inline int32_t sum(const Sums& sums) {
  Vector bits;
  UNROLL for (int i = 0; i < kRegisters; i++) bits.part[i] = (Floats)sums.part[i];
  const float all = reduce(bits, [](Floats a, Floats b) { return (Floats)((Ints)a + (Ints)b); });
  int32_t total;
  memcpy(&total, &all, 4);
  return total;
}

// `Multiplier::put`: each group of a row, or the whole row, is divided by a 127th of its largest
// number and rounded. One that is not finite makes the row's products NaN.
template <class Format, bool is_whole>
void put_int8(const void* row, bool is_float32, int64_t size, int64_t depth, void* out,
              int64_t index) {
  const Int8Rows x(out, index, depth);
  float top = 0;
  if constexpr (is_whole) {
    Vector sizes = Vector::splat(0);
    for (int64_t from = 0; from < size; from += kDepth) {
      const Numbers32 numbers(row, is_float32, size, from);
      sizes = larger(sizes, larger(numbers.half[0], numbers.half[1]));
    }
    top = size_of(sizes);
  }
  for (int64_t g = 0; g < depth / kDepth; g++) {
    Numbers32 numbers(row, is_float32, size, g * kDepth);
    if constexpr (!is_whole) top = size_of(larger(numbers.half[0], numbers.half[1]));
    const float d = top / 127 + (top - top);  // NaN of what is not finite
    if (!(top - top == 0))  // no integer is near it
      numbers.half[0] = numbers.half[1] = Vector::splat(0);
    const Vector inverse = Vector::splat(top > 1e-30f ? 127 / top : 0);
    Sums integers[2];
    UNROLL for (int half = 0; half < 2; half++) {
      integers[half] = rounded(numbers.half[half] * inverse);
      store_int8(integers[half], x.integers(g) + half * kLanes);
    }
    x.d(g) = d;
    if constexpr (!Format::kHasHalves) UNROLL
      for (int i = 0; i < kRegisters; i++) integers[0].part[i] += integers[1].part[i];
    UNROLL for (int half = 0; half < (Format::kHasHalves ? 2 : 1); half++) {
      const int32_t all = sum(integers[half]);
      if (half < kStarts<Format>) x.start(g, half) = kZeroBits - kOffset<Format> * all;
      if (half < kMinima<Format>) x.sum(g, half) = d * (float)all;
    }
  }
}

template <class Format, bool is_whole = false>
constexpr ridgeline::Multiplier block_multiplier() {
  return {ridgeline::Activations::kInt8, put_int8<Format, is_whole>, multiply_blocks<Format>};
}

// e4m3 is multiplied in float32, like weights of more bits.
constexpr ridgeline::Multiplier kFp8Multiplier = {
    ridgeline::Activations::kFloat32, put<InFloat32<Float32>>, multiply<Fp8>};

constexpr ridgeline::Blocks blocks_of_int8() {
  return {block_multiplier<Int8>(),
          block_multiplier<Int8, true>(),
          kFp8Multiplier,
          block_multiplier<Int4>(),
          block_multiplier<Int4Asym>(),
          block_multiplier<Int3>(),
          block_multiplier<Int3Asym>(),
          block_multiplier<Mxfp4>(),
          block_multiplier<Q8_0>(),
          block_multiplier<Q5_0>(),
          block_multiplier<Q4_0>(),
          block_multiplier<Q4_1>(),
          block_multiplier<Q4_K>(),
          block_multiplier<Q5_K>(),
          block_multiplier<Q6_K>(),
          block_multiplier<Q3_K>(),
          block_multiplier<Q2_K>(),
          block_multiplier<IQ4_NL>(),
          block_multiplier<IQ4_XS>(),
          scaled_multiplier<Fp8Block>(),
          scaled_multiplier<Mxfp8>(),
          scaled_multiplier<Nvfp4>()};
}

}  // namespace
