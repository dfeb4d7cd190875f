// Memory that XLA allocates for a step.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
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

// Writes zeros into an array of which little may ever be read. What malloc maps is private and has no
// file: pages that are given back to Linux are zeros when they are touched again, and none before.
inline void write_zeros(void* start, int64_t bytes) {
  uintptr_t first = (uintptr_t)start;
  const uintptr_t end = first + bytes;
#if defined(__linux__)
  const uintptr_t page = sysconf(_SC_PAGESIZE);
  const uintptr_t whole = (first + page - 1) & -page, stop = end & -page;
  if (whole < stop && madvise((void*)whole, stop - whole, MADV_DONTNEED) == 0) {
    memset((void*)first, 0, whole - first);
    first = stop;
  }
#endif
  memset((void*)first, 0, end - first);
}

}  // namespace ridgeline
