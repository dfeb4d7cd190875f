// What an instruction set offers. Each compiles the same templates (product.h, attention.h) or its
// own, and one is chosen when the library is loaded (dispatch.cc).
//
// A matrix [F, D] lies in strips of 16 features, and a strip in rows of depth: float32 as
// [F / 16, D, 16], bfloat16 as pairs, [F / 16, D / 2, 16, 2], blocks of fewer bits as blocks.h has
// them. D is padded to a multiple of 32 and F to one of 16, with zeros.
#pragma once
#include <cstddef>
#include <cstdint>

#include "row_kernels.h"

namespace ridgeline {

constexpr int64_t kStrip = 16, kDepth = 32;

static inline int64_t padded(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

// y = x w^T, or (never of blocks) y + x w^T, of some strips.
struct Product {
  const void* strips;
  int64_t num_strips, depth;
  const void* x;  // [rows] of activations
  int64_t num_rows;
  float* y;  // [rows, 16 num_strips], rows `y_stride` floats apart
  int64_t y_stride;
  bool accumulates;
  bool is_far = true;     // whether the strips come from memory
  int shift = 0;          // of blocks: 2^shift groups share a scale (blocks.h)
  int64_t x_padding = 0;  // elements behind each row of x
  bool y_is_far = false;  // whether y was in no near cache lately
  int64_t strip_depth = 0;  // of a strip, if it is more than `depth`, which all rows stop at

  int64_t x_stride() const { return depth + x_padding; }
  int64_t whole_depth() const { return strip_depth ? strip_depth : depth; }
};

// Elements of pages: of the queries' type, or quantized (configs/cache.py, `PageFormat`).
enum class Stored { kPlain, kInt8, kFp8, kInt4 };

// What shares scales in a part of a row: groups of one size, one behind the other.
struct Groups {
  int64_t count, size;

  int64_t depth() const { return padded(size, kDepth); }
};

// Queries of a rectangle, and what they meet in pages; see ffi_cpu.py.
struct Paged {
  int64_t num_tokens, num_heads, kv_heads, key_width, value_width;  // W, N, K
  bool values_in_keys;  // a value is what its key begins with
  Stored stored;
  int64_t bits;  // of a stored element
  int64_t num_pages, page_tokens, table_columns;
  int64_t tables;        // of a row: 1, or one of each KV head
  const void* q;         // [Y, W, N, key width], of the pages' type
  const void* pages;     // [pages, page tokens] of row_bytes()
  const int32_t* table;  // [Y, tables, columns]

  int64_t capacity() const { return table_columns * page_tokens; }
  int64_t key_at(int64_t head) const { return head * key_width; }  // of a token's row
  int64_t value_at(int64_t head) const {
    return values_in_keys ? key_at(head) : kv_heads * key_width + head * value_width;
  }
  int64_t row_width() const { return kv_heads * (key_width + (values_in_keys ? 0 : value_width)); }

  // A row's elements, then the scales of their groups in bfloat16 (`PageFormat.groups`).
  int64_t bytes(int64_t elements) const { return elements * bits / 8; }
  Groups groups(int64_t width) const {  // of a part
    if (stored == Stored::kPlain || !width) return {0, 1};
    const int64_t size = stored == Stored::kInt4 ? 32 : width % 64 ? width : 64;
    return {width / size, size};
  }
  int64_t num_scales() const {
    if (values_in_keys) return groups(value_width).count + groups(key_width - value_width).count;
    return kv_heads * (groups(key_width).count + groups(value_width).count);
  }
  int64_t row_bytes() const { return bytes(row_width()) + 2 * num_scales(); }
};

// Attention, [Y, W, N, value width] of float32, or of bfloat16 as its bits.
struct Attention : Paged {
  void* out;
  bool is_float32_out;
  float score_cap;                                // 0: none
  const int32_t* last;                            // [Y, W]
  const int32_t *first, *tree_start, *tree_bits;  // [Y, W] or null
  int64_t first_tokens;                           // seen whatever `first` says
  const uint8_t* valid;                           // [Y, W]
  const float* sinks;                             // [N] or null
  float* totals;                                  // [Y, W, N] log-sum-exp of scores, or null

  int64_t out_bytes() const { return is_float32_out ? 4 : 2; }  // of an element
};

// What keys without values, of one KV head, score: the sum over query heads of weight x relu(q.k),
// of float32 [Y, W, capacity()].
struct Scores : Paged {
  float* out;
  const float* weights;  // [Y, W, N]
};

// A share of either: tokens [first_token, stop_token) of row y and KV heads [first_head, stop_head),
// of each the query heads [first_query, stop_query).
struct AttentionItem {
  int64_t y, first_token, stop_token, first_head, stop_head, first_query, stop_query;
};

// What a product takes: [rows, depth] of float32 or of bfloat16, or int8 as block_product.h has it,
// sixteen rows together.
enum class Activations { kFloat32, kBfloat16, kInt8 };

constexpr int64_t kRowsTogether = 16;

// Bytes of `rows` rows, rounded up to whole groups.
static inline int64_t bytes_of_rows(Activations type, int64_t rows, int64_t depth) {
  if (type == Activations::kInt8)
    return padded(rows, kRowsTogether) * (depth + depth / kDepth * 16);
  return rows * depth * (type == Activations::kFloat32 ? 4 : 2);
}

// Elements behind a row of activations, where there are many: rows that lie a multiple of 2 KB apart
// share few sets of the first cache, and push each other out of it.
static inline int64_t row_padding(Activations type, int64_t depth) {
  const int64_t size = type == Activations::kFloat32 ? 4 : 2;
  return type == Activations::kInt8 || depth * size % 2048 ? 0 : 64 / size;
}

// Products with weights of one format.
struct Multiplier {
  Activations activations;
  // Row `index` of the activations at `out`, of float32 or bfloat16, padded with zeros to `depth`.
  void (*put)(const void* row, bool is_float32, int64_t size, int64_t depth, void* out,
              int64_t index);
  void (*multiply)(const Product&);
  int64_t strips = 2;  // that many rows go through together
};

using Attend = void (*)(const Attention&, const AttentionItem&);
// Of the keys [start, stop).
using Score = void (*)(const Scores&, const AttentionItem&, int64_t start, int64_t stop);

// What the keys of whole pages score at most (bounds.h). Queries and extremes are of float32, or of
// bfloat16 as its bits.
struct Bounds {
  int64_t num_tokens, num_heads, kv_heads, width;  // W, N, K, H
  int64_t num_pages, columns;
  bool is_float32;
  const void* q;         // [Y, W, N, H]
  const void* extremes;  // [pages, 2, K, H], the smallest elements and the largest
  const int32_t* table;  // [Y, columns]
  float* sums;           // [Y, W, K, 2, padded H], of signs
  float* out;            // [Y, W, K, columns]

  int64_t padded_width() const { return padded(width, kStrip); }
  float* sums_of(int64_t token, int64_t head) const {
    return sums + (token * kv_heads + head) * 2 * padded_width();
  }
};

struct BoundKernels {
  void (*sum_signs)(const Bounds&, int64_t token);  // what the others read
  void (*of_float32)(const Bounds&, int64_t y, int64_t first, int64_t stop);
  void (*of_bfloat16)(const Bounds&, int64_t y, int64_t first, int64_t stop);
};

// Weights and pages of float32 or of bfloat16.
struct Dense {
  Multiplier multiplier;
  Attend attend;
  Score score;
  const Multiplier* shallow_multiplier = nullptr;

  // Of strips with a depth that is a multiple of 16, or with a greater one than the product's.
  const Multiplier& shallow() const {
    return shallow_multiplier ? *shallow_multiplier : multiplier;
  }
};

// Weights in blocks.
struct Blocks {
  Multiplier int8, w8a8, fp8, int4, int4_asym, int3, int3_asym, mxfp4;
  Multiplier q8_0, q5_0, q4_0, q4_1, q4_k, q5_k, q6_k, q3_k, q2_k, iq4_nl, iq4_xs;
  Multiplier fp8_block, mxfp8, nvfp4;
};

// Weights in blocks beside activations of bfloat16, where these are not widened.
struct HalfBlocks {
  Multiplier fp8_block, mxfp8, nvfp4;
};

struct InstructionSet {
  const char* name;
  const Dense *float32, *bfloat16;
  const RowKernels* rows;
  const StateKernels* states;
  const BoundKernels* bounds;
  const Blocks* blocks;
  const HalfBlocks* half_blocks = nullptr;
};

extern const Dense kFloat32Avx2, kFloat32Avx512, kFloat32Neon;
extern const Dense kBfloat16Avx2, kBfloat16Avx512, kBfloat16Vnni, kBfloat16Pairs, kBfloat16Amx;
extern const Dense kBfloat16Neon, kBfloat16Bfmmla;
extern const RowKernels kRowsAvx2, kRowsAvx512, kRowsNeon;
extern const StateKernels kStatesAvx2, kStatesAvx512, kStatesNeon;
extern const BoundKernels kBoundsAvx2, kBoundsAvx512, kBoundsNeon;
extern const Blocks kBlocksAvx2, kBlocksVnni, kBlocksAmx;
extern const HalfBlocks kHalfBlocksAmx;
extern const Blocks kBlocksNeon, kBlocksDotprod, kBlocksI8mm;

}  // namespace ridgeline
