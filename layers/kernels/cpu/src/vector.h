// Sixteen floats, in as many registers as the processor needs for them. Compiled once for each
// instruction set, so everything is internal to its translation unit.
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstdint>
#include <cstring>
#include <utility>

#define UNROLL _Pragma("GCC unroll 16")

namespace {

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64, kAccumulators = 24;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32, kAccumulators = 6;
#else
constexpr int kRegisterBytes = 16, kAccumulators = 6;
#endif
constexpr int kLanes = 16;
constexpr int kRegisterLanes = kRegisterBytes / 4;
constexpr int kRegisters = kLanes / kRegisterLanes;

typedef float Floats __attribute__((vector_size(kRegisterBytes)));
typedef float LooseFloats __attribute__((vector_size(kRegisterBytes), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(kRegisterBytes)));
typedef uint32_t Words __attribute__((vector_size(kRegisterBytes)));
typedef uint32_t LooseWords __attribute__((vector_size(kRegisterBytes), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(kRegisterBytes / 2)));
typedef uint16_t LooseHalves
    __attribute__((vector_size(kRegisterBytes / 2), aligned(2), may_alias));
typedef uint16_t Shorts __attribute__((vector_size(kRegisterBytes)));
typedef uint16_t LooseShorts __attribute__((vector_size(kRegisterBytes), aligned(2), may_alias));

struct Vector {
  Floats part[kRegisters];

  static Vector splat(float value) {
    Vector v;
    UNROLL for (auto& part : v.part)
      part = value - Floats{};  // exact, so no subtraction
    return v;
  }
  static Vector load(const float* p) {
    Vector v;
    UNROLL for (int i = 0; i < kRegisters; i++)
      v.part[i] = *(const LooseFloats*)(p + i * kRegisterLanes);
    return v;
  }
  void store(float* p) const {
    UNROLL for (int i = 0; i < kRegisters; i++)
      *(LooseFloats*)(p + i * kRegisterLanes) = part[i];
  }
};

#define LANEWISE(name, expression)                       \
  inline Vector name(const Vector& a, const Vector& b) { \
    Vector v;                                            \
    UNROLL for (int i = 0; i < kRegisters; i++) {        \
      const Floats x = a.part[i], y = b.part[i];         \
      v.part[i] = expression;                            \
    }                                                    \
    return v;                                            \
  }
LANEWISE(operator+, x + y)
LANEWISE(operator-, x - y)
LANEWISE(operator*, x* y)
LANEWISE(operator/, x / y)
LANEWISE(maximum, x > y ? x : y)
LANEWISE(minimum, x < y ? x : y)
#undef LANEWISE

// a b + c, rounded once: as the processor's own operation, or a compiler might fuse c's product
// instead.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
}
inline Vector multiply_add(const Vector& a, const Vector& b, const Vector& c) {
  Vector v;
  UNROLL for (int i = 0; i < kRegisters; i++)
    v.part[i] = multiply_add(a.part[i], b.part[i], c.part[i]);
  return v;
}

using Lanes = std::make_integer_sequence<int, kRegisterLanes>;

// A register whose lanes moved down by `distance`, around its end.
template <int distance, int... lane>
inline Floats rotate(Floats v, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(v, v, (lane + distance) % kRegisterLanes...);
}

constexpr auto kSum = [](Floats a, Floats b) { return a + b; };
constexpr auto kLarger = [](Floats a, Floats b) { return a > b ? a : b; };

// The registers of a vector as one: those that are half of them apart are combined, and so on.
template <class Combine>
inline Floats one_register(const Vector& v, Combine combine) {
  Floats part[kRegisters];
  UNROLL for (int i = 0; i < kRegisters; i++)
    part[i] = v.part[i];
  UNROLL for (int half = kRegisters / 2; half; half /= 2) UNROLL
    for (int i = 0; i < half; i++) part[i] = combine(part[i], part[i + half]);
  return part[0];
}

// All lanes as one, whatever the registers: those that are half of them apart are combined, and so
// on.
template <class Combine>
inline float reduce(const Vector& v, Combine combine) {
  Floats all = one_register(v, combine);
  if constexpr (kRegisterLanes == 16) all = combine(all, rotate<8>(all, Lanes()));
  if constexpr (kRegisterLanes >= 8) all = combine(all, rotate<4>(all, Lanes()));
  all = combine(all, rotate<2>(all, Lanes()));
  return combine(all, rotate<1>(all, Lanes()))[0];
}
inline float sum(const Vector& v) { return reduce(v, kSum); }
inline float largest(const Vector& v) { return reduce(v, kLarger); }

// Lanes of two registers, each with the one `distance` away: those of `a` where that bit of a
// lane's number is 0, those of `b` where it is 1.
template <int distance, class Combine, int... lane>
inline Floats merge(Floats a, Floats b, Combine combine, std::integer_sequence<int, lane...>) {
  constexpr int kSecond = kRegisterLanes;
  return combine(
      __builtin_shufflevector(a, b, (lane & distance ? kSecond + lane : lane)...),
      __builtin_shufflevector(
          a, b, (lane & distance ? kSecond + lane - distance : lane + distance)...));
}
template <int ROWS, int distance, class Combine>
inline void merge_rows(Floats* rows, Combine combine) {
  constexpr int kMerged = ROWS < distance ? ROWS : distance;
  UNROLL for (int r = 0; r < kMerged; r++)
    rows[r] = merge<distance>(rows[r], rows[ROWS > distance ? r + distance : r], combine, Lanes());
  if constexpr (distance > 1) merge_rows<kMerged, distance / 2>(rows, combine);
}

// A register of the `reduce` of ROWS rows, a power of two of them.
template <int ROWS, class Combine>
inline Floats reduce_register(const float (*rows)[kLanes], Combine combine) {
  Floats all[ROWS];
  UNROLL for (int r = 0; r < ROWS; r++) all[r] = one_register(Vector::load(rows[r]), combine);
  merge_rows<ROWS, kRegisterLanes / 2>(all, combine);
  return all[0];
}

// `reduce` of the first `count` of sixteen rows of sixteen, which share operations and have the
// same bits.
template <class Combine>
inline Vector reduce_rows(const float (&rows)[kLanes][kLanes], int64_t count, Combine combine) {
  constexpr int kFew = 4;  // query heads that many models have for each KV head
  Vector out = Vector::splat(0);
  if (count <= kFew)
    out.part[0] = reduce_register<kFew>(rows, combine);
  else
    UNROLL for (int i = 0; i < kRegisters; i++)
      out.part[i] = reduce_register<kRegisterLanes>(rows + i * kRegisterLanes, combine);
  return out;
}

// e^x for x <= 0: 0 below -87, exactly 1 at 0, NaN for NaN; Cody and Waite's reduction, Cephes'
// polynomial.
inline Vector exponential(const Vector& v) {
  Vector out;
  UNROLL for (int i = 0; i < kRegisters; i++) {
    const Floats floor = Floats{} - 87.f;
#if defined(__AVX512F__)
    const Floats x = v.part[i];  // the power of two leaves out what is below the floor
#else
    const Floats x = v.part[i] < floor ? floor : v.part[i];
#endif
    const Floats shifted = x * 1.44269504f + 12582912.f;
    const Floats n = shifted - 12582912.f;
    Floats r = n * -0.693359375f + x;
    r = n * 2.12194440e-4f + r;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.f);
#if defined(__AVX512F__)
    const __mmask16 is_above = _mm512_cmp_ps_mask((__m512)x, (__m512)floor, _CMP_NLT_UQ);
    out.part[i] = (Floats)_mm512_maskz_scalef_ps(is_above, (__m512)p, (__m512)n);
#else
    const Ints exponent = ((Ints)shifted << 23) + 0x3f800000;
    out.part[i] = v.part[i] < floor ? Floats{} : p * (Floats)exponent;
#endif
  }
  return out;
}

// c tanh(x / c), for c > 0.
inline Vector soft_cap(const Vector& v, float cap) {
  constexpr int32_t kSign = INT32_MIN;
  Vector out;
  UNROLL for (int i = 0; i < kRegisters; i++)
    out.part[i] = (Floats)((Ints)v.part[i] | kSign) * (2 / cap);  // -2 |x| / c
  const Vector e = exponential(out);
  UNROLL for (int i = 0; i < kRegisters; i++) {
    const Floats size = cap * (1.f - e.part[i]) / (1.f + e.part[i]);
    out.part[i] = (Floats)((Ints)size | ((Ints)v.part[i] & kSign));
  }
  return out;
}

// The lanes of `v` whose bit is set, and `other` elsewhere.
inline Vector select(uint32_t bits, const Vector& v, float other) {
  Vector out;
  UNROLL for (int i = 0; i < kRegisters; i++) {
    Ints bit;
    UNROLL for (int lane = 0; lane < kRegisterLanes; lane++)
      bit[lane] = 1 << (i * kRegisterLanes + lane);
    out.part[i] = (((Ints{} + (int32_t)bits) & bit) != 0) ? v.part[i] : Floats{} + other;
  }
  return out;
}

// Pairs of bfloat16 in 32-bit words: the first of each as floats, and the second.
inline Vector first_of_pairs(const Words (&words)[kRegisters]) {
  Vector v;
  UNROLL for (int i = 0; i < kRegisters; i++)
    v.part[i] = (Floats)(words[i] << 16);
  return v;
}
inline Vector second_of_pairs(const Words (&words)[kRegisters]) {
  Vector v;
  UNROLL for (int i = 0; i < kRegisters; i++)
    v.part[i] = (Floats)(words[i] & 0xffff0000u);
  return v;
}

// Sixteen floats as bfloat16, rounded to even; NaN stays NaN where the last bits are not all set.
inline void narrow(const Vector& v, uint16_t* p) {
  UNROLL for (int i = 0; i < kRegisters; i++) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v.part[i]));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    vst1_u16(p + i * kRegisterLanes, vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)v.part[i])));
#else
    const Words word = (Words)v.part[i];
    *(LooseHalves*)(p + i * kRegisterLanes) =
        __builtin_convertvector((word + 0x7fff + (word >> 16 & 1)) >> 16, Halves);
#endif
  }
}

// Two vectors, one behind the other.
inline void narrow(const Vector& a, const Vector& b, uint16_t* p) {
#if defined(__AVX512BF16__)
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh((__m512)b.part[0], (__m512)a.part[0]));
#else
  narrow(a, p);
  narrow(b, p + kLanes);
#endif
}

// Sixteen bfloat16 as floats.
inline Vector widen(const uint16_t* p) {
  Vector v;
  UNROLL for (int i = 0; i < kRegisters; i++) {
    const uint16_t* const halves = p + i * kRegisterLanes;
#if defined(__AVX512F__)  // one operation, of which GCC's conversion makes four
    const Words words = (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)halves));
#elif defined(__AVX2__)
    const Words words = (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)halves));
#else
    const Words words = __builtin_convertvector(*(const LooseHalves*)halves, Words);
#endif
    v.part[i] = (Floats)(words << 16);
  }
  return v;
}

}  // namespace
