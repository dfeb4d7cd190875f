// What lies between the product that makes queries, keys and values, and attention.
#pragma once
#include <cfloat>

#include "rows.h"

namespace {

// `chosen` where v is a number, rounded to what is stored; else `other`.
inline Vector where_finite(const Vector& v, bool is_float32, const Vector& chosen, float other) {
  // The next one is rounded to infinity.
  const float largest = is_float32 ? FLT_MAX : 0x1.fefffep127f;
  const Floats instead = Floats{} + other;
  Vector out;
  UNROLL for (int i = 0; i < kRegisters; i++) {
    const Floats size = (Floats)((Ints)v.part[i] & INT32_MAX);
    out.part[i] = size <= largest ? chosen.part[i] : instead;
  }
  return out;
}

// Elements of queries or of pages, `count` of them.
inline void store_elements(const Vector& v, void* all, bool is_float32, int64_t first, int count) {
  if (is_float32)
    store_upto(v, count, (float*)all + first);
  else
    store_bfloat16(v, count, (uint16_t*)all + first);
}

// Calls put(first, count, elements) for all elements of a head after its norm and its rotation.
template <class Put>
inline void rotated(const ridgeline::Heads& h, int64_t token, const float* x, const void* weight,
                    const Put& put) {
  static thread_local Scratch scratch;
  if (weight) {
    ridgeline::Norm n = {};
    n.x = x;
    n.size = h.width;
    n.weight = weight;
    n.is_float32 = h.is_float32_norm;
    n.epsilon = h.epsilon;
    n.offset = h.offset;
    n.y = (float*)scratch.reserve(h.width * sizeof(float));
    norm(n, 0);
    x = n.y;
  }
  const float *cos = h.cos + token * h.pairs, *sin = h.sin + token * h.pairs;
  by_sixteen(h.pairs, [&](int64_t i, int count) {
    const Vector first = load_upto(x + i, count, 0), second = load_upto(x + h.pairs + i, count, 0);
    const Vector c = load_upto(cos + i, count, 0), s = load_upto(sin + i, count, 0);
    put(i, count, first * c - second * s);
    put(h.pairs + i, count, second * c + first * s);
  });
  const int64_t unrotated = 2 * h.pairs;
  by_sixteen(h.width - unrotated, [&](int64_t i, int count) {
    put(unrotated + i, count, load_upto(x + unrotated + i, count, 0));
  });
}

// Where a value is not finite, the page gets 0 for it, and NaN for its key: a masked value is only
// multiplied by 0.
void append(const ridgeline::Heads& h, int64_t token) {
  const int64_t element = h.is_float32 ? 4 : 2, head_bytes = h.width * element;
  char* const q = (char*)h.q + token * h.num_heads * head_bytes;
  const int64_t page = h.page[token], at = h.token_of_page[token];
  if (page <= 0 || page >= h.num_pages || at < 0 || at >= h.page_tokens) {
    memset(q, 0, h.num_heads * head_bytes);
    return;
  }
  const float* const queries = h.qkv + token * (h.num_heads + 2 * h.kv_heads) * h.width;
  const Vector scale = Vector::splat(h.scale);
  for (int64_t head = 0; head < h.num_heads; head++)
    rotated(h, token, queries + head * h.width, h.query_norm,
            [&](int64_t i, int count, const Vector& v) {
              store_elements(v * scale, q + head * head_bytes, h.is_float32, i, count);
            });
  char* const row = (char*)h.pages + (page * h.page_tokens + at) * 2 * h.kv_heads * head_bytes;
  for (int64_t head = 0; head < h.kv_heads; head++) {
    const float* const key = queries + (h.num_heads + head) * h.width;
    const float* const value = key + h.kv_heads * h.width;
    rotated(h, token, key, h.key_norm, [&](int64_t i, int count, const Vector& v) {
      const Vector values = load_upto(value + i, count, 0);
      store_elements(where_finite(values, h.is_float32, v, __builtin_nanf("")),
                     row + head * head_bytes, h.is_float32, i, count);
    });
    by_sixteen(h.width, [&](int64_t i, int count) {
      const Vector values = load_upto(value + i, count, 0);
      store_elements(where_finite(values, h.is_float32, values, 0),
                     row + (h.kv_heads + head) * head_bytes, h.is_float32, i, count);
    });
  }
}

constexpr ridgeline::RowKernels kRowKernels = {is_zero,     norm,   gate,  summarize,
                                               log_sum_exp, choose, append};

}  // namespace
