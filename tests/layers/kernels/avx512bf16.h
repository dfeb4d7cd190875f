// Stands in for AVX512_BF16 on processors without it: what its instructions do, by AVX-512. To be
// included before all else. (A sum that only rounding makes normal is taken for a denormal.)
#pragma once
#include <immintrin.h>

static inline __m512 without_denormals(__m512 v) {
  const __m512 size = _mm512_abs_ps(v), least = _mm512_set1_ps(0x1p-126f);
  const __m512i sign = _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32((int)0x80000000));
  const __mmask16 is_small = _mm512_cmp_ps_mask(size, least, _CMP_LT_OQ);
  return _mm512_mask_blend_ps(is_small, v, _mm512_castsi512_ps(sign));
}

static inline __m512 plus_product(__m512 sum, __m512i a, __m512i b) {
  const __m512 product_of[] = {without_denormals(_mm512_castsi512_ps(a)),
                               without_denormals(_mm512_castsi512_ps(b))};
  return without_denormals(_mm512_fmadd_ps(product_of[0], product_of[1], without_denormals(sum)));
}

// The second elements of pairs come first.
static inline __m512 stand_in_dpbf16(__m512 sum, __m512i a, __m512i b) {
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
  sum = plus_product(sum, _mm512_and_si512(a, upper), _mm512_and_si512(b, upper));
  return plus_product(sum, _mm512_slli_epi32(a, 16), _mm512_slli_epi32(b, 16));
}

static inline __m256i stand_in_cvtneps(__m512 v) {
  const __m512i bits = _mm512_castps_si512(without_denormals(v));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
  const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(is_nan, rounded, quiet));
}

static inline __m512i stand_in_cvtne2ps(__m512 high, __m512 low) {
  const __m512i narrow = _mm512_castsi256_si512(stand_in_cvtneps(low));
  return _mm512_inserti64x4(narrow, stand_in_cvtneps(high), 1);
}

#define __AVX512BF16__ 1
#define _mm512_cvtne2ps_pbh(high, low) stand_in_cvtne2ps(high, low)
#define _mm512_dpbf16_ps(sum, a, b) stand_in_dpbf16(sum, (__m512i)(a), (__m512i)(b))
#define _mm512_cvtneps_pbh(v) stand_in_cvtneps(v)
