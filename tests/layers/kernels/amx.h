// Stands in for AMX on processors without it: what its instructions do, one number at a time. To be
// included before all else.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

struct StandInTiles {
  uint8_t config[64];
  struct {
    alignas(64) uint8_t bytes[16][64];
  } tile[8];

  int rows(int t) const { return config[48 + t]; }
  int row_bytes(int t) const { return config[16 + 2 * t] | config[17 + 2 * t] << 8; }
  void load_config(const void* from) {
    memset(this, 0, sizeof *this);
    memcpy(config, from, 64);
  }
  void load(int t, const void* base, int64_t stride) {
    memset(&tile[t], 0, sizeof tile[t]);
    for (int r = 0; r < rows(t); r++)
      memcpy(tile[t].bytes[r], (const char*)base + r * stride, row_bytes(t));
  }
  void store(int t, void* base, int64_t stride) const {
    for (int r = 0; r < rows(t); r++)
      memcpy((char*)base + r * stride, tile[t].bytes[r], row_bytes(t));
  }
  // Sums (of type Sum) += of(words of a and of b), in the order of depth.
  template <class Sum, class Of>
  void multiply(int sums, int a, int b, Of of) {
    for (int r = 0; r < rows(sums); r++)
      for (int column = 0; column < row_bytes(sums) / 4; column++) {
        Sum sum;
        memcpy(&sum, tile[sums].bytes[r] + 4 * column, 4);
        for (int k = 0; k < row_bytes(a) / 4; k++)
          sum = of(sum, tile[a].bytes[r] + 4 * k, tile[b].bytes[k] + 4 * column);
        memcpy(tile[sums].bytes[r] + 4 * column, &sum, 4);
      }
  }
  template <class A, class B>
  void multiply_bytes(int sums, int a, int b) {
    multiply<int32_t>(sums, a, b, [](int32_t sum, const uint8_t* x, const uint8_t* y) {
      for (int i = 0; i < 4; i++) sum += (int32_t)(A)x[i] * (B)y[i];
      return sum;
    });
  }
  void multiply_pairs(int sums, int a, int b) {
    multiply<float>(sums, a, b, [](float sum, const uint8_t* x, const uint8_t* y) {
      for (int i = 0; i < 2; i++) {
        uint32_t words[] = {(uint32_t)(x[2 * i] | x[2 * i + 1] << 8) << 16,
                            (uint32_t)(y[2 * i] | y[2 * i + 1] << 8) << 16};
        float numbers[2];
        memcpy(numbers, words, sizeof words);
        sum = __builtin_fmaf(numbers[0], numbers[1], sum);
      }
      return sum;
    });
  }
};

inline StandInTiles& stand_in_tiles() {
  static thread_local StandInTiles tiles = {};
  return tiles;
}

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#undef _tile_dpbssd
#define _tile_loadconfig(from) stand_in_tiles().load_config(from)
#define _tile_storeconfig(to) memcpy(to, stand_in_tiles().config, 64)
#define _tile_release() memset(&stand_in_tiles(), 0, sizeof(StandInTiles))
#define _tile_loadd(t, base, stride) stand_in_tiles().load(t, base, stride)
#define _tile_stream_loadd(t, base, stride) _tile_loadd(t, base, stride)
#define _tile_stored(t, base, stride) stand_in_tiles().store(t, base, stride)
#define _tile_zero(t) memset(&stand_in_tiles().tile[t], 0, sizeof stand_in_tiles().tile[t])
#define _tile_dpbf16ps(sums, a, b) stand_in_tiles().multiply_pairs(sums, a, b)
#define _tile_dpbsud(sums, a, b) stand_in_tiles().multiply_bytes<int8_t, uint8_t>(sums, a, b)
#define _tile_dpbssd(sums, a, b) stand_in_tiles().multiply_bytes<int8_t, int8_t>(sums, a, b)
