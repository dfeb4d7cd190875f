// Products of blocks (blocks.h): exact sums of int8 over a group (or half of one), which one
// accumulator of float32 a (row, feature) takes in the order of depth, and another the minima. So a
// row's bits depend neither on the rows beside it nor on what sums the integers.
#pragma once
#include "blocks.h"
#include "kernels.h"
#include "product.h"
#include "vector.h"

namespace {

using ridgeline::BlockLayout;
using ridgeline::kDepth;

typedef uint8_t Bytes __attribute__((vector_size(kRegisterBytes)));

// Sixteen words of four bytes, or sixteen sums.
struct Words16 {
  Words part[kRegisters];
};

// Integers whose bits, as those of a float, are kZero more than they are: below 2^22 no conversion
// is needed.
constexpr float kZero = 12582912;  // 1.5 * 2^23
constexpr int32_t kZeroBits = 0x4b400000;
struct Sums {
  Ints part[kRegisters];

  static Sums splat(int32_t value) {
    Sums v;
    UNROLL for (auto& part : v.part)
      part = Ints{} + (kZeroBits + value);
    return v;
  }
};

// sums + the products of four numbers each: of weights from 0 to 127 (to 255 with VNNI, which does
// not saturate), and of the same four int8 for all lanes.
inline Ints dot_unsigned(Ints sums, Words w, int32_t x) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(x));
  return sums + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
  const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(x));
  return (Ints)vdotq_s32((int32x4_t)sums, (int8x16_t)w, four);
#else
  const int8x16_t a = (int8x16_t)w, b = vreinterpretq_s8_s32(vdupq_n_s32(x));
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
  const int32x4_t high = vpaddlq_s16(vmull_high_s8(a, b));
  return sums + (Ints)vpaddq_s32(low, high);
#endif
}

// The same for signed weights, which count as `kSignedOffset` more than they are.
#if defined(__AVX512VNNI__)
constexpr int kSignedOffset = 128;
#else
constexpr int kSignedOffset = 0;
#endif
inline Ints dot_signed(Ints sums, Words w, int32_t x) {
#if defined(__AVX512VNNI__)
  return dot_unsigned(sums, w ^ 0x80808080u, x);
#elif defined(__AVX2__)
  const __m256i weights = (__m256i)w;
  const __m256i turned = _mm256_sign_epi8(_mm256_set1_epi32(x), weights);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), turned);
  return sums + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  return dot_unsigned(sums, w, x);
#endif
}

// Sixteen float16 as floats, subnormal ones too, whatever the thread does with those of float32.
inline Vector widen_halves(const uint8_t* p) {
  Vector v;
  UNROLL for (int i = 0; i < kRegisters; i++) {
    const uint8_t* from = p + i * 2 * kRegisterLanes;
#if defined(__AVX512F__)
    v.part[i] = (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
    v.part[i] = (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    v.part[i] = (Floats)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from)));
#endif
  }
  return v;
}

// Sixteen bytes, signed or not, as floats.
template <class Byte>
inline Vector widen_bytes(const uint8_t* p) {
  typedef Byte Few __attribute__((vector_size(kRegisterLanes), aligned(1), may_alias));
  Vector v;
  UNROLL for (int i = 0; i < kRegisters; i++)
    v.part[i] = __builtin_convertvector(*(const Few*)(p + i * kRegisterLanes), Floats);
  return v;
}

inline Words16 load_words(const uint8_t* p) {
  Words16 w;
  UNROLL for (int i = 0; i < kRegisters; i++)
    w.part[i] = *(const LooseWords*)(p + i * kRegisterBytes);
  return w;
}

// Integers come from memory, in the order of their addresses: those that are due in a while, which
// beyond a strip's end are the next one's.
template <class Format>
inline void prefetch_group(const uint8_t* group) {
  constexpr int64_t kAhead = 8 << 10;
  for (int line = 0; line < Format::kLayout.integer_bytes(); line += 64)
    __builtin_prefetch(group + kAhead + line);
}

// What a group's sums are multiplied with: d of all of it, or of each half.
struct GroupScales {
  Vector d, second;
};

// Each format: integers of depths 4 quad to 4 quad + 3, less kOffset those that count; scales; m.
struct Q8_0 {
  static constexpr BlockLayout kLayout = ridgeline::kQ8_0;
  static constexpr bool kIsSigned = true, kHasMinimum = false, kHasHalves = false;
  static constexpr int kOffset = 0;
  static Words16 integers(const uint8_t* group, int quad) { return load_words(group + 64 * quad); }
  static void scales(const uint8_t* own, const uint8_t*, GroupScales& out) {
    out.d = widen_halves(own);
  }
};

struct Nibbles {
  static constexpr bool kIsSigned = false, kHasHalves = false;
  static Words16 integers(const uint8_t* group, int quad) {
    Words16 w = load_words(group + quad / 2 * 64);
    UNROLL for (auto& part : w.part)
      part = part >> quad % 2 * 4 & 0x0f0f0f0fu;
    return w;
  }
};

struct Q5_0 : Nibbles {
  static constexpr BlockLayout kLayout = ridgeline::kQ5_0;
  static constexpr bool kHasMinimum = false;
  static constexpr int kOffset = 16;
  static Words16 integers(const uint8_t* group, int quad) {
    const Words16 upper = load_words(group + 256);
    Words16 w = Nibbles::integers(group, quad);
    UNROLL for (int i = 0; i < kRegisters; i++)
      w.part[i] |= (upper.part[i] >> quad & 0x01010101u) << 4;
    return w;
  }
  static void scales(const uint8_t* own, const uint8_t*, GroupScales& out) {
    out.d = widen_halves(own);
  }
};

struct Q4_0 : Nibbles {
  static constexpr BlockLayout kLayout = ridgeline::kQ4_0;
  static constexpr bool kHasMinimum = false;
  static constexpr int kOffset = 8;
  static void scales(const uint8_t* own, const uint8_t*, GroupScales& out) {
    out.d = widen_halves(own);
  }
};

struct Q4_1 : Nibbles {
  static constexpr BlockLayout kLayout = ridgeline::kQ4_1;
  static constexpr bool kHasMinimum = true;
  static constexpr int kOffset = 0;
  static void scales(const uint8_t* own, const uint8_t*, GroupScales& out) {
    out.d = widen_halves(own);
  }
  static Vector minimum(const uint8_t* own, const uint8_t*) { return widen_halves(own + 32); }
};

struct Q4_K : Nibbles {
  static constexpr BlockLayout kLayout = ridgeline::kQ4_K;
  static constexpr bool kHasMinimum = true;
  static constexpr int kOffset = 0;
  static void scales(const uint8_t* own, const uint8_t* shared, GroupScales& out) {
    out.d = widen_halves(shared) * widen_bytes<uint8_t>(own);
  }
  static Vector minimum(const uint8_t* own, const uint8_t* shared) {
    return Vector::splat(0) - widen_halves(shared + 32) * widen_bytes<uint8_t>(own + 16);
  }
};

struct Q6_K {
  static constexpr BlockLayout kLayout = ridgeline::kQ6_K;
  static constexpr bool kIsSigned = false, kHasMinimum = false, kHasHalves = true;
  static constexpr int kOffset = 32;
  static Words16 integers(const uint8_t* group, int quad) {
    const Words16 upper = load_words(group + 256 + quad / 4 * 64);
    Words16 w = Nibbles::integers(group, quad);
    UNROLL for (int i = 0; i < kRegisters; i++)
      w.part[i] |= (upper.part[i] >> quad % 4 * 2 & 0x03030303u) << 4;
    return w;
  }
  static void scales(const uint8_t* own, const uint8_t* shared, GroupScales& out) {
    const Vector d = widen_halves(shared);
    out.d = d * widen_bytes<int8_t>(own);
    out.second = d * widen_bytes<int8_t>(own + 16);
  }
};

// Ours: what several groups share, or a whole row.
struct Int8 {
  static constexpr BlockLayout kLayout = ridgeline::kInt8;
  static constexpr bool kIsSigned = true, kHasMinimum = false, kHasHalves = false;
  static constexpr int kOffset = 0;
  static Words16 integers(const uint8_t* group, int quad) { return load_words(group + 64 * quad); }
  static void scales(const uint8_t*, const uint8_t* shared, GroupScales& out) {
    out.d = Vector::load((const float*)shared);
  }
};

struct Threes {
  static constexpr bool kIsSigned = false, kHasHalves = false;
  static Words16 integers(const uint8_t* group, int quad) {
    const Words16 upper = load_words(group + 128);
    Words16 w = load_words(group + quad / 4 * 64);
    UNROLL for (int i = 0; i < kRegisters; i++)
      w.part[i] = (w.part[i] >> quad % 4 * 2 & 0x03030303u) |
                  (upper.part[i] >> quad & 0x01010101u) << 2;
    return w;
  }
};

template <class Integers, int OFFSET>
struct Symmetric : Integers {
  static constexpr BlockLayout kLayout = OFFSET == 8 ? ridgeline::kInt4 : ridgeline::kInt3;
  static constexpr bool kHasMinimum = false;
  static constexpr int kOffset = OFFSET;
  static void scales(const uint8_t*, const uint8_t* shared, GroupScales& out) {
    out.d = Vector::load((const float*)shared);
  }
};

template <class Integers, int OFFSET>
struct Asymmetric : Integers {
  static constexpr BlockLayout kLayout = OFFSET == 8 ? ridgeline::kInt4Asym : ridgeline::kInt3Asym;
  static constexpr bool kHasMinimum = true;
  static constexpr int kOffset = 0;
  static void scales(const uint8_t*, const uint8_t* shared, GroupScales& out) {
    out.d = Vector::load((const float*)shared);
  }
  static Vector minimum(const uint8_t*, const uint8_t* shared) {
    const Vector d = Vector::load((const float*)shared);
    return Vector::splat(0) - d * widen_bytes<uint8_t>(shared + 64);
  }
};

using Int4 = Symmetric<Nibbles, 8>;
using Int4Asym = Asymmetric<Nibbles, 8>;
using Int3 = Symmetric<Threes, 4>;
using Int3Asym = Asymmetric<Threes, 4>;

// Twice the numbers of e2m1, and 12 more, by their codes.
struct Mxfp4 : Nibbles {
  static constexpr BlockLayout kLayout = ridgeline::kMxfp4;
  static constexpr bool kHasMinimum = false;
  static constexpr int kOffset = 12;
  static Words16 integers(const uint8_t* group, int quad) {
    alignas(16) static constexpr uint8_t kNumbers[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                         12, 11, 10, 9,  8,  6,  4,  0};
    Words16 w = Nibbles::integers(group, quad);
    UNROLL for (auto& part : w.part) {
#if defined(__AVX512F__)
      const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)kNumbers));
      part = (Words)_mm512_shuffle_epi8(table, (__m512i)part);
#elif defined(__AVX2__)
      const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)kNumbers));
      part = (Words)_mm256_shuffle_epi8(table, (__m256i)part);
#else
      part = (Words)vqtbl1q_u8(vld1q_u8(kNumbers), (uint8x16_t)part);
#endif
    }
    return w;
  }
  static void scales(const uint8_t* own, const uint8_t*, GroupScales& out) {
    typedef uint8_t Few __attribute__((vector_size(kRegisterLanes), aligned(1), may_alias));
    UNROLL for (int i = 0; i < kRegisters; i++) {
      const Few bytes = *(const Few*)(own + i * kRegisterLanes);
      const Ints e = __builtin_convertvector(bytes, Ints) - 1;  // of 2^(e - 128)
      out.d.part[i] = (Floats)((e > 0 ? e : Ints{}) << 23);
    }
  }
};

// A strip, and its parts of a group.
template <class Format>
struct BlockStrip {
  const uint8_t *integers, *scales;
  int shift;

  BlockStrip(const Product& p, int64_t strip)
      : integers((const uint8_t*)p.strips + strip * layout(p.shift).strip_bytes(p.depth)),
        scales(integers + p.depth / kDepth * Format::kLayout.integer_bytes()),
        shift(p.shift) {}
  static constexpr BlockLayout layout(int shift) {  // sizes of ours are known when it runs
    return Format::kLayout.group_bytes ? Format::kLayout : Format::kLayout.sharing(shift);
  }
  const uint8_t* group(int64_t g) const { return integers + g * Format::kLayout.integer_bytes(); }
  const uint8_t* shared(int64_t g) const { return scales + layout(shift).super_offset(g); }
  const uint8_t* own(int64_t g) const { return shared(g) + layout(shift).group_offset(g); }
  GroupScales scales_of(int64_t g) const {
    GroupScales out;
    Format::scales(own(g), shared(g), out);
    return out;
  }
  Vector minimum_of(int64_t g) const { return Format::minimum(own(g), shared(g)); }
};

// Activations of a row. Sixteen rows lie together: int8 [row, depth]; then for each group, [row],
// what its numbers are multiplied with, and the sum of its numbers after that (float32); then [row]
// sums of its halves (int32).
struct Int8Row {
  int8_t* q;
  float* scales;
  int32_t* halves;

  Int8Row(const void* x, int64_t row, int64_t depth) {
    const int64_t first = row / kTogether * kTogether, groups = depth / kDepth;
    auto* start = (int8_t*)x + bytes_of_rows(ridgeline::Activations::kInt8, first, depth);
    q = start + (row - first) * depth;
    scales = (float*)(start + kTogether * depth) + (row - first);
    halves = (int32_t*)(scales + groups * 2 * kTogether);
  }
  static constexpr int64_t kTogether = ridgeline::kRowsTogether;
  float& d(int64_t group) const { return scales[2 * group * kTogether]; }
  float& sum(int64_t group) const { return scales[(2 * group + 1) * kTogether]; }
  int32_t& half(int64_t group, int which) const { return halves[(2 * group + which) * kTogether]; }
  int32_t quad(int64_t k) const {
    int32_t four;
    memcpy(&four, q + k, 4);
    return four;
  }
};

// sum + x d sums, as numbers.
inline Vector add_scaled(const Vector& sum, const Sums& sums, const Vector& d, const Vector& zero,
                         float x) {
  Vector numbers;
  UNROLL for (int i = 0; i < kRegisters; i++)
    numbers.part[i] = (Floats)sums.part[i];
  return multiply_add(multiply_add(numbers, d, zero), Vector::splat(x), sum);
}

// What a group adds to a row's sum: exact numbers, once rounded when they meet d, once when x.
template <class Format>
struct GroupSum {
  static constexpr bool kIsWide = Format::kLayout.group_bytes == 0;  // d has all of a float's bits
  GroupScales scales;
  Vector zero, second_zero;  // that their numbers are too large by

  explicit GroupSum(const GroupScales& found) : scales(found) {
    if constexpr (kIsWide) return;
    zero = scales.d * Vector::splat(-kZero);
    if constexpr (Format::kHasHalves) second_zero = scales.second * Vector::splat(-kZero);
  }
  Vector add(Vector sum, const Sums& first, const Sums& second, float x) const {
    if constexpr (kIsWide) {
      Vector numbers;
      UNROLL for (int i = 0; i < kRegisters; i++)
        numbers.part[i] = (Floats)first.part[i] - kZero;
      return multiply_add(numbers * scales.d, Vector::splat(x), sum);
    }
    sum = add_scaled(sum, first, scales.d, zero, x);
    if constexpr (Format::kHasHalves) sum = add_scaled(sum, second, scales.second, second_zero, x);
    return sum;
  }
};

// What sums of a row's integers begin with: less what those of weights that are too large add.
template <class Format>
inline int32_t less_offset(const Int8Row& x, int64_t g, int half) {
  constexpr int kOffset = Format::kIsSigned ? kSignedOffset : Format::kOffset;
  return -kOffset * (Format::kHasHalves ? x.half(g, half) : x.half(g, 0) + x.half(g, 1));
}

// Sums of a group's products with ROWS rows, those of its halves if it has some.
template <class Format, int ROWS>
inline void multiply_group(const Product& p, int64_t row, int64_t g, const uint8_t* group,
                           Sums (&products)[ROWS][2]) {
  constexpr int kHalves = Format::kHasHalves ? 2 : 1, kQuads = 8 / kHalves;
  UNROLL for (int half = 0; half < kHalves; half++) {
    UNROLL for (int r = 0; r < ROWS; r++)
      products[r][half] = Sums::splat(less_offset<Format>(Int8Row(p.x, row + r, p.depth), g, half));
    UNROLL for (int quad = half * kQuads; quad < (half + 1) * kQuads; quad++) {
      const Words16 integers = Format::integers(group, quad);
      UNROLL for (int r = 0; r < ROWS; r++) {
        const int32_t x = Int8Row(p.x, row + r, p.depth).quad(g * kDepth + 4 * quad);
        UNROLL for (int i = 0; i < kRegisters; i++) {
          Ints& sum = products[r][half].part[i];
          sum = Format::kIsSigned ? dot_signed(sum, integers.part[i], x)
                                  : dot_unsigned(sum, integers.part[i], x);
        }
      }
    }
  }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// The same by products of two rows with two features, eight of depth at a time; of an odd number of
// rows the last is multiplied twice.
template <class Format, int ROWS>
inline void multiply_group_in_pairs(const Product& p, int64_t row, int64_t g, const uint8_t* group,
                                    Sums (&products)[ROWS][2]) {
  constexpr int kHalves = Format::kHasHalves ? 2 : 1, kQuads = 8 / kHalves;
  constexpr int kPairs = (ROWS + 1) / 2;
  const auto row_at = [&](int pair, int which) {
    return Int8Row(p.x, row + 2 * pair + (2 * pair + which < ROWS ? which : 0), p.depth);
  };
  UNROLL for (int half = 0; half < kHalves; half++) {
    // Of two features each: both of the first row, then of the second.
    int32x4_t sums[kPairs][kRegisters][2];
    UNROLL for (int r = 0; r < kPairs; r++) {
      const int32_t first = kZeroBits + less_offset<Format>(row_at(r, 0), g, half);
      const int32_t second = kZeroBits + less_offset<Format>(row_at(r, 1), g, half);
      UNROLL for (auto& of_four : sums[r])
        of_four[0] = of_four[1] = vcombine_s32(vdup_n_s32(first), vdup_n_s32(second));
    }
    UNROLL for (int quad = half * kQuads; quad < (half + 1) * kQuads; quad += 2) {
      const Words16 first = Format::integers(group, quad);
      const Words16 second = Format::integers(group, quad + 1);
      int8x16_t x[kPairs];
      UNROLL for (int r = 0; r < kPairs; r++) {
        const int64_t k = g * kDepth + 4 * quad;
        x[r] = vcombine_s8(vld1_s8(row_at(r, 0).q + k), vld1_s8(row_at(r, 1).q + k));
      }
      UNROLL for (int i = 0; i < kRegisters; i++) {
        const auto a = (uint32x4_t)first.part[i], b = (uint32x4_t)second.part[i];
        const int8x16_t low = vreinterpretq_s8_u32(vzip1q_u32(a, b));
        const int8x16_t high = vreinterpretq_s8_u32(vzip2q_u32(a, b));
        UNROLL for (int r = 0; r < kPairs; r++) {
          sums[r][i][0] = vmmlaq_s32(sums[r][i][0], x[r], low);
          sums[r][i][1] = vmmlaq_s32(sums[r][i][1], x[r], high);
        }
      }
    }
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL
      for (int i = 0; i < kRegisters; i++) {
        const int64x2_t low = vreinterpretq_s64_s32(sums[r / 2][i][0]);
        const int64x2_t high = vreinterpretq_s64_s32(sums[r / 2][i][1]);
        products[r][half].part[i] = (Ints)(r % 2 ? vzip2q_s64(low, high) : vzip1q_s64(low, high));
      }
  }
}
#endif

template <class Format, int ROWS, int STRIPS>
void block_tile(const Product& p, int64_t strip, int64_t row) {
  float* y = p.y + row * p.y_stride + strip * kStrip;
  Vector sums[ROWS][STRIPS], minima[ROWS][STRIPS];
  UNROLL for (int r = 0; r < ROWS; r++) UNROLL
    for (int s = 0; s < STRIPS; s++) sums[r][s] = minima[r][s] = Vector::splat(0);
  for (int64_t g = 0; g < p.depth / kDepth; g++) UNROLL
    for (int s = 0; s < STRIPS; s++) {
      const BlockStrip<Format> w(p, strip + s);
      const uint8_t* group = w.group(g);
      prefetch_group<Format>(group);
      Sums products[ROWS][2];
#if defined(__ARM_FEATURE_MATMUL_INT8)
      if constexpr (ROWS > 1)
        multiply_group_in_pairs<Format, ROWS>(p, row, g, group, products);
      else
#endif
        multiply_group<Format, ROWS>(p, row, g, group, products);
      const GroupSum<Format> group_sum(w.scales_of(g));
      Vector minimum;
      if constexpr (Format::kHasMinimum) minimum = w.minimum_of(g);
      UNROLL for (int r = 0; r < ROWS; r++) {
        const Int8Row x(p.x, row + r, p.depth);
        sums[r][s] = group_sum.add(sums[r][s], products[r][0], products[r][1], x.d(g));
        if constexpr (Format::kHasMinimum)
          minima[r][s] = multiply_add(minimum, Vector::splat(x.sum(g)), minima[r][s]);
      }
    }
  UNROLL for (int r = 0; r < ROWS; r++) UNROLL
    for (int s = 0; s < STRIPS; s++)
      (sums[r][s] + minima[r][s]).store(y + r * p.y_stride + s * kStrip);
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kMostBlockRows = 4;
#else
constexpr int kMostBlockRows = kRegisters == 1 ? 8 : 3;
#endif

// All strips for ROWS rows.
template <class Format, int ROWS = kMostBlockRows>
void block_tiles(int rows, const Product& p, int64_t row) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return block_tiles<Format, ROWS - 1>(rows, p, row);
  constexpr int kStrips = kRegisters > 1 ? 1 : ROWS == 1 ? 4 : ROWS == 2 ? 2 : 1;
  int64_t strip = 0;
  for (; strip + kStrips <= p.num_strips; strip += kStrips)
    block_tile<Format, ROWS, kStrips>(p, strip, row);
  for (; strip < p.num_strips; strip++) block_tile<Format, ROWS, 1>(p, strip, row);
}

// `Multiplier::multiply`: a strip goes through all rows while it is in the cache.
template <class Format>
void multiply_blocks(const Product& p) {
  const int64_t groups = (p.num_rows + kMostBlockRows - 1) / kMostBlockRows;
  const int64_t together = groups == 1 ? p.num_strips : 1;
  for (int64_t strip = 0; strip < p.num_strips; strip += together) {
    Product part = p;
    part.strips = BlockStrip<Format>(p, strip).integers;
    part.num_strips = together;
    part.y = p.y + strip * kStrip;
    for (int64_t g = 0; g < groups; g++) {
      const int64_t row = p.num_rows * g / groups, end = p.num_rows * (g + 1) / groups;
      block_tiles<Format>((int)(end - row), part, row);
    }
  }
}

// Sixteen numbers of at most 127 as int8, rounded to the nearest; their sum.
inline int32_t round_to_int8(const Vector& v, int8_t* out) {
  typedef int8_t Few __attribute__((vector_size(kRegisterLanes), aligned(1), may_alias));
  Vector rounded;
  UNROLL for (int i = 0; i < kRegisters; i++) {
    rounded.part[i] = (v.part[i] + kZero) - kZero;  // whose last bit counts ones
    const Ints integers = __builtin_convertvector(rounded.part[i], Ints);
    *(Few*)(out + i * kRegisterLanes) = __builtin_convertvector(integers, Few);
  }
  return (int32_t)sum(rounded);
}

// Numbers of a row that share a scale: the two halves of a group, and what tells their size.
struct Halves32 {
  Vector first, second;

  Halves32(const void* row, bool is_float32, int64_t size, int64_t from) {
    float numbers[kDepth];
    put<InFloat32<Float32>>((const char*)row + from * (is_float32 ? 4 : 2), is_float32,
                            size - from < kDepth ? size - from : kDepth, kDepth, numbers, 0);
    first = Vector::load(numbers);
    second = Vector::load(numbers + kLanes);
  }
  // A 127th of the largest number; not finite where one is not.
  float scale(float& top) const {
    const Vector zero = Vector::splat(0);
    top = largest(maximum(maximum(first, zero - first), maximum(second, zero - second)));
    return top / 127 + sum(first * zero + second * zero);
  }
};

// `Multiplier::put`: each group of a row, or the whole row, is divided by a 127th of its largest
// number and rounded. One that is not finite makes the row's products NaN.
template <bool is_whole>
void put_int8(const void* row, bool is_float32, int64_t size, int64_t depth, void* out,
              int64_t index) {
  const Int8Row x(out, index, depth);
  float top = 0, d = 0;
  if constexpr (is_whole)
    for (int64_t from = 0; from < size; from += kDepth) {
      float own_top;
      const float own = Halves32(row, is_float32, size, from).scale(own_top);
      if (!(own <= d)) d = own;  // NaN, too
      if (!__builtin_isfinite(d)) break;
      top = own_top > top ? own_top : top;
    }
  for (int64_t g = 0; g < depth / kDepth; g++) {
    const int64_t from = g * kDepth;
    Halves32 own(row, is_float32, size, from);
    if constexpr (!is_whole) d = own.scale(top);
    auto [first, second] = own;
    const Vector zero = Vector::splat(0);
    if (!__builtin_isfinite(d)) first = second = zero;  // no integer is near it
    const Vector inverse = Vector::splat(top > 1e-30f ? 127 / top : 0);
    const int32_t low = round_to_int8(first * inverse, x.q + from);
    const int32_t high = round_to_int8(second * inverse, x.q + from + kLanes);
    x.d(g) = d;
    x.sum(g) = d * (float)(low + high);
    x.half(g, 0) = low;
    x.half(g, 1) = high;
  }
}

template <class Format, bool is_whole = false>
constexpr ridgeline::Multiplier block_multiplier() {
  return {ridgeline::Activations::kInt8, put_int8<is_whole>, multiply_blocks<Format>};
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
          block_multiplier<Q6_K>()};
}

}  // namespace
