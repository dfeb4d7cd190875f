// Memory that a thread keeps between calls.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace {

class Scratch {
 public:
  ~Scratch() { free(memory_); }

  // At least `bytes`, aligned to a cache line; what was there is lost.
  void* reserve(size_t bytes) {
    if (bytes > size_) {
      free(memory_);
      size_ = (bytes + 4095) / 4096 * 4096;
      memory_ = aligned_alloc(64, size_);
      if (!memory_) abort();
    }
    return memory_;
  }

  // Gives back what is too much to keep.
  void trim() {
    constexpr size_t kRetainedBytes = 64 << 20;
    if (size_ <= kRetainedBytes) return;
    free(memory_);
    memory_ = nullptr;
    size_ = 0;
  }

 private:
  void* memory_ = nullptr;
  size_t size_ = 0;
};

// Cuts a piece of memory into arrays, each on a cache line of its own.
class Carver {
 public:
  explicit Carver(void* memory) : start_((uintptr_t)memory), next_(start_) {}
  template <class T>
  T* take(int64_t count) {
    const uintptr_t array = next_;
    next_ += (count * sizeof(T) + 63) / 64 * 64;
    return (T*)array;
  }
  size_t taken() const { return next_ - start_; }

 private:
  uintptr_t start_, next_;
};

}  // namespace
