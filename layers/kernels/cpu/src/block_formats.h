// Integers and scales of each format of blocks (blocks.h), sixteen features at a time.
#pragma once
#include <type_traits>

#include "blocks.h"
#include "vector.h"

namespace {

using ridgeline::BlockLayout;

// Sixteen words of four bytes.
struct Words16 {
  Words part[kRegisters];
};

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

// A register's lanes of bytes, signed or not, as words; GCC 12 would take vectors apart for it.
template <class Byte>
inline Ints words_of(const uint8_t* p) {
  constexpr bool is_signed = std::is_signed_v<Byte>;
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  return (Ints)(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64((const __m128i*)p);
  return (Ints)(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
  typedef Byte Few __attribute__((vector_size(kRegisterLanes), aligned(1), may_alias));
  return __builtin_convertvector(*(const Few*)p, Ints);
#endif
}

// The four bits from SHIFT on of sixteen bytes, as floats.
template <int SHIFT>
inline Vector widen_nibbles(const uint8_t* p) {
  Vector v;
  UNROLL for (int i = 0; i < kRegisters; i++)
    v.part[i] =
        __builtin_convertvector(words_of<uint8_t>(p + i * kRegisterLanes) >> SHIFT & 15, Floats);
  return v;
}

// Sixteen bytes, signed or not, as floats.
template <class Byte>
inline Vector widen_bytes(const uint8_t* p) {
  Vector v;
  UNROLL for (int i = 0; i < kRegisters; i++)
    v.part[i] = __builtin_convertvector(words_of<Byte>(p + i * kRegisterLanes), Floats);
  return v;
}

inline Words16 load_words(const uint8_t* p) {
  Words16 w;
  UNROLL for (int i = 0; i < kRegisters; i++)
    w.part[i] = *(const LooseWords*)(p + i * kRegisterBytes);
  return w;
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
  static void scales(const uint8_t* group, const uint8_t*, GroupScales& out) {
    out.d = widen_halves(group);
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
  static void scales(const uint8_t* group, const uint8_t*, GroupScales& out) {
    out.d = widen_halves(group);
  }
};

struct Q4_0 : Nibbles {
  static constexpr BlockLayout kLayout = ridgeline::kQ4_0;
  static constexpr bool kHasMinimum = false;
  static constexpr int kOffset = 8;
  static void scales(const uint8_t* group, const uint8_t*, GroupScales& out) {
    out.d = widen_halves(group);
  }
};

struct Q4_1 : Nibbles {
  static constexpr BlockLayout kLayout = ridgeline::kQ4_1;
  static constexpr bool kHasMinimum = true;
  static constexpr int kOffset = 0;
  static void scales(const uint8_t* group, const uint8_t*, GroupScales& out) {
    out.d = widen_halves(group);
  }
  static Vector minimum(const uint8_t* group, const uint8_t*) { return widen_halves(group + 32); }
};

struct Q4_K : Nibbles {
  static constexpr BlockLayout kLayout = ridgeline::kQ4_K;
  static constexpr bool kHasMinimum = true;
  static constexpr int kOffset = 0;
  static void scales(const uint8_t* group, const uint8_t* shared, GroupScales& out) {
    out.d = widen_halves(shared) * widen_bytes<uint8_t>(group);
  }
  static Vector minimum(const uint8_t* group, const uint8_t* shared) {
    return Vector::splat(0) - widen_halves(shared + 32) * widen_bytes<uint8_t>(group + 16);
  }
};

struct Q5_K : Q4_K {
  static constexpr BlockLayout kLayout = ridgeline::kQ5_K;
  static Words16 integers(const uint8_t* group, int quad) { return Q5_0::integers(group, quad); }
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
  static void scales(const uint8_t* group, const uint8_t* shared, GroupScales& out) {
    const Vector d = widen_halves(shared);
    out.d = d * widen_bytes<int8_t>(group);
    out.second = d * widen_bytes<int8_t>(group + 16);
  }
};

struct Twos {
  static constexpr bool kIsSigned = false;
  static Words16 integers(const uint8_t* group, int quad) {
    Words16 w = load_words(group + quad / 4 * 64);
    UNROLL for (auto& part : w.part)
      part = part >> quad % 4 * 2 & 0x03030303u;
    return w;
  }
};

struct Threes : Twos {
  static constexpr bool kHasHalves = false;
  static Words16 integers(const uint8_t* group, int quad) {
    const Words16 upper = load_words(group + 128);
    Words16 w = Twos::integers(group, quad);
    UNROLL for (int i = 0; i < kRegisters; i++)
      w.part[i] |= (upper.part[i] >> quad & 0x01010101u) << 2;
    return w;
  }
};

struct Q3_K : Q6_K {
  static constexpr BlockLayout kLayout = ridgeline::kQ3_K;
  static constexpr int kOffset = 4;
  static Words16 integers(const uint8_t* group, int quad) { return Threes::integers(group, quad); }
};

struct Q2_K : Twos {
  static constexpr BlockLayout kLayout = ridgeline::kQ2_K;
  static constexpr bool kHasMinimum = true, kHasHalves = true;
  static constexpr int kOffset = 0;
  static void scales(const uint8_t* group, const uint8_t* shared, GroupScales& out) {
    const Vector d = widen_halves(shared);
    out.d = d * widen_nibbles<0>(group);
    out.second = d * widen_nibbles<0>(group + 16);
  }
  static Vector minimum(const uint8_t* half, const uint8_t* shared) {
    return Vector::splat(0) - widen_halves(shared + 32) * widen_nibbles<4>(half);
  }
};

// The bytes of a table of sixteen that codes stand for.
inline Words16 look_up(Words16 codes, const void* table) {
  UNROLL for (auto& part : codes.part) {
#if defined(__AVX512F__)
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table));
    part = (Words)_mm512_shuffle_epi8(bytes, (__m512i)part);
#elif defined(__AVX2__)
    const __m256i bytes = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table));
    part = (Words)_mm256_shuffle_epi8(bytes, (__m256i)part);
#else
    part = (Words)vqtbl1q_u8(vld1q_u8((const uint8_t*)table), (uint8x16_t)part);
#endif
  }
  return codes;
}

struct IQ4_NL {
  static constexpr BlockLayout kLayout = ridgeline::kIQ4_NL;
  static constexpr bool kIsSigned = true, kHasMinimum = false, kHasHalves = false;
  static constexpr int kOffset = 0;
  static Words16 integers(const uint8_t* group, int quad) {
    return look_up(Nibbles::integers(group, quad), ridgeline::kIQ4);
  }
  static void scales(const uint8_t* group, const uint8_t*, GroupScales& out) {
    out.d = widen_halves(group);
  }
};

struct IQ4_XS : IQ4_NL {
  static constexpr BlockLayout kLayout = ridgeline::kIQ4_XS;
  static void scales(const uint8_t* group, const uint8_t* shared, GroupScales& out) {
    out.d = widen_halves(shared) * widen_bytes<int8_t>(group);
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
    return look_up(Nibbles::integers(group, quad), kNumbers);
  }
  static void scales(const uint8_t* group, const uint8_t*, GroupScales& out) {
    UNROLL for (int i = 0; i < kRegisters; i++) {
      const Ints e = words_of<uint8_t>(group + i * kRegisterLanes) - 1;  // of 2^(e - 128)
      out.d.part[i] = (Floats)((e > 0 ? e : Ints{}) << 23);
    }
  }
};

}  // namespace
