// What a processor claims: AVX512_BF16, whatever it has, and no tiles. To be included before all
// else.
#pragma once
#include <cpuid.h>

static inline int claimed(unsigned leaf, unsigned part, unsigned* a, unsigned* b, unsigned* c,
                          unsigned* d) {
  const int has_leaf = __get_cpuid_count(leaf, part, a, b, c, d);
  if (leaf == 7 && part == 0) *d &= ~(1u << 22 | 1u << 24 | 1u << 25);
  if (leaf == 7 && part == 1) *a |= 1u << 5;
  return has_leaf;
}

#define __get_cpuid_count claimed
