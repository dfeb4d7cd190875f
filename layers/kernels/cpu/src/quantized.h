// Quantized elements of pages as numbers: what `layers/kv_cache.py` made of them, undone.
#pragma once
#include "kernels.h"
#include "vector.h"

namespace {

using ridgeline::Stored;

// A register of words of as many bytes with their signs; GCC 12 would take vectors apart for it.
inline Ints words(const char* p) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  typedef int8_t SignedBytes __attribute__((vector_size(kRegisterLanes)));
  typedef int16_t SignedHalves __attribute__((vector_size(kRegisterBytes / 2)));
  SignedBytes bytes;
  memcpy(&bytes, p, sizeof(bytes));
  return __builtin_convertvector(__builtin_convertvector(bytes, SignedHalves), Ints);
#endif
}

// Elements of eight bits, a register of them.
template <Stored stored>
inline Floats number(Ints word) {
  if constexpr (stored == Stored::kInt8) return __builtin_convertvector(word, Floats);
  // e4m3: exponent and mantissa move into a float's, whose bias is 120 more. Without an exponent the
  // mantissa counts 2^-9: as that of a number above 2^-6, less these 2^-6.
  const Words size = (Words)word & 0x7f;
  const Floats small = (Floats)((size << 20) + (121u << 23)) - 0x1p-6f;
  const Floats usual = (Floats)((size << 20) + (120u << 23));
  return (Floats)((Words)(size < 8 ? small : usual) | ((Words)word & 0x80000000u));
}

// Sixteen elements of eight bits.
template <Stored stored>
inline Vector numbers(const char* p) {
  Vector v;
  UNROLL for (int i = 0; i < kRegisters; i++)
    v.part[i] = number<stored>(words(p + i * kRegisterLanes));
  return v;
}

// Sixteen elements of four bits, in the low ones of sixteen bytes or in the others.
template <bool high>
inline Vector halves(const char* p) {
  Vector v;
  UNROLL for (int i = 0; i < kRegisters; i++) {
    const Ints word = words(p + i * kRegisterLanes);
    v.part[i] = __builtin_convertvector((high ? word >> 4 & 15 : word & 15) - 8, Floats);
  }
  return v;
}

inline void store(const Vector& v, float* x) { v.store(x); }
inline void store(const Vector& v, uint16_t* x) { narrow(v, x); }

inline Vector scale_at(const char* p) {
  uint16_t bits;
  memcpy(&bits, p, 2);
  const uint32_t word = (uint32_t)bits << 16;
  float scale;
  memcpy(&scale, &word, 4);
  return Vector::splat(scale);
}

// A group of elements that share a scale; of four bits 32.
template <Stored stored, class Element>
inline void expand(const char* from, const Vector& scale, int64_t size, Element* out) {
  if constexpr (stored == Stored::kInt4) {
    store(halves<false>(from) * scale, out);
    store(halves<true>(from) * scale, out + kLanes);
  } else {
    int64_t h = 0;
#if defined(__AVX512BF16__)
    if constexpr (sizeof(Element) == 2)
      for (; h + 2 * kLanes <= size; h += 2 * kLanes) {
        const Floats a = (numbers<stored>(from + h) * scale).part[0];
        const Floats b = (numbers<stored>(from + h + kLanes) * scale).part[0];
        _mm512_storeu_si512(out + h, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
      }
#endif
    for (; h + kLanes <= size; h += kLanes) store(numbers<stored>(from + h) * scale, out + h);
    if (h == size) return;
    char rest[kLanes] = {};
    memcpy(rest, from + h, size - h);
    Element last[kLanes];
    store(numbers<stored>(rest) * scale, last);
    memcpy(out + h, last, (size - h) * sizeof(Element));
  }
}

}  // namespace
