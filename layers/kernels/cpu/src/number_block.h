// A block of keys and of values as strips of numbers, which products (product.h, or an instruction
// set's own) take for weights. Scales of quantized ones multiply scores, and the weights of values.
#pragma once
#include <type_traits>

#include "kernels.h"
#include "product.h"
#include "quantized.h"
#include "scratch.h"
#include "strips.h"
#include "vector.h"

namespace {

using ridgeline::AttentionItem;
using ridgeline::kDepth;
using ridgeline::padded;
using ridgeline::Paged;

// Rows of an item's KV heads: the query heads of each for each token in turn; what parts of a key
// and a value share scales.
struct ItemShape {
  const Paged& a;
  const AttentionItem& item;
  const int64_t group = a.num_heads / a.kv_heads;
  const int64_t tokens = item.stop_token - item.first_token;
  const int64_t heads = item.stop_head - item.first_head;
  const int64_t queries = item.stop_query - item.first_query, rows = tokens * queries;
  const int64_t first_token = item.y * a.num_tokens + item.first_token;
  // Of a key: what is its value too, and the other elements.
  const Groups latent = a.groups(a.values_in_keys ? a.value_width : 0);
  const Groups keyed = a.groups(a.key_width - (a.values_in_keys ? a.value_width : 0));
  const Groups valued = a.groups(a.value_width);
  const int64_t quantized_depth = latent.count * latent.depth() + keyed.count * keyed.depth();
  const int64_t wide = padded(a.value_width, kLanes);
  const int64_t out_stride = wide + kLanes;  // or rows would share few lines of the cache

  // Calls visit(first element, elements, depth, depth of those before) for each group of a key.
  template <class Visit>
  void each_group(Visit visit) const {
    int64_t first = 0, before = 0;
    for (const Groups& part : {latent, keyed})
      for (int64_t g = 0; g < part.count; g++, first += part.size, before += part.depth())
        visit(first, part.size, part.depth(), before);
  }
};

// Where a head's keys and values lie in the rows of a block, and their scales.
struct HeadPlaces {
  Place keys, keyed, values, key_scales, value_scales;

  HeadPlaces(const ItemShape& s, const char* const* rows, int64_t head)
      : keys{rows, s.a.bytes(s.a.key_at(head))},
        keyed{rows, keys.at + s.a.bytes(s.latent.count * s.latent.size)},
        values{rows, s.a.bytes(s.a.value_at(head))},
        key_scales{rows, s.a.bytes(s.a.row_width()) +
                             2 * head * (s.latent.count + s.keyed.count)},
        value_scales{rows, s.a.bytes(s.a.row_width()) +
                               2 * (head * s.valued.count +
                                    (s.latent.count ? 0 : s.a.kv_heads * s.keyed.count))} {}
};

template <class Arithmetic>
class NumberBlock {
 public:
  static constexpr int64_t kQueryBytes = sizeof(typename Arithmetic::Element);  // of an element
  // Rows of queries that go through a block together, so that the first cache has what they need:
  // whole sixteens, as many as the arithmetic's tiles take at once or fill.
  static constexpr int64_t kNearRows = Arithmetic::kNearRows;

  explicit NumberBlock(const ItemShape& shape) : s_(shape) {}

  void carve(Carver& carver) {
    q_ = carver.take<Activation>(s_.heads * s_.rows * depth_);
    weights_ = carver.take<Activation>(kNearRows * kBlock);
    keys_ = carver.take<Element>(kBlock * depth_);
    values_ = carver.take<Element>(kBlock * s_.wide);
    key_scales_ = carver.take<float>(kBlock * (s_.latent.count + s_.keyed.count));
    value_scales_ = carver.take<float>(kBlock * s_.valued.count);
    partial_ = carver.take<float>(is_plain_ ? 0 : kNearRows * kBlock);
  }

  // A query becomes row `row` of head `head`'s.
  void put_query(int64_t head, int64_t row, const void* query) {
    Activation* const queries = q_ + head * s_.rows * depth_;
    if (is_plain_ && sizeof(Element) == sizeof(Activation)) {  // as it is
      Activation* const to = queries + row * depth_;
      memcpy(to, query, s_.a.key_width * sizeof(Element));
      memset(to + s_.a.key_width, 0, (depth_ - s_.a.key_width) * sizeof(Element));
      return;
    }
    each_group([&](int64_t first, int64_t size, int64_t depth, int64_t before) {
      put<Arithmetic>((const Element*)query + first, sizeof(Element) == 4, size, depth,
                      queries + before * s_.rows, row);
    });
  }

  // Rows of the next block, of whose heads `pack` is called.
  void start_block(const char* const*) {}

  // A head's keys and values as strips; those of the next are fetched meanwhile.
  void pack(const HeadPlaces& current, const HeadPlaces& next) {
    auto pack_as = [&](auto stored) {
      constexpr Stored kStored = decltype(stored)::value;
      pack_keys<kStored>(current.keys, next.keys, s_.latent, keys_);
      pack_keys<kStored>(current.keyed, next.keyed, s_.keyed,
                         keys_ + kBlock * s_.latent.count * s_.latent.depth());
      pack_values<kStored>(current.values, next.values, s_.a.value_width, values_);
      read_scales(current.key_scales, next.key_scales, s_.latent.count + s_.keyed.count,
                  key_scales_);
      read_scales(current.value_scales, next.value_scales, s_.valued.count, value_scales_);
    };
    switch (s_.a.stored) {
      case Stored::kPlain:
        pack_keys(current.keys, next.keys, s_.a.key_width / kWordElements, depth_ / kWordElements,
                  (uint32_t*)keys_);
        return pack_values(current.values, next.values, s_.a.value_width, values_);
      case Stored::kInt8:
        return pack_as(std::integral_constant<Stored, Stored::kInt8>());
      case Stored::kFp8:
        return pack_as(std::integral_constant<Stored, Stored::kFp8>());
      case Stored::kInt4:
        return pack_as(std::integral_constant<Stored, Stored::kInt4>());
    }
  }

  // Scores of a head's rows [first, first + count), as [count, 64]. Quantized, each
  // group has its own, which its scales multiply.
  void score(int64_t head, int64_t first, int64_t count, float* scores) {
    const Activation* const q = q_ + head * s_.rows * depth_;
    int64_t group = 0;
    each_group([&](int64_t, int64_t, int64_t depth, int64_t before) {
      float* const products = group ? partial_ : scores;
      Arithmetic::multiply({keys_ + before * kBlock, kBlock / kLanes, depth,
                            q + before * s_.rows + first * depth, count, products, kBlock, false,
                            false});
      if (is_plain_) return;
      const float* const scales = key_scales_ + group++ * kBlock;
      for (int64_t i = 0; i < count * kBlock; i += kLanes) {
        const Vector scale = Vector::load(scales + i % kBlock);
        const Vector product = Vector::load(products + i);
        (products == scores ? product * scale
                            : multiply_add(product, scale, Vector::load(scores + i)))
            .store(scores + i);
      }
    });
  }

  // Weights of row `row`, in place of its scores.
  void put_weights(const Vector (&weights)[kBlock / kLanes], int64_t row, float* scores) {
    if (is_plain_) {
      UNROLL for (int i = 0; i < kBlock / kLanes; i += 2)
        Arithmetic::put(weights[i], weights[i + 1], weights_ + row * kBlock + i * kLanes);
    } else {
      UNROLL for (int i = 0; i < kBlock / kLanes; i++)
        weights[i].store(scores + row * kBlock + i * kLanes);
    }
  }

  // Adds the values that the weights of `count` rows multiply to their sums.
  void add_values(const float* weights, int64_t count, bool accumulates, float* out) {
    if (is_plain_) return multiply_values(0, s_.wide, count, accumulates, out);
    for (int64_t g = 0; g < s_.valued.count; g++) {
      for (int64_t i = 0; i < count * kBlock; i += kLanes)
        Arithmetic::put(
            Vector::load(weights + i) * Vector::load(value_scales_ + g * kBlock + i % kBlock),
            weights_ + i);
      multiply_values(g * s_.valued.size, padded(s_.valued.size, kLanes), count, accumulates, out);
    }
  }

 private:
  using Element = typename Arithmetic::Element;
  using Activation = typename Arithmetic::Activation;
  static constexpr int64_t kWordElements = 4 / sizeof(Element);

  // `ItemShape::each_group`; a plain key is one.
  template <class Visit>
  void each_group(Visit visit) const {
    if (is_plain_) return visit(0, s_.a.key_width, depth_, 0);
    s_.each_group(visit);
  }

  void multiply_values(int64_t first, int64_t width, int64_t count, bool accumulates, float* out) {
    Arithmetic::multiply({values_ + first * kBlock, width / kLanes, kBlock, weights_, count,
                          out + first, s_.out_stride, accumulates, false});
  }

  const ItemShape& s_;
  const bool is_plain_ = s_.a.stored == Stored::kPlain;
  const int64_t depth_ = is_plain_ ? padded(s_.a.key_width, kDepth) : s_.quantized_depth;
  Activation *q_, *weights_;
  Element *keys_, *values_;
  float *key_scales_, *value_scales_, *partial_;
};

}  // namespace
