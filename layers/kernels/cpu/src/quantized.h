// Quantized elements of pages as strips: what `layers/kv_cache.py` made, but for the scales, which
// scores and weights take instead. Elements have few bits, so as bfloat16 they are exact too.
#pragma once
#include "kernels.h"
#include "strips.h"
#include "vector.h"

namespace {

using ridgeline::Groups;
using ridgeline::Stored;

// A register of bytes as words with their signs; GCC 12 would take vectors apart for it.
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

// What bytes say without their scale; of four bits in the low ones, or in the others.
template <Stored stored, bool high = false>
inline Floats number(Ints byte) {
  if constexpr (stored == Stored::kInt4)
    return __builtin_convertvector(((high ? byte >> 4 : byte) & 15) - 8, Floats);
  if constexpr (stored == Stored::kInt8) return __builtin_convertvector(byte, Floats);
  // e4m3: exponent and mantissa move into a float's, whose bias is 120 more. Without an exponent
  // the mantissa counts 2^-9: as that of a number above 2^-6, less these 2^-6.
  const Words size = (Words)byte & 0x7f;
  const Floats small = (Floats)((size << 20) + (121u << 23)) - 0x1p-6f;
  const Floats usual = (Floats)((size << 20) + (120u << 23));
  return (Floats)((Words)(size < 8 ? small : usual) | ((Words)byte & 0x80000000u));
}

// Two rows of a strip, which lie one behind the other or as pairs: a register of each.
inline void put_rows(Floats a, Floats b, float* out) {
  *(LooseFloats*)out = a;
  *(LooseFloats*)(out + kLanes) = b;
}
inline void put_rows(Floats a, Floats b, uint16_t* out) {
  *(LooseWords*)out = (Words)a >> 16 | ((Words)b & 0xffff0000u);
}

// Where a register of lanes begins in two rows of a strip.
template <class Element>
constexpr int lanes_from(int lane) {
  return sizeof(Element) == 2 ? 2 * lane : lane;
}

// Four rows of a strip, of the bytes of words.
template <Stored stored, bool high = false, class Element>
inline void put_bytes(Words word, Element* out) {
  Floats x[4];
  UNROLL for (int i = 0; i < 4; i++)
    x[i] = number<stored, high>((Ints)(word << (24 - 8 * i)) >> 24);
  put_rows(x[0], x[1], out);
  put_rows(x[2], x[3], out + 2 * kLanes);
}

// A block of keys as strips, those of each group by themselves, [groups, 4, depth, 16]; elements
// from a group's size on are 0. What is packed next is fetched meanwhile.
template <Stored stored, class Element>
void pack_keys(Place keys, Place next, Groups groups, Element* out) {
  constexpr bool kHalves = stored == Stored::kInt4;  // of 32 elements, the second in the high bits
  const int64_t depth = groups.depth(), rows = kHalves ? groups.size / 2 : groups.size;
  const int64_t bytes = groups.count * rows;
  if (groups.size < depth) memset(out, 0, groups.count * kBlock * depth * sizeof(Element));
  for (int first = 0; first < kBlock; first += kRegisterLanes) {
    Element* column = out + first / kLanes * depth * kLanes + lanes_from<Element>(first % kLanes);
    int64_t row = 0;
    for (int64_t byte = 0; byte < bytes; byte += kRegisterBytes) {
      Words square[kRegisterLanes];
      const int64_t remaining = bytes - byte;
      UNROLL for (int s = 0; s < kRegisterLanes; s++) {
        const char* from = keys[first + s] + byte;
        __builtin_prefetch(next[first + s] + byte, 0, 2);
        if (remaining >= kRegisterBytes) {
          memcpy(&square[s], from, kRegisterBytes);  // at any address, as scales take two bytes
        } else {
          square[s] = Words{};
          memcpy(&square[s], from, remaining);
        }
      }
      transpose(square);
      for (int k = 0; k < kRegisterLanes && 4 * k < remaining; k++) {
        put_bytes<stored>(square[k], column + row * kLanes);
        if (kHalves) put_bytes<stored, true>(square[k], column + (row + rows) * kLanes);
        row += 4;
        if (row < rows) continue;
        column += kBlock * depth;
        row = 0;
      }
    }
  }
}

// A block of values as strips over the keys; features from `width` on are 0.
template <Stored stored, class Element>
void pack_values(Place values, Place next, int64_t width, Element* out) {
  constexpr bool kHalves = stored == Stored::kInt4;
  constexpr int64_t kStripSize = kBlock * kLanes;
  const int64_t bytes = kHalves ? width / 2 : width;
  // Sixteen bytes of two keys.
  auto put = [](const char* a, const char* b, Element* to) {
    UNROLL for (int i = 0; i < kRegisters; i++, a += kRegisterLanes, b += kRegisterLanes) {
      const Ints x = words(a), y = words(b);
      Element* const lanes = to + lanes_from<Element>(i * kRegisterLanes);
      put_rows(number<stored>(x), number<stored>(y), lanes);
      if (kHalves) put_rows(number<stored, true>(x), number<stored, true>(y), lanes + kStripSize);
    }
  };
  for (int s = 0; s < kBlock; s += 2) {
    const char *const a = values[s], *const b = values[s + 1];
    Element* to = out + s * kLanes;
    int64_t byte = 0;
    for (; byte + kLanes <= bytes; byte += kLanes, to += (kHalves ? 2 : 1) * kStripSize) {
      __builtin_prefetch(next[s] + byte, 0, 2);
      __builtin_prefetch(next[s + 1] + byte, 0, 2);
      put(a + byte, b + byte, to);
    }
    if (byte == bytes) continue;
    char tails[2][kLanes] = {};
    memcpy(tails[0], a + byte, bytes - byte);
    memcpy(tails[1], b + byte, bytes - byte);
    put(tails[0], tails[1], to);
  }
}

// Scales of a block, [groups, 64].
inline void read_scales(Place scales, Place next, int64_t groups, float* out) {
  for (int s = 0; s < kBlock; s++) {
    __builtin_prefetch(next[s], 0, 2);
    for (int64_t g = 0; g < groups; g++) {
      uint16_t bits;
      memcpy(&bits, scales[s] + 2 * g, 2);
      const uint32_t word = (uint32_t)bits << 16;
      memcpy(out + g * kBlock + s, &word, 4);
    }
  }
}

}  // namespace
