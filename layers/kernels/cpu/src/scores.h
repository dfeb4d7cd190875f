// What an indexer's heads score keys in pages (layers/mixers/indexer.py). A block of keys becomes
// strips, as attention's do (number_block.h), so a product has one order of summation whatever is
// computed beside it; heads are added up in their order.
#pragma once
#include <cstring>

#include "block_rows.h"
#include "kernels.h"
#include "number_block.h"
#include "scratch.h"
#include "vector.h"

namespace {

using ridgeline::Scores;

// One item: its queries, and the block of keys at hand.
template <class Block>
class Scorer {
 public:
  Scorer(const Scores& s, const AttentionItem& item, Scratch& scratch)
      : s_(s), y_(item.y), shape_{s, item}, block_(shape_) {
    carve(nullptr);
    carve(scratch.reserve(num_bytes_));
  }

  void run(int64_t start, int64_t stop) {
    const int64_t query_bytes = s_.key_width * Block::kQueryBytes;
    const char* const queries =
        (const char*)s_.q + shape_.first_token * s_.num_heads * query_bytes;
    for (int64_t r = 0; r < shape_.rows; r++) block_.put_query(0, r, queries + r * query_bytes);
    BlockRows rows = rows_of(start, stop), next;
    for (; start < stop; start += kBlock, rows = next) {
      const int64_t after = start + kBlock;
      next = after < stop ? rows_of(after, stop) : rows;
      block_.start_block(rows.data());
      block_.pack(HeadPlaces(shape_, rows.data(), 0), HeadPlaces(shape_, next.data(), 0));
      for (int64_t first = 0; first < shape_.rows; first += Block::kNearRows)
        block_.score(0, first, least(Block::kNearRows, shape_.rows - first),
                     products_ + first * kBlock);
      add_heads(start, stop);
    }
  }

 private:
  void carve(void* memory) {
    Carver carver(memory);
    block_.carve(carver);
    products_ = carver.take<float>(shape_.rows * kBlock);
    num_bytes_ = carver.taken();
  }

  BlockRows rows_of(int64_t start, int64_t stop) const {
    return block_rows(s_, row_bytes_, y_, start, stop);
  }

  void add_heads(int64_t start, int64_t stop) {
    const Vector zero = Vector::splat(0);
    const int64_t count = stop - start < kBlock ? stop - start : kBlock;
    for (int64_t t = 0; t < shape_.tokens; t++) {
      const int64_t token = shape_.first_token + t;
      const float* const weights = s_.weights + token * s_.num_heads;
      const float* const products = products_ + t * s_.num_heads * kBlock;
      float sums[kBlock];
      for (int i = 0; i < kBlock; i += kLanes) {
        Vector total = zero;
        for (int64_t head = 0; head < s_.num_heads; head++) {
          const Vector product = Vector::load(products + head * kBlock + i);
          const Vector positive = maximum(zero, product);  // in this order NaN stays NaN
          total = multiply_add(Vector::splat(weights[head]), positive, total);
        }
        total.store(sums + i);
      }
      memcpy(s_.out + token * s_.capacity() + start, sums, count * sizeof(float));
    }
  }

  const Scores& s_;
  const int64_t y_;
  const ItemShape shape_;
  const int64_t row_bytes_ = s_.row_bytes();
  Block block_;
  size_t num_bytes_;
  float* products_;
};

// `Dense::score`.
template <class Arithmetic>
void score(const Scores& s, const AttentionItem& item, int64_t start, int64_t stop) {
  static thread_local Scratch scratch;
  [[maybe_unused]] typename Arithmetic::Session session;
  Scorer<NumberBlock<Arithmetic>>(s, item, scratch).run(start, stop);
}

}  // namespace
