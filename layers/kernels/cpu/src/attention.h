// Attention over pages: a block of keys and of values at a time becomes strips, so that both
// products are those of product.h (or an instruction set's own), and the softmax is folded over the
// blocks (Milakov & Gimelshein 2018, arXiv 1805.02867). Decoding and prefill sum in one order.
#pragma once
#include <array>
#include <cstring>
#include <type_traits>

#include "kernels.h"
#include "product.h"
#include "quantized.h"
#include "scratch.h"
#include "strips.h"
#include "vector.h"

namespace {

using ridgeline::Attention;
using ridgeline::AttentionItem;
using ridgeline::kDepth;
using ridgeline::padded;

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

// Folds a row's scores of a block into its softmax: puts the weights, and returns the factor by
// which what was summed before is scaled.
template <class Put>
inline float fold(const float* scores, uint64_t seen, float cap, float& top, float& mass, Put put) {
  Vector score[kBlock / kLanes], highest = Vector::splat(kMasked);
  UNROLL for (int i = 0; i < kBlock / kLanes; i++) {
    Vector s = Vector::load(scores + i * kLanes);
    if (cap > 0) s = soft_cap(s, cap);
    score[i] = ~seen ? select((uint32_t)(seen >> (i * kLanes)) & 0xffff, s, kMasked) : s;
    highest = maximum(score[i], highest);
  }
  const float before = top, now = largest(highest);
  top = now > before ? now : before;
  Vector total = Vector::splat(0);
  UNROLL for (int i = 0; i < kBlock / kLanes; i++) {
    const Vector weight = exponential(score[i] - Vector::splat(top));
    total = total + weight;
    put(weight, i * kLanes);
  }
  const float decay = top == before ? 1 : largest(exponential(Vector::splat(before - top)));
  mass = mass * decay + sum(total);
  return decay;
}

// One item: the state of its softmaxes, and the strips of the block at hand. Rows of a KV head are
// its query heads for each token in turn.
template <class Arithmetic>
class Attender {
 public:
  Attender(const Attention& a, const AttentionItem& item, Scratch& scratch) : a_(a), item_(item) {
    carve(nullptr);
    carve(scratch.reserve(num_bytes_));
  }

  void run() {
    start();
    int64_t begin = INT64_MAX, end = 0;  // of the keys that any token sees
    const int64_t capacity = a_.table_columns * a_.page_tokens;
    for (int64_t t = first_token_; t < first_token_ + tokens_; t++) {
      if (!a_.valid[t]) continue;
      const int64_t first = a_.first && a_.first[t] > 0 ? a_.first[t] : 0;
      const int64_t stop = a_.last[t] < capacity ? (int64_t)a_.last[t] + 1 : capacity;
      begin = first < begin ? first : begin;
      end = stop > end ? stop : end;
    }
    const int64_t oldest = begin / kBlock * kBlock;  // block of what no first tokens are
    int64_t start = a_.first_tokens > 0 ? 0 : oldest, after;
    Rows rows, next;
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
  using Element = typename Arithmetic::Element;
  using Activation = typename Arithmetic::Activation;
  using Rows = std::array<const char*, kBlock>;
  static constexpr int64_t kWordElements = 4 / sizeof(Element);

  void carve(void* memory) {
    Carver carver(memory);
    q_ = carver.take<Activation>(heads_ * rows_ * depth_);
    weights_ = carver.take<Activation>(rows_ * kBlock);
    scores_ = carver.take<float>(rows_ * kBlock);
    out_ = carver.take<float>(heads_ * rows_ * out_stride_);
    top_ = carver.take<float>(heads_ * rows_);
    mass_ = carver.take<float>(heads_ * rows_);
    keys_ = carver.take<Element>(kBlock * depth_);
    values_ = carver.take<Element>(kBlock * wide_);
    key_scales_ = carver.take<float>(kBlock * (latent_.count + keyed_.count));
    value_scales_ = carver.take<float>(kBlock * valued_.count);
    partial_ = carver.take<float>(is_plain_ ? 0 : rows_ * kBlock);
    seen_ = carver.take<uint64_t>(tokens_);
    num_bytes_ = carver.taken();
  }

  // Calls visit(row of the state, token of the rectangle, query head).
  template <class Visit>
  void each_row(Visit visit) const {
    for (int64_t head = 0; head < heads_; head++)
      for (int64_t r = 0; r < rows_; r++)
        visit(head * rows_ + r, first_token_ + r / queries_,
              (item_.first_head + head) * group_ + item_.first_query + r % queries_);
  }

  // Calls visit(first element, elements, depth, depth of those before) for what a query multiplies
  // by itself: all of a plain key, of another each group.
  template <class Visit>
  void each_group(Visit visit) const {
    if (is_plain_) return visit(0, a_.key_width, depth_, 0);
    int64_t first = 0, before = 0;
    for (const Groups& part : {latent_, keyed_})
      for (int64_t g = 0; g < part.count; g++, first += part.size, before += part.depth())
        visit(first, part.size, part.depth(), before);
  }

  void start() {
    each_row([&](int64_t row, int64_t token, int64_t query_head) {
      const auto* q = (const Element*)a_.q + (token * a_.num_heads + query_head) * a_.key_width;
      Activation* const own = q_ + row / rows_ * rows_ * depth_;
      each_group([&](int64_t first, int64_t size, int64_t depth, int64_t before) {
        put<Arithmetic>(q + first, sizeof(Element) == 4, size, depth, own + before * rows_,
                        row % rows_);
      });
      top_[row] = a_.sinks ? a_.sinks[query_head] : kMasked;
      mass_[row] = 1;
      memset(out_ + row * out_stride_, 0, wide_ * sizeof(float));
    });
  }

  // A block's tokens, from `start` on; that before `end` is repeated, and its copies are masked.
  Rows rows_of(int64_t start, int64_t end) const {
    const int64_t own = item_.y * a_.tables + (a_.tables > 1 ? item_.first_head : 0);
    const int32_t* table = a_.table + own * a_.table_columns;
    auto page_of = [this, table](int64_t column) {
      const int64_t named = table[column], last = a_.num_pages - 1;
      const int64_t page = named < 0 ? 0 : named < last ? named : last;
      return (const char*)a_.pages + page * a_.page_tokens * a_.row_bytes();
    };
    int64_t column = start / a_.page_tokens, token = start % a_.page_tokens;
    const char* page = page_of(column);
    Rows rows;
    for (int s = 0; s < kBlock; s++) {
      rows[s] = page + token * a_.row_bytes();
      if (start + s + 1 >= end || ++token < a_.page_tokens) continue;
      page = page_of(++column);
      token = 0;
    }
    return rows;
  }

  void fold_block(int64_t start, const Rows& rows, const Rows& next) {
    for (int64_t t = 0; t < tokens_; t++) seen_[t] = visible(a_, first_token_ + t, start);
    for (int64_t head = 0; head < heads_; head++) {
      const int64_t own = item_.first_head + head;
      if (head + 1 < heads_)
        pack(rows.data(), own, rows.data(), own + 1);
      else
        pack(rows.data(), own, next.data(), item_.first_head);
      fold_head(head * rows_);
    }
  }

  // A head's keys and values as strips; those of the next are fetched meanwhile.
  void pack(const char* const* rows, int64_t head, const char* const* next, int64_t next_head) {
    auto key = [this](const char* const* rows, int64_t head) {
      return Place{rows, a_.bytes(a_.key_at(head))};
    };
    auto value = [this](const char* const* rows, int64_t head) {
      return Place{rows, a_.bytes(a_.value_at(head))};
    };
    const Place keys = key(rows, head), next_keys = key(next, next_head);
    const Place values = value(rows, head), next_values = value(next, next_head);
    auto pack_as = [&](auto stored) {
      constexpr Stored kStored = decltype(stored)::value;
      // Of a latent key the part that is the value too, and the other.
      const int64_t shared = a_.bytes(latent_.count * latent_.size);
      const Place own{rows, keys.at + shared}, next_own{next, next_keys.at + shared};
      pack_keys<kStored>(keys, next_keys, latent_, keys_);
      pack_keys<kStored>(own, next_own, keyed_, keys_ + kBlock * latent_.count * latent_.depth());
      pack_values<kStored>(values, next_values, a_.value_width, values_);
      const int64_t at = a_.bytes(a_.row_width());
      const int64_t key_scales = latent_.count + keyed_.count;
      const int64_t first_value = latent_.count ? 0 : a_.kv_heads * keyed_.count;
      auto scales = [&](const char* const* rows, int64_t head, int64_t first, int64_t each) {
        return Place{rows, at + 2 * (first + head * each)};
      };
      read_scales(scales(rows, head, 0, key_scales), scales(next, next_head, 0, key_scales),
                  key_scales, key_scales_);
      read_scales(scales(rows, head, first_value, valued_.count),
                  scales(next, next_head, first_value, valued_.count), valued_.count,
                  value_scales_);
    };
    switch (a_.stored) {
      case Stored::kPlain:
        pack_keys(keys, next_keys, a_.key_width / kWordElements, depth_ / kWordElements,
                  (uint32_t*)keys_);
        return pack_values(values, next_values, a_.value_width, values_);
      case Stored::kInt8:
        return pack_as(std::integral_constant<Stored, Stored::kInt8>());
      case Stored::kFp8:
        return pack_as(std::integral_constant<Stored, Stored::kFp8>());
      case Stored::kInt4:
        return pack_as(std::integral_constant<Stored, Stored::kInt4>());
    }
  }

  // Scores of a head's rows. Quantized, each group has its own, which its scales multiply.
  void score(const Activation* q) {
    int64_t group = 0;
    each_group([&](int64_t, int64_t, int64_t depth, int64_t before) {
      float* const own = group ? partial_ : scores_;
      Arithmetic::multiply({keys_ + before * kBlock, kBlock / kLanes, depth, q + before * rows_,
                            rows_, own, kBlock, false, false});
      if (is_plain_) return;
      const float* const scales = key_scales_ + group++ * kBlock;
      for (int64_t i = 0; i < rows_ * kBlock; i += kLanes) {
        const Vector scale = Vector::load(scales + i % kBlock), found = Vector::load(own + i);
        (own == scores_ ? found * scale : multiply_add(found, scale, Vector::load(scores_ + i)))
            .store(scores_ + i);
      }
    });
  }

  void fold_head(int64_t first) {
    float* const out = out_ + first * out_stride_;
    score(q_ + first * depth_);
    for (int64_t r = 0; r < rows_; r++) {
      float* const scores = scores_ + r * kBlock;
      const float decay = fold(scores, seen_[r / queries_], a_.score_cap, top_[first + r],
                               mass_[first + r], [&](const Vector& weight, int i) {
                                 if (is_plain_)
                                   Arithmetic::put(weight, weights_ + r * kBlock + i);
                                 else
                                   weight.store(scores + i);
                               });
      if (decay == 1) continue;
      float* const sums = out + r * out_stride_;
      for (float* sum = sums; sum < sums + wide_; sum += kLanes)
        (Vector::load(sum) * Vector::splat(decay)).store(sum);
    }
    if (is_plain_) return add_values(0, wide_, out);
    for (int64_t g = 0; g < valued_.count; g++) {
      for (int64_t i = 0; i < rows_ * kBlock; i += kLanes)
        Arithmetic::put(
            Vector::load(scores_ + i) * Vector::load(value_scales_ + g * kBlock + i % kBlock),
            weights_ + i);
      add_values(g * valued_.size, padded(valued_.size, kLanes), out);
    }
  }

  // Adds the weighted values of so many features.
  void add_values(int64_t first, int64_t width, float* out) {
    Arithmetic::multiply({values_ + first * kBlock, width / kLanes, kBlock, weights_, rows_,
                          out + first, out_stride_, true, false});
  }

  void finish() {
    each_row([&](int64_t row, int64_t token, int64_t query_head) {
      float* to = a_.out + (token * a_.num_heads + query_head) * a_.value_width;
      for (int64_t h = 0; h < a_.value_width; h++) to[h] = out_[row * out_stride_ + h] / mass_[row];
    });
  }

  const Attention& a_;
  const AttentionItem& item_;
  const int64_t group_ = a_.num_heads / a_.kv_heads;
  const int64_t tokens_ = item_.stop_token - item_.first_token;
  const int64_t heads_ = item_.stop_head - item_.first_head;
  const int64_t queries_ = item_.stop_query - item_.first_query, rows_ = tokens_ * queries_;
  const int64_t first_token_ = item_.y * a_.num_tokens + item_.first_token;
  const bool is_plain_ = a_.stored == Stored::kPlain;
  // Of a key: what is its value too, and the other elements.
  const Groups latent_ = a_.groups(a_.values_in_keys ? a_.value_width : 0);
  const Groups keyed_ = a_.groups(a_.key_width - (a_.values_in_keys ? a_.value_width : 0));
  const Groups valued_ = a_.groups(a_.value_width);
  const int64_t depth_ = is_plain_
                             ? padded(a_.key_width, kDepth)
                             : latent_.count * latent_.depth() + keyed_.count * keyed_.depth();
  const int64_t wide_ = padded(a_.value_width, kLanes);
  const int64_t out_stride_ = wide_ + kLanes;  // or rows would share few lines of the cache
  size_t num_bytes_;
  Activation *q_, *weights_;
  float *scores_, *out_, *top_, *mass_, *key_scales_, *value_scales_, *partial_;
  Element *keys_, *values_;
  uint64_t* seen_;
};

// `Dense::attend`. Padding behind an item's tokens gets zeros, which products leave out.
template <class Arithmetic>
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
  if (own.stop_token > own.first_token) Attender<Arithmetic>(a, own, scratch).run();
}

}  // namespace
