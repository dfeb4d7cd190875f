// Keys and values of a block as strips, which products (product.h) take for weights.
#pragma once
#include "kernels.h"
#include "vector.h"

namespace {

constexpr int kBlock = 64;  // keys; a token's view of them is the bits of one word

// A block's keys, values or scales: so many bytes into the rows of its tokens.
struct Place {
  const char* const* rows;
  int64_t at;

  const char* operator[](int s) const { return rows[s] + at; }
};

// Elements of two registers in turn, those of their first halves or of their second.
template <bool second, class Register, int... lane>
inline Register interleave(Register a, Register b, std::integer_sequence<int, lane...>) {
  constexpr int kSize = sizeof...(lane), kHalf = second ? kSize / 2 : 0;
  return __builtin_shufflevector(a, b, (lane / 2 + kHalf + lane % 2 * kSize)...);
}

// A square of words, as wide as a register, turned.
inline void transpose(Words (&rows)[kRegisterLanes]) {
  constexpr int kHalf = kRegisterLanes / 2;
  UNROLL for (int width = kHalf; width; width /= 2) {
    Words next[kRegisterLanes];
    UNROLL for (int i = 0; i < kHalf; i++) {
      next[2 * i] = interleave<false>(rows[i], rows[i + kHalf], Lanes());
      next[2 * i + 1] = interleave<true>(rows[i], rows[i + kHalf], Lanes());
    }
    UNROLL for (int i = 0; i < kRegisterLanes; i++)
      rows[i] = next[i];
  }
}

// A block of keys as strips of [depth, 16] words; words from `size` on are 0. What is packed next
// is fetched meanwhile, as memory would rest otherwise.
inline void pack_keys(Place keys, Place next, int64_t size, int64_t depth, uint32_t* out) {
  for (int first = 0; first < kBlock; first += kRegisterLanes) {
    uint32_t* column = out + first / kLanes * depth * kLanes + first % kLanes;
    int64_t word = 0;
    for (; word + kRegisterLanes <= size; word += kRegisterLanes) {
      Words square[kRegisterLanes];
      UNROLL for (int s = 0; s < kRegisterLanes; s++) {
        square[s] = *(const LooseWords*)(keys[first + s] + 4 * word);
        __builtin_prefetch(next[first + s] + 4 * word, 0, 2);
      }
      transpose(square);
      UNROLL for (int k = 0; k < kRegisterLanes; k++)
        *(LooseWords*)(column + (word + k) * kLanes) = square[k];
    }
    for (; word < depth; word++)
      for (int s = 0; s < kRegisterLanes; s++) {
        uint32_t* to = column + word * kLanes + s;
        if (word < size)
          memcpy(to, keys[first + s] + 4 * word, 4);
        else
          *to = 0;
      }
  }
}

// A block of values as strips over the keys; features from `width` on are 0.
inline void pack_values(Place values, Place next, int64_t width, float* out) {
  for (int64_t h = 0; h < width; h += kLanes)
    for (int s = 0; s < kBlock; s++, out += kLanes) {
      const float* const row = (const float*)values[s];
      __builtin_prefetch(next[s] + 4 * h, 0, 2);
      if (h + kLanes <= width)
        Vector::load(row + h).store(out);
      else
        for (int i = 0; i < kLanes; i++) out[i] = h + i < width ? row[h + i] : 0;
    }
}
inline void pack_values(Place values, Place next, int64_t width, uint16_t* out) {
  constexpr int kShorts = 2 * kRegisterLanes, kStripSize = kBlock * kLanes;
  using ShortLanes = std::make_integer_sequence<int, kShorts>;
  auto row_of = [&](int s, int64_t h) {
    return out + h / kLanes * kStripSize + s * kLanes + h % kLanes * 2;
  };
  // Some rows at a time, so that lines that are read or written together do not lie a row apart.
  constexpr int kTogether = 16;
  int64_t h = 0;
  for (int first = 0; first < kBlock; first += kTogether)
    for (h = 0; h + kShorts <= width; h += kShorts)
      for (int s = first; s < first + kTogether; s += 2) {
        const Shorts a = *(const LooseShorts*)(values[s] + 2 * h);
        const Shorts b = *(const LooseShorts*)(values[s + 1] + 2 * h);
        __builtin_prefetch(next[s] + 2 * h, 0, 2);
        __builtin_prefetch(next[s + 1] + 2 * h, 0, 2);
        *(LooseShorts*)row_of(s, h) = interleave<false>(a, b, ShortLanes());
        *(LooseShorts*)row_of(s, h + kShorts / 2) = interleave<true>(a, b, ShortLanes());
      }
  for (; h < ridgeline::padded(width, kLanes); h++)
    for (int s = 0; s < kBlock; s += 2) {
      uint16_t* to = row_of(s, h);
      to[0] = h < width ? ((const uint16_t*)values[s])[h] : 0;
      to[1] = h < width ? ((const uint16_t*)values[s + 1])[h] : 0;
    }
}

}  // namespace
