// What an instruction set offers. Each compiles the same templates (product.h, attention.h) or its
// own, and one is chosen when the library is loaded (dispatch.cc).
//
// A matrix [F, D] lies in strips of 16 features, and a strip in rows of depth: float32 as
// [F / 16, D, 16], bfloat16 as pairs, [F / 16, D / 2, 16, 2]. D is padded to a multiple of 32 and F
// to one of 16, with zeros.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ridgeline {

constexpr int64_t kStrip = 16, kDepth = 32;

static inline int64_t padded(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

// y = x w^T, or y + x w^T, of some strips.
struct Product {
  const void* strips;
  int64_t num_strips, depth;
  const void* x;  // [rows, depth] activations
  int64_t num_rows;
  float* y;  // [rows, 16 num_strips], rows `y_stride` floats apart
  int64_t y_stride;
  bool accumulates;
  bool is_far = true;  // whether the strips come from memory
};

// Attention of a rectangle over pages; see ffi_cpu.py.
struct Attention {
  int64_t num_tokens, num_heads, kv_heads, width;  // W, N, K, H
  int64_t page_tokens, table_columns;
  float score_cap;                                // 0: none
  const void* q;                                  // [Y, W, N, H], of the pages' type
  const void* pages;                              // [pages, page tokens, 2 K H]
  const int32_t* table;                           // [Y, columns]
  const int32_t* last;                            // [Y, W]
  const int32_t *first, *tree_start, *tree_bits;  // [Y, W] or null
  const uint8_t* valid;                           // [Y, W]
  const float* sinks;                             // [N] or null
  float* out;                                     // [Y, W, N, H]
};

// A share of it: tokens [first_token, stop_token) of row y and KV heads [first_head, stop_head).
struct AttentionItem {
  int64_t y, first_token, stop_token, first_head, stop_head;
};

// Of one type of weights, or of pages.
struct Kernels {
  int64_t activation_bytes;  // 4: float32, 2: bfloat16
  // A row of float32 or bfloat16 as activations, padded with zeros to `depth`.
  void (*put)(const void* row, bool is_float32, int64_t size, int64_t depth, void* out);
  void (*multiply)(const Product&);
  void (*attend)(const Attention&, const AttentionItem&);
};

struct InstructionSet {
  const char* name;
  Kernels float32, bfloat16;
};

extern const InstructionSet kAvx2, kAvx512, kAmx, kNeon;

}  // namespace ridgeline
