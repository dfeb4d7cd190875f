// Weights in blocks of a few bits, GGUF's and ours: their own integers and scales, in strips. A
// group is 32 of depth; value = d q, or d q + m, with d and m of a feature's group (or half of one,
// or of several groups, or of the whole row).
//
// A strip of 16 features is all its groups' integers, then all their scales, then zeros up to 64
// bytes. Integers of four bits are 4 rows of 64 bytes, [feature][4 of depth], of which row i has
// depths 8 i to 8 i + 3 in its low halves and the next four in its high ones; those of eight bits
// are 8 rows. Of five and six bits, 4 rows of lower halves are followed by those of the upper bits:
// row j of two bits has depths 16 j to 16 j + 15, two bits for each fourth; that of one bit has one
// for each fourth of all 32. Of three bits, two rows of the lower two are followed by one of the
// upper bit; two bits are such two rows alone. Floats are bytes by depth, [depth, 16], or of four
// bits two rows of depth a byte, the first in the low half.
#pragma once
#include <cstdint>
#include <string_view>

#include "kernels.h"

namespace ridgeline {

// How a format lies in strips. `bits` are of its integers, `group_bytes` and `super_bytes` of a
// strip's scales: those of a group, and those that 2^shift of them share, which come before them.
struct BlockLayout {
  int bits, group_bytes, super_bytes, shift;
  bool is_float = false;  // e4m3, or of four bits e2m1

  constexpr int64_t integer_bytes() const { return kDepth * kStrip * bits / 8; }
  constexpr int64_t super_offset(int64_t group) const {
    return (group >> shift) * (super_bytes + ((int64_t)group_bytes << shift));
  }
  constexpr int64_t group_offset(int64_t group) const {
    return super_bytes + (group & (((int64_t)1 << shift) - 1)) * group_bytes;
  }
  constexpr int64_t strip_bytes(int64_t depth) const {
    const int64_t count = depth / kDepth;
    const int64_t supers = (count + ((int64_t)1 << shift) - 1) >> shift;
    return (count * integer_bytes() + supers * super_bytes + count * group_bytes + 63) / 64 * 64;
  }
  constexpr BlockLayout sharing(int own_shift) const {
    return {bits, group_bytes, super_bytes, own_shift, is_float};
  }
};

constexpr int kWholeRow = 40;  // a shift that leaves one

constexpr BlockLayout kQ8_0{8, 32, 0, 0};   // d[16]
constexpr BlockLayout kQ5_0{5, 32, 0, 0};   // d[16]; q - 16 is multiplied
constexpr BlockLayout kQ4_0{4, 32, 0, 0};   // d[16]; q - 8 is multiplied
constexpr BlockLayout kQ4_1{4, 64, 0, 0};   // d[16], m[16]
constexpr BlockLayout kQ4_K{4, 32, 64, 3};  // shared d[16], e[16]; s[16], t[16]: d s q - e t
constexpr BlockLayout kQ5_K{5, 32, 64, 3};  // likewise
constexpr BlockLayout kQ6_K{6, 32, 32, 3};  // shared d[16]; s[16] of the first half, of the second
constexpr BlockLayout kQ3_K{3, 32, 32, 3};  // likewise; q - 4 is multiplied
// Shared d[16], e[16]; of the first half, of the second s[16] low, t[16] high: d s q - e t.
constexpr BlockLayout kQ2_K{2, 32, 64, 3};
constexpr BlockLayout kIQ4_NL{4, 32, 0, 0};   // d[16]; q is looked up in kIQ4
constexpr BlockLayout kIQ4_XS{4, 16, 32, 3};  // shared d[16]; s[16], signed: d s q, likewise
constexpr BlockLayout kMxfp4{4, 16, 0, 0};    // e[16]: 2^(e - 128) q, of twice the numbers that are
// Ours, whose groups are larger: d[16] of float32, and zero points z[16] in bytes: d (q - z).
constexpr BlockLayout kInt8{8, 0, 64, kWholeRow}, kFp8{8, 0, 64, kWholeRow, true};
// As published: d of float32 of a strip's 128 of depth; e[16]: 2^(e - 127); shared d[16] of float32
// of the whole row, s[16] in e4m3 of the first half, of the second: d s q.
constexpr BlockLayout kFp8Block{8, 0, 4, 2, true}, kMxfp8{8, 16, 0, 0, true};
constexpr BlockLayout kNvfp4{4, 32, 64, kWholeRow, true};
constexpr BlockLayout kInt4{4, 0, 64, 2}, kInt4Asym{4, 0, 80, 2};
constexpr BlockLayout kInt3{3, 0, 64, 2}, kInt3Asym{3, 0, 80, 2};

// The numbers of IQ4_NL's and IQ4_XS's codes, denser near 0.
alignas(16) constexpr int8_t kIQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                         1,    13,   25,  38,  53,  69,  89,  113};

struct Group;   // 32 numbers of a row
struct Place;   // of one feature of a group in a strip
struct Scales;  // of a feature's group

struct BlockFormat {
  std::string_view name;
  BlockLayout layout;
  Multiplier Blocks::* multiplier;
  int offset;  // value = d (q - offset - z) + m
  Scales (*scales)(const Place&);
  void (*read)(const uint8_t* row, int64_t group, Group&);  // of a row of blocks
  int64_t elements, bytes;                                  // of a block; 0: the row is one
  int64_t head = 0;                                         // bytes of a row before its blocks
  bool is_cut = false;                                      // the last block may be shorter
  Multiplier HalfBlocks::* half = nullptr;                  // beside activations of bfloat16
  float (*number)(int code) = nullptr;                      // of integers that are looked up

  // Bytes of a row of so many numbers; -1: it is no whole blocks.
  int64_t row_bytes(int64_t width) const {
    if (elements == 0) return bytes + width;
    const int64_t last = width % elements;
    if (last && !is_cut) return -1;
    return head + width / elements * bytes + (last ? bytes - elements + last : 0);
  }
};

// The format of a name, or null.
const BlockFormat* find_block_format(std::string_view name);

// Row `row` of strips of a format, float32 [width].
void read_row(const BlockFormat& format, const uint8_t* strips, int64_t width, int64_t row,
              float* out);

}  // namespace ridgeline
