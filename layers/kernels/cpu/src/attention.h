// Attention over pages: a block of keys and of values at a time becomes strips, so that both
// products are products with weights (number_block.h, integer_block.h), and the softmax is folded
// over the blocks (Milakov & Gimelshein 2018, arXiv 1805.02867). Decoding and prefill sum in one
// order.
#pragma once
#include <cstring>
#include <type_traits>

#include "block_rows.h"
#include "integer_block.h"
#include "kernels.h"
#include "number_block.h"
#include "scratch.h"
#include "strips.h"
#include "vector.h"

namespace {

using ridgeline::Attention;

constexpr float kMasked = -1e30f;

// Which keys [start, start + 64) a token sees, as bits.
inline uint64_t visible(const Attention& a, int64_t token, int64_t start) {
  auto up_to = [](int64_t n) { return n <= 0 ? 0 : n >= kBlock ? ~0ull : (1ull << n) - 1; };
  uint64_t seen = up_to(a.last[token] - start + 1);
  if (a.first) {
    uint64_t live = ~up_to(a.first[token] - start) | up_to(a.first_tokens - start);
    if (a.tree_start) live |= ~up_to(a.tree_start[token] - start);  // whose bits have said it
    seen &= live;
  }
  if (a.tree_start) {
    const int64_t shift = a.tree_start[token] - start;  // of the row's own tokens in the block
    const uint64_t bits = (uint32_t)a.tree_bits[token];
    if (shift < kBlock) {
      const uint64_t own = shift >= 0 ? bits << shift : -shift < 32 ? bits >> -shift : 0;
      seen &= up_to(shift) | own;
    }
  }
  return seen;
}

// Caps and masks a row's scores of a block; the largest of them, and of those before.
inline float mask(float* scores, uint64_t seen, float cap, float top) {
  Vector highest = Vector::splat(kMasked);
  UNROLL for (int i = 0; i < kBlock; i += kLanes) {
    Vector score = Vector::load(scores + i);
    if (cap > 0) score = soft_cap(score, cap);
    if (~seen) score = select((uint32_t)(seen >> i) & 0xffff, score, kMasked);
    if (cap > 0 || ~seen) score.store(scores + i);
    highest = maximum(score, highest);
  }
  const float now = largest(highest);
  return now > top ? now : top;
}

// Folds a row's masked scores of a block into its softmax, whose top they changed from `before`:
// puts the weights, and returns the factor by which what was summed before is scaled.
template <class Put>
inline float fold(const float* scores, float before, float top, float& mass, Put put) {
  Vector total = Vector::splat(0);
  UNROLL for (int i = 0; i < kBlock; i += kLanes) {
    const Vector weight = exponential(Vector::load(scores + i) - Vector::splat(top));
    total = total + weight;
    put(weight, i);
  }
  const float decay = top == before ? 1 : exponential(Vector::splat(before - top)).part[0][0];
  mass = mass * decay + sum(total);
  return decay;
}

// One item: the state of its softmaxes, and the block of keys and values at hand.
template <class Block>
class Attender {
 public:
  Attender(const Attention& a, const AttentionItem& item, Scratch& scratch)
      : a_(a), item_(item), shape_{a, item}, block_(shape_) {
    carve(nullptr);
    carve(scratch.reserve(num_bytes_));
  }

  void run() {
    start();
    int64_t begin = INT64_MAX, end = 0;  // of the keys that any token sees
    const int64_t capacity = a_.capacity();
    for (int64_t t = shape_.first_token; t < shape_.first_token + shape_.tokens; t++) {
      if (!a_.valid[t]) continue;
      const int64_t first = a_.first && a_.first[t] > 0 ? a_.first[t] : 0;
      const int64_t stop = a_.last[t] < capacity ? (int64_t)a_.last[t] + 1 : capacity;
      begin = first < begin ? first : begin;
      end = stop > end ? stop : end;
    }
    const int64_t oldest = begin / kBlock * kBlock;  // block of what no first tokens are
    int64_t start = a_.first_tokens > 0 ? 0 : oldest, after;
    BlockRows rows, next;
    if (start < end) rows = rows_of(start, end);
    for (; start < end; start = after, rows = next) {
      after = start + kBlock;
      if (after >= a_.first_tokens && after < oldest) after = oldest;
      next = after < end ? rows_of(after, end) : rows;
      fold_block(start, rows, next);
    }
    finish();
  }

 private:
  void carve(void* memory) {
    Carver carver(memory);
    const int64_t rows = shape_.heads * shape_.rows;
    block_.carve(carver);
    scores_ = carver.take<float>(shape_.rows * kBlock);
    out_ = carver.take<float>(rows * shape_.out_stride);
    top_ = carver.take<float>(rows);
    mass_ = carver.take<float>(rows);
    next_top_ = carver.take<float>(shape_.rows);
    seen_ = carver.take<uint64_t>(shape_.tokens);
    num_bytes_ = carver.taken();
  }

  // Calls visit(KV head of the item, its row, token of the rectangle, query head).
  template <class Visit>
  void each_row(Visit visit) const {
    for (int64_t head = 0; head < shape_.heads; head++)
      for (int64_t t = 0; t < shape_.tokens; t++)
        for (int64_t query = 0; query < shape_.queries; query++)
          visit(head, t * shape_.queries + query, shape_.first_token + t,
                (item_.first_head + head) * shape_.group + item_.first_query + query);
  }

  void start() {
    const int64_t query_bytes = a_.key_width * Block::kQueryBytes;
    each_row([&](int64_t head, int64_t r, int64_t token, int64_t query_head) {
      const int64_t row = head * shape_.rows + r;
      block_.put_query(head, r,
                       (const char*)a_.q + (token * a_.num_heads + query_head) * query_bytes);
      top_[row] = a_.sinks ? a_.sinks[query_head] : kMasked;
      mass_[row] = 1;
      memset(out_ + row * shape_.out_stride, 0, shape_.wide * sizeof(float));
    });
  }

  BlockRows rows_of(int64_t start, int64_t end) const {
    const int64_t table = item_.y * a_.tables + (a_.tables > 1 ? item_.first_head : 0);
    return block_rows(a_, row_bytes_, table, start, end);
  }

  void fold_block(int64_t start, const BlockRows& rows, const BlockRows& next) {
    block_.start_block(rows.data());
    for (int64_t t = 0; t < shape_.tokens; t++)
      seen_[t] = visible(a_, shape_.first_token + t, start);
    for (int64_t head = 0; head < shape_.heads; head++) {
      const int64_t own = item_.first_head + head;
      const bool is_last = head + 1 == shape_.heads;
      block_.pack(HeadPlaces(shape_, rows.data(), own),
                  HeadPlaces(shape_, is_last ? next.data() : rows.data(),
                             is_last ? item_.first_head : own + 1));
      fold_head(head);
    }
  }

  void fold_head(int64_t head) {
    const int64_t first = head * shape_.rows;
    float* const out = out_ + first * shape_.out_stride;
    block_.score(head, scores_);
    // One row's sums wait for each other, so rows go through each stage together.
    for (int64_t t = 0, r = 0; t < shape_.tokens; t++)
      for (int64_t query = 0; query < shape_.queries; query++, r++)
        next_top_[r] = mask(scores_ + r * kBlock, seen_[t], a_.score_cap, top_[first + r]);
    for (int64_t r = 0; r < shape_.rows; r++) {
      const int64_t at = r * kBlock;
      const float decay = fold(
          scores_ + at, top_[first + r], next_top_[r], mass_[first + r],
          [&](const Vector& weights, int i) { block_.put_weights(weights, at + i, scores_); });
      top_[first + r] = next_top_[r];
      if (decay == 1) continue;
      float* const sums = out + r * shape_.out_stride;
      for (float* sum = sums; sum < sums + shape_.wide; sum += kLanes)
        (Vector::load(sum) * Vector::splat(decay)).store(sum);
    }
    block_.add_values(scores_, out);
  }

  void finish() {
    each_row([&](int64_t head, int64_t r, int64_t token, int64_t query_head) {
      const int64_t row = head * shape_.rows + r;
      const float* const sums = out_ + row * shape_.out_stride;
      float* to = a_.out + (token * a_.num_heads + query_head) * a_.value_width;
      for (int64_t h = 0; h < a_.value_width; h++) to[h] = sums[h] / mass_[row];
    });
  }

  const Attention& a_;
  const AttentionItem& item_;
  const ItemShape shape_;
  const int64_t row_bytes_ = a_.row_bytes();  // whose scales take divisions to count
  Block block_;
  size_t num_bytes_;
  float *scores_, *out_, *top_, *next_top_, *mass_;
  uint64_t* seen_;
};

// `Dense::attend`; `Integers`, if it is a type, sums what quantized pages are as integers. Padding
// behind an item's tokens gets zeros, which products leave out.
template <class Arithmetic, class Integers = void>
void attend(const Attention& a, const AttentionItem& item) {
  static thread_local Scratch scratch;
  [[maybe_unused]] typename Arithmetic::Session session;
  AttentionItem own = item;
  const int64_t first_token = item.y * a.num_tokens, group = a.num_heads / a.kv_heads;
  const int64_t size = (item.stop_query - item.first_query) * a.value_width;
  while (own.stop_token > own.first_token && !a.valid[first_token + own.stop_token - 1]) {
    const int64_t token = first_token + --own.stop_token;
    for (int64_t head = item.first_head; head < item.stop_head; head++) {
      const int64_t query_head = head * group + item.first_query;
      memset(a.out + (token * a.num_heads + query_head) * a.value_width, 0, size * sizeof(float));
    }
  }
  if (own.stop_token <= own.first_token) return;
#if defined(__AVX512VNNI__)
  const bool is_integer = a.stored == Stored::kInt8 || a.stored == Stored::kInt4;
  if constexpr (!std::is_void_v<Integers>)
    if (is_integer && a.bytes(a.row_width()) >= kLeastIntegerBytes)
      return Attender<IntegerBlock<Integers>>(a, own, scratch).run();
#endif
  Attender<NumberBlock<Arithmetic>>(a, own, scratch).run();
}

}  // namespace
