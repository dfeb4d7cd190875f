// A block of quantized keys and of values as strips of bytes. What multiplies them, a group of a
// query or a row's weights, becomes integers of two digits of base 256, so their sums are exact:
// they have no order, whatever adds them.
#pragma once
#include <type_traits>

#include "kernels.h"
#include "number_block.h"
#include "product.h"
#include "quantized.h"
#include "scratch.h"
#include "strips.h"
#include "vector.h"

#if defined(__AVX512VNNI__)
namespace {

// Rows of integers by strips of bytes without a sign, [depth / 4, 16 columns, 4].
struct IntegerProduct {
  const uint8_t* strips;
  int64_t num_strips, depth;
  const int8_t* digits;   // [rows, 2, depth], the upper ones first
  const float* scales;    // [rows]
  const int32_t* excess;  // [rows], of the sums
  int64_t num_rows;
  const float* column_scales;  // [16 num_strips], or null: 1
  float* y;                    // rows `y_stride` floats apart
  int64_t y_stride;
  bool accumulates;

  // Sixteen columns of a row, of the sums of both digits.
  void put(Ints upper, Ints lower, int64_t row, int64_t strip) const {
    const Words sum = ((Words)upper << 8) + (Words)lower - (uint32_t)excess[row];
    const Floats exact = __builtin_convertvector((Ints)sum, Floats), scale = scales[row] - Floats{};
    float* const to = y + row * y_stride + strip * ridgeline::kStrip;
    const Floats before = accumulates ? *(const LooseFloats*)to : Floats{};
    if (column_scales)
      *(LooseFloats*)to = multiply_add(
          exact * scale, *(const LooseFloats*)(column_scales + strip * ridgeline::kStrip), before);
    else
      *(LooseFloats*)to = multiply_add(exact, scale, before);
  }
};

// sums + the products of four bytes and the same four digits for all lanes.
inline Ints add_products(Ints sums, Words bytes, const int8_t* digits) {
  int32_t four;
  memcpy(&four, digits, sizeof four);
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)bytes, _mm512_set1_epi32(four));
}

template <int ROWS, int STRIPS>
void integer_tile(const IntegerProduct& p, int64_t strip, int64_t row) {
  const uint8_t* const w = p.strips + strip * p.depth * kStrip;
  const int8_t* const x = p.digits + row * 2 * p.depth;
  Ints upper[ROWS][STRIPS], lower[ROWS][STRIPS];
  UNROLL for (int r = 0; r < ROWS; r++) UNROLL
    for (int s = 0; s < STRIPS; s++) upper[r][s] = lower[r][s] = Ints{};
  for (int64_t k = 0; k < p.depth; k += 4) {
    Words bytes[STRIPS];
    UNROLL for (int s = 0; s < STRIPS; s++)
      bytes[s] = *(const LooseWords*)(w + (s * p.depth + k) * kStrip);
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL
      for (int s = 0; s < STRIPS; s++) {
        upper[r][s] = add_products(upper[r][s], bytes[s], x + 2 * r * p.depth + k);
        lower[r][s] = add_products(lower[r][s], bytes[s], x + (2 * r + 1) * p.depth + k);
      }
  }
  UNROLL for (int r = 0; r < ROWS; r++) UNROLL
    for (int s = 0; s < STRIPS; s++) p.put(upper[r][s], lower[r][s], row + r, strip + s);
}

constexpr int kMostIntegerRows = 6;

template <int ROWS = kMostIntegerRows>
void integer_tiles(int64_t rows, const IntegerProduct& p, int64_t row) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return integer_tiles<ROWS - 1>(rows, p, row);
  constexpr int kStrips = ROWS <= 3 ? 4 : 2;
  int64_t strip = 0;
  for (; strip + kStrips <= p.num_strips; strip += kStrips)
    integer_tile<ROWS, kStrips>(p, strip, row);
  for (; strip < p.num_strips; strip++) integer_tile<ROWS, 1>(p, strip, row);
}

// By AVX-512's products of four bytes (VNNI).
struct IntegersByVnni {
  static constexpr int64_t kNearRows = 32;  // more would not fit the first cache

  static void multiply(const IntegerProduct& p) {
    const int64_t groups = (p.num_rows + kMostIntegerRows - 1) / kMostIntegerRows;
    for (int64_t g = 0; g < groups; g++) {
      const int64_t row = p.num_rows * g / groups;
      integer_tiles(p.num_rows * (g + 1) / groups - row, p, row);
    }
  }
};

// How much more a block's bytes, none of which has a sign, are than what they say.
constexpr uint32_t excess_of(Stored stored) { return stored == Stored::kInt4 ? 8 : 128; }

// Numbers as `depth` integers of two digits, and the sum of these. `*scale` is the largest of the
// numbers, and becomes what they are multiples of. Sums of the products of `size` integers with
// bytes fit into 32 bits.
inline uint32_t put_digits(const float* numbers, int64_t size, int64_t depth, float* scale,
                           int8_t* digits) {
  constexpr int64_t kMost = 127 * 256 + 127;
  const int64_t fitting = INT32_MAX / (128 * size);
  const float top = *scale, largest_integer = (float)(fitting < kMost ? fitting : kMost);
  const Vector inverse = Vector::splat(top > 1e-30f ? largest_integer / top : 0);
  Ints total = {};
  UNROLL for (int64_t i = 0; i < depth; i += kLanes) {
    const Vector x = Vector::load(numbers + i) * inverse;
    const __m512i integers = _mm512_cvtps_epi32((__m512)x.part[0]);
    const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(integers, _mm512_set1_epi32(128)), 8);
    _mm_storeu_si128((__m128i*)(digits + i), _mm512_cvtepi32_epi8(upper));
    _mm_storeu_si128((__m128i*)(digits + depth + i), _mm512_cvtepi32_epi8(integers));
    total += (Ints)integers;
  }
  *scale = top / largest_integer;
  return (uint32_t)_mm512_reduce_add_epi32((__m512i)total);
}

// Words of int8 as bytes without a sign, or of the lower and of the upper four bits of each byte.
template <Stored stored>
inline void put_unsigned(Words bytes, uint8_t* out, [[maybe_unused]] uint8_t* upper) {
  if constexpr (stored == Stored::kInt4) {
    *(LooseWords*)out = bytes & 0x0f0f0f0fu;
    *(LooseWords*)upper = bytes >> 4 & 0x0f0f0f0fu;
  } else {
    *(LooseWords*)out = bytes ^ 0x80808080u;
  }
}

constexpr int64_t kLine = 64;  // bytes of a line of the cache

inline __m128i load_sixteen(const char* p) { return _mm_loadu_si128((const __m128i*)p); }

inline __m512i four_lanes(const char* a, const char* b, const char* c, const char* d) {
  __m512i four = _mm512_castsi128_si512(load_sixteen(a));
  four = _mm512_inserti32x4(four, load_sixteen(b), 1);
  four = _mm512_inserti32x4(four, load_sixteen(c), 2);
  return _mm512_inserti32x4(four, load_sixteen(d), 3);
}

// Sixteen bytes of sixteen tokens, turned: a register for each word.
inline void turn_chunk(const char* const* rows, int64_t at, __m512i (&words)[4]) {
  __m512i four[4];  // lane l of register i: token 4 l + i
  UNROLL for (int i = 0; i < 4; i++)
    four[i] = four_lanes(rows[i] + at, rows[4 + i] + at, rows[8 + i] + at, rows[12 + i] + at);
  const __m512i a = _mm512_unpacklo_epi32(four[0], four[1]);
  const __m512i b = _mm512_unpackhi_epi32(four[0], four[1]);
  const __m512i c = _mm512_unpacklo_epi32(four[2], four[3]);
  const __m512i d = _mm512_unpackhi_epi32(four[2], four[3]);
  words[0] = _mm512_unpacklo_epi64(a, c);
  words[1] = _mm512_unpackhi_epi64(a, c);
  words[2] = _mm512_unpacklo_epi64(b, d);
  words[3] = _mm512_unpackhi_epi64(b, d);
}

// The same of keys, as strips have them.
template <Stored stored>
inline void turn_keys(const char* const* keys, int64_t at, uint8_t* out) {
  constexpr int kWord = 4 * kLanes;  // bytes of the sixteen keys
  __m512i words[4];
  turn_chunk(keys, at, words);
  UNROLL for (int k = 0; k < 4; k++)
    put_unsigned<stored>((Words)words[k], out + k * kWord, out + (4 + k) * kWord);
}

// A block of keys as strips of bytes, those of each group by themselves, [groups, 4, depth / 4, 16,
// 4]; what is behind a group's size is arbitrary. What is packed next is fetched meanwhile.
template <Stored stored>
void pack_bytes_of_keys(Place keys, Place next, Groups groups, uint8_t* out) {
  constexpr int64_t kChunk = 16;  // bytes; of int4 these are a group
  const int64_t depth = groups.depth();
  const int64_t size = stored == Stored::kInt4 ? kChunk : groups.size;
  for (int first = 0; first < kBlock; first += kLanes) {
    for (int64_t byte = 0; byte < groups.count * size; byte += kLine) UNROLL
      for (int s = 0; s < kLanes; s++) __builtin_prefetch(next[first + s] + byte, 0, 3);
    for (int64_t g = 0; g < groups.count; g++) {
      uint8_t* to = out + (g * kBlock + first) * depth;
      int64_t byte = 0;
      for (; byte + kChunk <= size; byte += kChunk, to += kChunk * kLanes)
        turn_keys<stored>(keys.rows + first, keys.at + g * size + byte, to);
      if (stored == Stored::kInt4 || byte == size) continue;
      char tails[kLanes][kChunk] = {};
      const char* rows[kLanes];
      for (int s = 0; s < kLanes; s++) {
        memcpy(tails[s], keys[first + s] + g * size + byte, size - byte);
        rows[s] = tails[s];
      }
      uint8_t turned[kChunk * kLanes];
      turn_keys<Stored::kInt8>(rows, 0, turned);
      memcpy(to, turned, padded(size - byte, 4) * kLanes);
    }
  }
}

// A block of values as strips of bytes over the keys, [width / 16, 64 / 4, 16, 4].
template <Stored stored>
void pack_bytes_of_values(Place values, Place next, int64_t width, uint8_t* out) {
  constexpr int64_t kStripSize = kBlock * kLanes, kStrips = stored == Stored::kInt4 ? 2 : 1;
  const int64_t bytes = width / kStrips;
  // Words of four keys come side by side, then their bytes.
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i word_order = _mm512_cvtepi8_epi32(order);
  const __m512i byte_order = _mm512_broadcast_i32x4(order);
  for (int s = 0; s < kBlock; s += 4) {
    uint8_t* to = out + s * kLanes;
    auto put = [&](const char* a, const char* b, const char* c, const char* d) {
      const __m512i words = _mm512_permutexvar_epi32(word_order, four_lanes(a, b, c, d));
      put_unsigned<stored>((Words)_mm512_shuffle_epi8(words, byte_order), to, to + kStripSize);
      to += kStrips * kStripSize;
    };
    for (int64_t byte = 0; byte < bytes; byte += kLine) UNROLL
      for (int i = 0; i < 4; i++) __builtin_prefetch(next[s + i] + byte, 0, 3);
    const char *const a = values[s], *const b = values[s + 1], *const c = values[s + 2],
                     *const d = values[s + 3];
    int64_t byte = 0;
    for (; byte + kLanes <= bytes; byte += kLanes) put(a + byte, b + byte, c + byte, d + byte);
    if (byte == bytes) continue;
    char tails[4][kLanes] = {};
    for (int i = 0; i < 4; i++) memcpy(tails[i], values[s + i] + byte, bytes - byte);
    put(tails[0], tails[1], tails[2], tails[3]);
  }
}

// Elements of a row, at least, so that what is read before its scales is its own.
constexpr int64_t kLeastIntegerBytes = 16;

// All scales that a block's tokens have, [scales, 64]: the `count` bfloat16 behind the elements of
// rows of so many bytes. They are turned as words of two, from the rows' ends on.
inline void turn_scales(const char* const* rows, int64_t row_bytes, int64_t count, float* out) {
  constexpr int kPerChunk = 8;
  const int64_t chunks = (count + kPerChunk - 1) / kPerChunk;
  const int64_t before = chunks * kPerChunk - count;  // what is no scale, in the first chunk
  for (int first = 0; first < kBlock; first += kLanes)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
      __m512i words[4];
      turn_chunk(rows + first, row_bytes - 2 * kPerChunk * (chunks - chunk), words);
      UNROLL for (int k = 0; k < kPerChunk; k++) {
        const int64_t scale = chunk * kPerChunk + k - before;
        const Words word = (Words)words[k / 2];
        if (scale >= 0)
          *(LooseWords*)(out + scale * kBlock + first) = k % 2 ? word & 0xffff0000u : word << 16;
      }
    }
}

// `NumberBlock` of int8 and int4; `Multiplier` adds up the integers.
template <class Multiplier>
class IntegerBlock {
 public:
  static constexpr int64_t kQueryBytes = 2;  // of an element: bfloat16
  static constexpr int64_t kNearRows = Multiplier::kNearRows;

  explicit IntegerBlock(const ItemShape& shape) : s_(shape) {}

  void carve(Carver& carver) {
    const int64_t q_rows = s_.heads * s_.rows, key_groups = s_.latent.count + s_.keyed.count;
    q_ = carver.take<int8_t>(q_rows * 2 * s_.quantized_depth);
    q_scales_ = carver.take<float>(q_rows * key_groups);
    q_excess_ = carver.take<int32_t>(q_rows * key_groups);
    weights_ = carver.take<int8_t>(kNearRows * 2 * kBlock);
    weight_scales_ = carver.take<float>(kNearRows);
    weight_excess_ = carver.take<int32_t>(kNearRows);
    keys_ = carver.take<uint8_t>(kBlock * s_.quantized_depth);
    values_ = carver.take<uint8_t>(kBlock * padded(s_.a.value_width, kDepth));
    scales_ = carver.take<float>(kBlock * s_.a.num_scales());
    scaled_ = carver.take<float>(kNearRows * kBlock);
    numbers_ = carver.take<float>(padded(s_.a.key_width, kDepth));
  }

  void put_query(int64_t head, int64_t row, const void* query) {
    int64_t g = 0;
    s_.each_group([&](int64_t first, int64_t size, int64_t depth, int64_t before) {
      const KeyGroup group = key_group(head, g++, before, depth);
      put<InFloat32<Bfloat16>>((const uint16_t*)query + first, false, size, depth, numbers_, 0);
      float top = 0, sign = 0;  // NaN where something is not finite
      for (int64_t i = 0; i < size; i++) {
        const float magnitude = __builtin_fabsf(numbers_[i]);
        top = magnitude > top ? magnitude : top;
        sign += magnitude * 0;
      }
      group.scales[row] = top;
      const uint32_t total =
          put_digits(numbers_, size, depth, group.scales + row, group.q + row * 2 * depth);
      group.excess[row] = (int32_t)(total * excess_of(s_.a.stored));
      group.scales[row] += sign;
    });
  }

  void start_block(const char* const* rows) {
    turn_scales(rows, row_bytes_, s_.a.num_scales(), scales_);
  }

  void pack(const HeadPlaces& current, const HeadPlaces& next) {
    auto pack_as = [&](auto stored) {
      constexpr Stored kStored = decltype(stored)::value;
      pack_bytes_of_keys<kStored>(current.keys, next.keys, s_.latent, keys_);
      pack_bytes_of_keys<kStored>(current.keyed, next.keyed, s_.keyed,
                                  keys_ + kBlock * s_.latent.count * s_.latent.depth());
      pack_bytes_of_values<kStored>(current.values, next.values, s_.a.value_width, values_);
    };
    if (s_.a.stored == Stored::kInt4)
      pack_as(std::integral_constant<Stored, Stored::kInt4>());
    else
      pack_as(std::integral_constant<Stored, Stored::kInt8>());
    if (next.keys.rows != current.keys.rows)
      for (int s = 0; s < kBlock; s++) __builtin_prefetch(next.key_scales[s], 0, 3);
    key_scales_ = scales_ + (current.key_scales.at - scales_at_) / 2 * kBlock;
    value_scales_ = scales_ + (current.value_scales.at - scales_at_) / 2 * kBlock;
  }

  void score(int64_t head, int64_t first, int64_t count, float* scores) {
    int64_t g = 0;
    s_.each_group([&](int64_t, int64_t, int64_t depth, int64_t before) {
      const KeyGroup part = key_group(head, g, before, depth);
      Multiplier::multiply({keys_ + before * kBlock, kBlock / kLanes, depth,
                            part.q + first * 2 * depth, part.scales + first, part.excess + first,
                            count, key_scales_ + g * kBlock, scores, kBlock, g > 0});
      g++;
    });
  }

  void put_weights(const Vector (&weights)[kBlock / kLanes], int64_t row, float* scores) {
    UNROLL for (int i = 0; i < kBlock / kLanes; i++)
      weights[i].store(scores + row * kBlock + i * kLanes);
  }

  void add_values(const float* weights, int64_t count, bool accumulates, float* out) {
    for (int64_t g = 0; g < s_.valued.count; g++) {
      Vector scales[kBlock / kLanes], signs = Vector::splat(0);
      UNROLL for (int i = 0; i < kBlock / kLanes; i++) {
        scales[i] = Vector::load(value_scales_ + g * kBlock + i * kLanes);
        signs = multiply_add(scales[i], Vector::splat(0), signs);
      }
      const float sign = sum(signs);
      for (int64_t r = 0; r < count; r++) {
        const auto scaled = [&](int i) {
          return Vector::load(weights + r * kBlock + i * kLanes) * scales[i];
        };
        Vector top = Vector::splat(0);
        UNROLL for (int i = 0; i < kBlock / kLanes; i++) {
          scaled(i).store(scaled_ + r * kBlock + i * kLanes);
          top = maximum(scaled(i), top);
        }
        weight_scales_[r] = largest(top);
      }
      for (int64_t r = 0; r < count; r++) {
        const uint32_t total = put_digits(scaled_ + r * kBlock, kBlock, kBlock, weight_scales_ + r,
                                          weights_ + r * 2 * kBlock);
        weight_excess_[r] = (int32_t)(total * excess_of(s_.a.stored));
        weight_scales_[r] += sign;
      }
      const int64_t first = g * s_.valued.size;
      Multiplier::multiply({values_ + first * kBlock, padded(s_.valued.size, kLanes) / kLanes,
                            kBlock, weights_, weight_scales_, weight_excess_, count, nullptr,
                            out + first, s_.out_stride, accumulates});
    }
  }

 private:
  // What a head's rows have of a group of the key.
  struct KeyGroup {
    int8_t* q;
    float* scales;
    int32_t* excess;
  };
  KeyGroup key_group(int64_t head, int64_t g, int64_t before, int64_t depth) const {
    const int64_t first = (head * (s_.latent.count + s_.keyed.count) + g) * s_.rows;
    return {q_ + (head * s_.quantized_depth + before) * s_.rows * 2, q_scales_ + first,
            q_excess_ + first};
  }

  const ItemShape& s_;
  const int64_t row_bytes_ = s_.a.row_bytes(), scales_at_ = s_.a.bytes(s_.a.row_width());
  int8_t *q_, *weights_;
  float *q_scales_, *weight_scales_, *scales_, *key_scales_, *value_scales_, *scaled_, *numbers_;
  int32_t *q_excess_, *weight_excess_;
  uint8_t *keys_, *values_;
};

}  // namespace
#endif
