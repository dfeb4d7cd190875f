// What a step computes of rows of float32 beside products and attention.
#pragma once
#include <cstdint>

namespace ridgeline {

// Weights of a norm are float32, or bfloat16 as its bits.
struct Norm {
  const float* x;  // [rows, size]
  int64_t size;
  const void *weight, *bias;  // [size]; with a bias the mean is subtracted first, else it is null
  bool is_float32;            // weight and bias
  float epsilon, offset;      // added to the variance, to the weight
  float* y;                   // [rows, size]
};

enum class Gate : int32_t { kSilu, kGeluTanh };

// y = act(gate) up.
struct Gated {
  const float* gate_up;  // [rows, 2 size]
  int64_t size;
  Gate gate;
  bool is_float32;  // y; else bfloat16, rounded to the nearest
  void* y;          // [rows, size]
};

constexpr int64_t kGroup = 128;      // entries that one maximum stands for: topk.GROUP
constexpr int64_t kChunk = 1 << 13;  // entries that one thread reads twice while they are near

// Of a part of a row: the sum of exp(x - top), and its largest entry.
struct Mass {
  float top, sum;
};

// The largest of those scores of a row that are open, of equals the first, in rising order.
struct Choice {
  const float* scores;     // [rows, size]
  const uint8_t* is_open;  // [rows, size]
  int64_t size, most;
  int32_t* index;   // [rows, most], `size` behind the last
  int32_t* counts;  // [rows]
};

// The heads of tokens as a product leaves them: queries, then keys, then values.
struct Heads {
  const float* qkv;                     // [T, (num_heads + 2 kv_heads) width]
  const float *cos, *sin;               // [T, pairs]: element i turns with i + pairs
  const void *query_norm, *key_norm;    // [width], RMSNorm's weights, which come first; or null
  bool is_float32_norm;                 // else bfloat16 as its bits
  float epsilon, offset;                // of the norms
  float scale;                          // of queries, at last
  const int32_t *page, *token_of_page;  // [T], where keys and values go; page 0: padding
  int64_t num_heads, kv_heads, width, pairs, num_pages, page_tokens;
  bool is_float32;  // queries and pages; else bfloat16
  void* q;          // [T, num_heads, width]
  void* pages;      // [pages, page tokens, 2 kv_heads, width]
};

struct RowKernels {
  // Whether a row of float32 or of bfloat16 is padding: 0, of either sign.
  bool (*is_zero)(const void* row, bool is_float32, int64_t size);
  void (*norm)(const Norm&, int64_t row);
  void (*gate)(const Gated&, int64_t row);
  // Maxima of the groups of a chunk, [ceil(size / kGroup)], and its mass.
  Mass (*summarize)(const float* x, int64_t size, float* maxima);
  // log(sum(exp)) of a row from its chunks' masses, in their order.
  float (*log_sum_exp)(const Mass* chunks, int64_t count);
  void (*choose)(const Choice&, int64_t row);
  void (*append)(const Heads&, int64_t token);
};

}  // namespace ridgeline
