// Weights in blocks of a few bits, as GGUF has them: their own integers and scales, in strips. A
// group is 32 of depth; value = d q, or d q + m, with d and m of a feature's group (or half of
// one).
//
// A strip of 16 features is all its groups' integers, then all their scales, then zeros up to 64
// bytes. Integers of four bits are 4 rows of 64 bytes, [feature][4 of depth], of which row i has
// depths 8 i to 8 i + 3 in its low halves and the next four in its high ones; those of eight bits
// are 8 rows. Of six bits, 4 rows of lower halves are followed by two of the upper bits: row j has
// those of depths 16 j to 16 j + 15, two bits for each fourth.
#pragma once
#include <cstdint>
#include <string_view>

#include "kernels.h"

namespace ridgeline {

// How a format lies in strips. `bits` are of its integers, `group_bytes` and `super_bytes` of a
// strip's scales: those of a group, and those that `groups` of them share, which come before them.
struct BlockLayout {
  int bits, group_bytes, super_bytes, groups;

  constexpr int64_t integer_bytes() const { return kDepth * kStrip * bits / 8; }
  constexpr int64_t scale_offset(int64_t group) const {
    return group / groups * (super_bytes + groups * group_bytes);
  }
  constexpr int64_t strip_bytes(int64_t depth) const {
    const int64_t count = depth / kDepth;
    const int64_t scales = (count + groups - 1) / groups * super_bytes + count * group_bytes;
    return (count * integer_bytes() + scales + 63) / 64 * 64;
  }
};

constexpr BlockLayout kQ8_0{8, 32, 0, 1};   // d[16]
constexpr BlockLayout kQ4_0{4, 32, 0, 1};   // d[16]; q - 8 is multiplied
constexpr BlockLayout kQ4_1{4, 64, 0, 1};   // d[16], m[16]
constexpr BlockLayout kQ4_K{4, 32, 64, 8};  // shared d[16], e[16]; s[16], t[16]: d s q - e t
constexpr BlockLayout kQ6_K{6, 32, 32, 8};  // shared d[16]; s[16] of the first half, of the second

struct Group;   // 32 numbers of a row
struct Place;   // of one feature of a group in a strip
struct Scales;  // of a feature's group

struct BlockFormat {
  std::string_view name;
  BlockLayout layout;
  Multiplier Blocks::* multiplier;
  int offset;  // value = d (q - offset) + m
  Scales (*scales)(const Place&);
  void (*read)(const uint8_t* row, int64_t group, Group&);  // of a file's row
  int64_t elements, bytes;                                  // of a file's block
};

// The format of a name, or null.
const BlockFormat* find_block_format(std::string_view name);

// Row `row` of strips of a format, float32 [depth].
void read_row(const BlockFormat& format, const uint8_t* strips, int64_t depth, int64_t row,
              float* out);

}  // namespace ridgeline
