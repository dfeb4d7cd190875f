// Attention over pages: a block of keys and of values at a time becomes strips, so that both
// products are those of product.h (or an instruction set's own), and the softmax is folded over the
// blocks (Milakov & Gimelshein 2018, arXiv 1805.02867). Decoding and prefill sum in one order.
#pragma once
#include <array>

#include "kernels.h"
#include "product.h"
#include "quantized.h"
#include "scratch.h"
#include "vector.h"

namespace {

using ridgeline::Attention;
using ridgeline::AttentionItem;
using ridgeline::kDepth;
using ridgeline::padded;

constexpr int kBlock = 64;  // keys; a token's view of them is the bits of one word
constexpr float kMasked = -1e30f;

// Elements of two registers in turn, those of their first halves or of their second.
template <bool second, class Register, int... lane>
inline Register interleave(Register a, Register b, std::integer_sequence<int, lane...>) {
  constexpr int kSize = sizeof...(lane), kHalf = second ? kSize / 2 : 0;
  return __builtin_shufflevector(a, b, (lane / 2 + kHalf + lane % 2 * kSize)...);
}

// A square of words, as wide as a register, turned.
inline void transpose(Words (&rows)[kRegisterLanes]) {
  constexpr int kHalf = kRegisterLanes / 2;
  UNROLL for (int width = kHalf; width; width /= 2) {
    Words next[kRegisterLanes];
    UNROLL for (int i = 0; i < kHalf; i++) {
      next[2 * i] = interleave<false>(rows[i], rows[i + kHalf], Lanes());
      next[2 * i + 1] = interleave<true>(rows[i], rows[i + kHalf], Lanes());
    }
    UNROLL for (int i = 0; i < kRegisterLanes; i++)
      rows[i] = next[i];
  }
}

// A block of keys as strips of [depth, 16] words; words from `size` on are 0. What is packed next
// is fetched meanwhile, as memory would rest otherwise.
inline void pack_keys(const char* const* keys, const char* const* next, int64_t size, int64_t depth,
                      uint32_t* out) {
  for (int first = 0; first < kBlock; first += kRegisterLanes) {
    uint32_t* column = out + first / kLanes * depth * kLanes + first % kLanes;
    int64_t word = 0;
    for (; word + kRegisterLanes <= size; word += kRegisterLanes) {
      Words square[kRegisterLanes];
      UNROLL for (int s = 0; s < kRegisterLanes; s++) {
        square[s] = *(const LooseWords*)(keys[first + s] + 4 * word);
        __builtin_prefetch(next[first + s] + 4 * word, 0, 2);
      }
      transpose(square);
      UNROLL for (int k = 0; k < kRegisterLanes; k++)
        *(LooseWords*)(column + (word + k) * kLanes) = square[k];
    }
    for (; word < depth; word++)
      for (int s = 0; s < kRegisterLanes; s++) {
        uint32_t* to = column + word * kLanes + s;
        if (word < size)
          memcpy(to, keys[first + s] + 4 * word, 4);
        else
          *to = 0;
      }
  }
}

// A block of values as strips over the keys; features from `width` on are 0.
inline void pack_values(const float* const* values, const float* const* next, int64_t width,
                        float* out) {
  for (int64_t h = 0; h < width; h += kLanes)
    for (int s = 0; s < kBlock; s++, out += kLanes) {
      __builtin_prefetch(next[s] + h, 0, 2);
      if (h + kLanes <= width)
        Vector::load(values[s] + h).store(out);
      else
        for (int i = 0; i < kLanes; i++) out[i] = h + i < width ? values[s][h + i] : 0;
    }
}
inline void pack_values(const uint16_t* const* values, const uint16_t* const* next, int64_t width,
                        uint16_t* out) {
  constexpr int kShorts = 2 * kRegisterLanes, kStripSize = kBlock * kLanes;
  using ShortLanes = std::make_integer_sequence<int, kShorts>;
  auto row_of = [&](int s, int64_t h) {
    return out + h / kLanes * kStripSize + s * kLanes + h % kLanes * 2;
  };
  // Some rows at a time, so that lines that are read or written together do not lie a row apart.
  constexpr int kTogether = 16;
  int64_t h = 0;
  for (int first = 0; first < kBlock; first += kTogether)
    for (h = 0; h + kShorts <= width; h += kShorts)
      for (int s = first; s < first + kTogether; s += 2) {
        const Shorts a = *(const LooseShorts*)(values[s] + h);
        const Shorts b = *(const LooseShorts*)(values[s + 1] + h);
        __builtin_prefetch(next[s] + h, 0, 2);
        __builtin_prefetch(next[s + 1] + h, 0, 2);
        *(LooseShorts*)row_of(s, h) = interleave<false>(a, b, ShortLanes());
        *(LooseShorts*)row_of(s, h + kShorts / 2) = interleave<true>(a, b, ShortLanes());
      }
  for (; h < ridgeline::padded(width, kLanes); h++)
    for (int s = 0; s < kBlock; s += 2) {
      uint16_t* to = row_of(s, h);
      to[0] = h < width ? values[s][h] : 0;
      to[1] = h < width ? values[s + 1][h] : 0;
    }
}

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

// Folds a row's scores of a block into its softmax: the weights in their place, and the factor by
// which what was summed before is scaled.
template <class Arithmetic>
inline float fold(const float* scores, uint64_t seen, float cap, float& top, float& mass,
                  typename Arithmetic::Activation* weights) {
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
    Arithmetic::put(weight, weights + i * kLanes);
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
  struct Block {
    const char* keys[kBlock];
    const Element* values[kBlock];
  };
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
    expanded_ = carver.take<Element>(a_.stored == Stored::kPlain ? 0 : kBlock * expanded_stride_);
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

  void start() {
    each_row([&](int64_t row, int64_t token, int64_t query_head) {
      const auto* q = (const Element*)a_.q + (token * a_.num_heads + query_head) * a_.key_width;
      put<Arithmetic>(q, sizeof(Element) == 4, a_.key_width, depth_, q_, row);
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
    Block blocks[2];
    for (int64_t head = 0; head <= heads_; head++) {
      Block& found = blocks[head % 2];
      find(head < heads_ ? rows : next, head < heads_ ? head : 0, found);
      if (head == 0) continue;
      Block& block = blocks[(head - 1) % 2];
      if (a_.stored != Stored::kPlain) expand(rows, head - 1, found, block);
      const Block& ahead = a_.stored == Stored::kPlain ? found : block;
      pack_keys(block.keys, ahead.keys, a_.key_width / kWordElements, depth_ / kWordElements,
                (uint32_t*)keys_);
      pack_values(block.values, ahead.values, a_.value_width, values_);
      fold_head((head - 1) * rows_);
    }
  }

  // Keys and values of a head, where they lie.
  void find(const Rows& rows, int64_t head, Block& block) const {
    const int64_t key = a_.bytes(a_.key_at(item_.first_head + head));
    const int64_t value = a_.bytes(a_.value_at(item_.first_head + head));
    for (int s = 0; s < kBlock; s++) {
      block.keys[s] = rows[s] + key;
      block.values[s] = (const Element*)(rows[s] + value);
    }
  }

  // Quantized keys and values of a head as numbers; those of the next are fetched meanwhile.
  void expand(const Rows& rows, int64_t head, const Block& next, Block& block) {
    switch (a_.stored) {
      case Stored::kPlain: break;
      case Stored::kInt8: return expand<Stored::kInt8>(rows, head, next, block);
      case Stored::kFp8: return expand<Stored::kFp8>(rows, head, next, block);
      case Stored::kInt4: return expand<Stored::kInt4>(rows, head, next, block);
    }
  }
  template <Stored stored>
  void expand(const Rows& rows, int64_t head, const Block& next, Block& block) {
    const int64_t own = item_.first_head + head, C = a_.value_width;
    // The head's two parts: key and value, or what is latent and what is rotary in its key.
    const int64_t first = a_.key_at(own), width = a_.values_in_keys ? C : a_.key_width;
    const int64_t second = a_.values_in_keys ? C : a_.value_at(own);
    const int64_t rest = a_.values_in_keys ? a_.key_width - C : C;
    const int64_t before = own * a_.scales_of(width);
    const int64_t between = (a_.kv_heads - own) * a_.scales_of(width) + own * a_.scales_of(rest);
    auto part = [&](const char* row, int64_t start, int64_t size, int64_t scale, Element* out) {
      const char* from = row + a_.bytes(start);
      const char* scales = row + a_.bytes(a_.row_width()) + 2 * scale;
      const int64_t group = a_.together(size);
      for (int64_t h = 0; h < size; h += group, scales += 2)
        ::expand<stored>(from + a_.bytes(h), scale_at(scales), group, out + h);
    };
    for (int s = 0; s < kBlock; s++) {
      for (int64_t byte = 0; byte < a_.bytes(a_.key_width); byte += 64)
        __builtin_prefetch(next.keys[s] + byte, 0, 2);
      for (int64_t byte = 0; byte < a_.bytes(C); byte += 64)
        __builtin_prefetch((const char*)next.values[s] + byte, 0, 2);
      Element* const to = expanded_ + s * expanded_stride_;
      part(rows[s], first, width, before, to);
      part(rows[s], second, rest, before + between, to + width);
      block.keys[s] = (const char*)to;
      block.values[s] = a_.values_in_keys ? to : to + width;
    }
  }

  void fold_head(int64_t first) {
    float* out = out_ + first * out_stride_;
    Arithmetic::multiply({keys_, kBlock / kLanes, depth_, q_ + first * depth_, rows_, scores_,
                          kBlock, false, false});
    for (int64_t r = 0; r < rows_; r++) {
      const float decay =
          fold<Arithmetic>(scores_ + r * kBlock, seen_[r / queries_], a_.score_cap, top_[first + r],
                           mass_[first + r], weights_ + r * kBlock);
      if (decay == 1) continue;
      float* const sums = out + r * out_stride_;
      for (float* sum = sums; sum < sums + wide_; sum += kLanes)
        (Vector::load(sum) * Vector::splat(decay)).store(sum);
    }
    Arithmetic::multiply(
        {values_, wide_ / kLanes, kBlock, weights_, rows_, out, out_stride_, true, false});
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
  const int64_t depth_ = padded(a_.key_width, kDepth), wide_ = padded(a_.value_width, kLanes);
  const int64_t expanded_stride_ = a_.key_width + (a_.values_in_keys ? 0 : a_.value_width);
  const int64_t out_stride_ = wide_ + kLanes;  // or rows would share few lines of the cache
  size_t num_bytes_;
  Activation *q_, *weights_;
  float *scores_, *out_, *top_, *mass_;
  Element *keys_, *values_, *expanded_;
  uint64_t* seen_;
};

// `Dense::attend_float32` and `attend_bfloat16`.
template <class Arithmetic>
void attend(const Attention& a, const AttentionItem& item) {
  static thread_local Scratch scratch;
  [[maybe_unused]] typename Arithmetic::Session session;
  Attender<Arithmetic>(a, item, scratch).run();
}

}  // namespace
