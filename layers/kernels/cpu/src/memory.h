// Memory that XLA allocates for a step.
#pragma once
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ridgeline {

// Asks for large pages under a large array that is about to be written. XLA allocates a step's
// intermediates anew, and malloc maps what exceeds 32 MB anew each time: every 4 KB of it would
// cost an interrupt, which takes longer than writing them.
inline void prefer_large_pages(void* start, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 2 << 20;
  constexpr int64_t kLarge = 8 << 20;
  if (bytes < kLarge) return;
  const uintptr_t first = ((uintptr_t)start + kPage - 1) & -kPage;
  const uintptr_t stop = ((uintptr_t)start + bytes) & -kPage;
  madvise((void*)first, stop - first, MADV_HUGEPAGE);
#endif
}

}  // namespace ridgeline
