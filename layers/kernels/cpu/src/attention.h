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

constexpr float kNoScore = -1e30f;  // the largest score of a row that sees nothing yet

// Which keys [start, start + 64) a token sees, as bits.
inline uint64_t visible(const Attention& a, int64_t token, int64_t start) {
  auto up_to = [](int64_t n) { return n <= 0 ? 0 : n >= kBlock ? ~0ull : (1ull << n) - 1; };
  uint64_t visible_keys = up_to(a.last[token] - start + 1);
  if (a.first) {
    uint64_t live = ~up_to(a.first[token] - start) | up_to(a.first_tokens - start);
    if (a.tree_start) live |= ~up_to(a.tree_start[token] - start);  // whose bits have said it
    visible_keys &= live;
  }
  if (a.tree_start) {
    const int64_t shift = a.tree_start[token] - start;  // of the row's own tokens in the block
    const uint64_t bits = (uint32_t)a.tree_bits[token];
    if (shift < kBlock) {
      const uint64_t tree_keys = shift >= 0 ? bits << shift : -shift < 32 ? bits >> -shift : 0;
      visible_keys &= up_to(shift) | tree_keys;
    }
  }
  return visible_keys;
}

// Caps and masks a row's scores of a block; sixteen of which the largest is the row's.
inline Vector mask(float* scores, uint64_t visible_keys, float cap) {
  const bool changes = cap > 0 || ~visible_keys;
  Vector highest = Vector::splat(kNoScore);
  UNROLL for (int i = 0; i < kBlock; i += kLanes) {
    Vector score = Vector::load(scores + i);
    if (changes) {
      if (cap > 0) score = soft_cap(score, cap);
      score = select((uint32_t)(visible_keys >> i) & 0xffff, score, -__builtin_inff());
      score.store(scores + i);
    }
    highest = maximum(score, highest);
  }
  return highest;
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
  static constexpr int64_t kNearRows = Block::kNearRows;
  static_assert(kNearRows % kLanes == 0, "reductions go by sixteens");

  void carve(void* memory) {
    Carver carver(memory);
    const int64_t rows = shape_.heads * row_stride_;
    block_.carve(carver);
    scores_ = carver.take<float>(kNearRows * kBlock);
    out_ = carver.take<float>(rows * shape_.out_stride);
    top_ = carver.take<float>(rows);
    mass_ = carver.take<float>(rows);
    visible_keys_ = carver.take<uint64_t>(shape_.rows);
    has_sums_ = carver.take<bool>(shape_.heads * near_groups_);
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
    for (int64_t row = 0; row < shape_.heads * row_stride_; row++) {  // and behind a head's rows
      top_[row] = kNoScore;
      mass_[row] = 1;
    }
    each_row([&](int64_t head, int64_t r, int64_t token, int64_t query_head) {
      const int64_t row = head * row_stride_ + r;
      block_.put_query(head, r,
                       (const char*)a_.q + (token * a_.num_heads + query_head) * query_bytes);
      if (a_.sinks && a_.sinks[query_head] > kNoScore) top_[row] = a_.sinks[query_head];
    });
    memset(has_sums_, 0, shape_.heads * near_groups_);
  }

  BlockRows rows_of(int64_t start, int64_t end) const {
    const int64_t table = item_.y * a_.tables + (a_.tables > 1 ? item_.first_head : 0);
    return block_rows(a_, row_bytes_, table, start, end);
  }

  void fold_block(int64_t start, const BlockRows& rows, const BlockRows& next) {
    block_.start_block(rows.data());
    uint64_t* visible_keys = visible_keys_;
    for (int64_t t = 0; t < shape_.tokens; t++) {
      const uint64_t keys = visible(a_, shape_.first_token + t, start);
      for (int64_t query = 0; query < shape_.queries; query++) *visible_keys++ = keys;
    }
    for (int64_t head = 0; head < shape_.heads; head++) {
      const int64_t kv_head = item_.first_head + head;
      const bool is_last = head + 1 == shape_.heads;
      block_.pack(HeadPlaces(shape_, rows.data(), kv_head),
                  HeadPlaces(shape_, is_last ? next.data() : rows.data(),
                             is_last ? item_.first_head : kv_head + 1));
      for (int64_t first = 0; first < shape_.rows; first += kNearRows)
        fold_rows(head, first, least(kNearRows, shape_.rows - first));
    }
  }

  // Folds a block into rows [first, first + count) of a head. A row's sums wait for each other, so
  // rows go through each stage together.
  void fold_rows(int64_t head, int64_t first, int64_t count) {
    const uint64_t* const visible_keys = visible_keys_ + first;
    uint64_t by_any = 0;
    for (int64_t r = 0; r < count; r++) by_any |= visible_keys[r];
    if (!by_any) return;
    const int64_t row = head * row_stride_ + first;
    bool& has_sums = has_sums_[head * near_groups_ + first / kNearRows];
    block_.score(head, first, count, scores_);
    for (int64_t r = 0; r < count; r += kLanes)
      weigh(row, r, least(kLanes, count - r), visible_keys + r, has_sums);
    block_.add_values(scores_, count, has_sums, out_ + row * shape_.out_stride);
    has_sums = true;
  }

  // Turns the scores of up to sixteen rows, `row + r` and the next, into weights, and scales what
  // was summed of them.
  void weigh(int64_t row, int64_t r, int64_t count, const uint64_t* visible_keys, bool has_sums) {
    float* const scores = scores_ + r * kBlock;
    for (int64_t i = 0; i < count; i++)
      mask(scores + i * kBlock, visible_keys[i], a_.score_cap).store(sixteens_[i]);
    float *const tops = top_ + row + r, *const masses = mass_ + row + r;
    const Vector before = Vector::load(tops);
    const Vector top = maximum(reduce_rows(sixteens_, count, kLarger), before);
    Vector decay = exponential(before - top);
    UNROLL for (int i = 0; i < kRegisters; i++)
      decay.part[i] = top.part[i] == before.part[i] ? Floats{} + 1.f : decay.part[i];
    top.store(tops);
    for (int64_t i = 0; i < count; i++) {
      const Vector row_top = Vector::splat(tops[i]);
      Vector weights[kBlock / kLanes], total = Vector::splat(0);
      UNROLL for (int k = 0; k < kBlock / kLanes; k++)
        weights[k] = exponential(Vector::load(scores + i * kBlock + k * kLanes) - row_top);
      UNROLL for (const Vector& sixteen : weights) total = total + sixteen;
      total.store(sixteens_[i]);
      block_.put_weights(weights, r + i, scores_);
    }
    multiply_add(Vector::load(masses), decay, reduce_rows(sixteens_, count, kSum)).store(masses);
    if (has_sums) scale(decay, count, out_ + (row + r) * shape_.out_stride);
  }

  // Scales what was summed of up to sixteen rows.
  void scale(const Vector& decay, int64_t count, float* out) const {
    float decays[kLanes];
    decay.store(decays);
    int64_t changed[kLanes], num_changed = 0;  // without branches, which would be mispredicted
    for (int64_t r = 0; r < count; r++) {
      changed[num_changed] = r;
      num_changed += decays[r] != 1;
    }
    for (int64_t i = 0; i < num_changed; i++) {
      float* const sums = out + changed[i] * shape_.out_stride;
      const Vector factor = Vector::splat(decays[changed[i]]);
      for (float* sum = sums; sum < sums + shape_.wide; sum += kLanes)
        (Vector::load(sum) * factor).store(sum);
    }
  }

  void finish() {
    const int64_t size = a_.out_bytes();
    each_row([&](int64_t head, int64_t r, int64_t token, int64_t query_head) {
      const int64_t row = head * row_stride_ + r;
      char* const to = (char*)a_.out + (token * a_.num_heads + query_head) * a_.value_width * size;
      if (a_.totals)
        a_.totals[token * a_.num_heads + query_head] = top_[row] + __builtin_logf(mass_[row]);
      if (!has_sums_[head * near_groups_ + r / kNearRows]) {
        memset(to, 0, a_.value_width * size);
        return;
      }
      const float* const sums = out_ + row * shape_.out_stride;
      const Vector mass = Vector::splat(mass_[row]);
      for (int64_t h = 0; h < a_.value_width; h += kLanes) {
        const Vector result = Vector::load(sums + h) / mass;
        const int64_t count = least(kLanes, a_.value_width - h);
        alignas(64) char tail[kLanes * sizeof(float)];
        char* const at = count == kLanes ? to + h * size : tail;
        a_.is_float32_out ? result.store((float*)at) : narrow(result, (uint16_t*)at);
        if (at == tail) memcpy(to + h * size, tail, count * size);
      }
    });
  }

  const Attention& a_;
  const AttentionItem& item_;
  const ItemShape shape_;
  const int64_t row_bytes_ = a_.row_bytes();  // whose scales take divisions to count
  const int64_t row_stride_ = padded(shape_.rows, kLanes);  // between heads
  const int64_t near_groups_ = (shape_.rows + kNearRows - 1) / kNearRows;  // of a head
  Block block_;
  size_t num_bytes_;
  float *scores_, *out_, *top_, *mass_;
  uint64_t* visible_keys_;  // keys of the block that a row sees
  bool* has_sums_;  // whether rows that go through together have sums in out_
  float sixteens_[kLanes][kLanes] = {};  // of sixteen rows, parts of their maxima or sums
};

// `Dense::attend`; `Integers`, if it is a type, sums what quantized pages are as integers. Padding
// behind an item's tokens gets zeros, which products leave out.
template <class Arithmetic, class Integers = void>
void attend(const Attention& a, const AttentionItem& item) {
  static thread_local Scratch scratch;
  [[maybe_unused]] typename Arithmetic::Session session;
  AttentionItem trimmed = item;
  const int64_t first_token = item.y * a.num_tokens, group = a.num_heads / a.kv_heads;
  const int64_t row_bytes = a.value_width * a.out_bytes();
  while (trimmed.stop_token > trimmed.first_token &&
         !a.valid[first_token + trimmed.stop_token - 1]) {
    const int64_t token = first_token + --trimmed.stop_token;
    for (int64_t head = item.first_head; head < item.stop_head; head++) {
      const int64_t query_head = head * group + item.first_query;
      const int64_t row = token * a.num_heads + query_head;
      const int64_t count = item.stop_query - item.first_query;
      memset((char*)a.out + row * row_bytes, 0, count * row_bytes);
      for (int64_t i = 0; a.totals && i < count; i++) a.totals[row + i] = kNoScore;
    }
  }
  if (trimmed.stop_token <= trimmed.first_token) return;
#if defined(__AVX512VNNI__)
  const bool is_integer = a.stored == Stored::kInt8 || a.stored == Stored::kInt4;
  if constexpr (!std::is_void_v<Integers>)
    if (is_integer && a.bytes(a.row_width()) >= kLeastIntegerBytes)
      return Attender<IntegerBlock<Integers>>(a, trimmed, scratch).run();
#endif
  Attender<NumberBlock<Arithmetic>>(a, trimmed, scratch).run();
}

}  // namespace
