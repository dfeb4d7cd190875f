// The matrix unit of a thread.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

constexpr int kTile = 16;  // rows, and features

// GCC's intrinsics do not tell the compiler all of the memory that tiles are read from and stored
// to.
inline void settle_memory() { __asm__ volatile("" ::: "memory"); }

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void load() const {
    settle_memory();
    _tile_loadconfig(this);
  }
};

// Borrows the matrix unit: whoever used it on this thread finds its configuration, not its tiles.
class TileSession {
 public:
  TileSession() {
    _tile_storeconfig(&before_);
    settle_memory();
  }
  ~TileSession() {
    settle_memory();
    if (before_.palette)
      _tile_loadconfig(&before_);
    else
      _tile_release();
  }

 private:
  TileConfig before_;
};

}  // namespace
