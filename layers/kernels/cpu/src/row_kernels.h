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
  int64_t size, max_chosen;
  int32_t* index;   // [rows, max_chosen], `size` behind the last
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

// Rows of decoding, whose tokens follow each other, and where a sequence's states lie: that after
// position p at index p mod (1 + k) of its slot. No two rows with tokens have one slot.
struct StateRows {
  int64_t num_tokens, num_slots, num_states;  // W, slots with the sink, 1 + k
  const int32_t *slot, *start, *valid;  // [Y]: a row's, its first position, tokens but for padding

  int64_t count_of(int64_t y) const {
    if (slot[y] < 0 || slot[y] >= num_slots || start[y] < 0 || valid[y] < 0) return 0;
    return valid[y] < num_tokens ? valid[y] : num_tokens;
  }
  // Of the state after a token of a row, after -1: before its first.
  int64_t place(int64_t y, int64_t token) const {
    return slot[y] * num_states + (start[y] + token + num_states) % num_states;
  }
};

// S = decay S + k v^T, of which a token reads S^T q. With beta it adds beta (v - (decay S)^T k) in
// place of v: the gated delta rule.
struct Update {
  StateRows rows;
  int64_t num_heads, key_heads, keys, values;  // N, K, M, H
  bool decays_of_keys;
  const float *q, *k;  // [Y, W, K, M]
  const float* v;      // [Y, W, N, H]
  const float* decay;  // [Y, W, N], or of each key [Y, W, N, M]
  const float* beta;   // [Y, W, N] or null
  float* states;       // [slots, 1 + k, N, M, H]
  float* out;          // [Y, W, N, H], 0 of padding
};

// h = exp(step rate) h + step x in of each channel, of which a token reads h^T factors.
struct Scan {
  StateRows rows;
  int64_t width, channels;    // M, X
  const float *x, *step;      // [Y, W, X]
  const float* rates;         // [M, X], at most 0
  const float *in, *factors;  // [Y, W, M]
  float* states;              // [slots, 1 + k, M, X]
  float* out;                 // [Y, W, X], 0 of padding
};

// The sum of each channel's newest inputs, each times its tap; tails are inputs, the oldest first.
struct Convolution {
  StateRows rows;
  int64_t num_rows, width, channels;  // Y, taps, X
  const float *x, *taps, *bias;       // [Y, W, X], [X, width] the newest's last, [X] or null
  float* tails;                       // [slots, 1 + k, width - 1, X]
  float* out;                         // [Y, W, X], 0 of padding
};

struct StateKernels {
  void (*update)(const Update&, int64_t y, int64_t head);
  void (*scan)(const Scan&, int64_t y, int64_t first_channel, int64_t channels);
  void (*convolve)(const Convolution&, int64_t first_channel, int64_t channels);  // of all rows
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
