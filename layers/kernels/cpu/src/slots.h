// Adapters of a product's rows as XLA passes them.
#pragma once
#include <algorithm>
#include <optional>
#include <vector>

#include "adapters.h"
#include "dispatch.h"
#include "xla/ffi/api/ffi.h"

namespace ridgeline {

// What follows a weight in the arguments of its product: x [T, D], strips of A and of B, i32: ranks
// of each slot [N], a slot of each row [T] (-1: none), the rows in the order of their slots [T], and
// the ends of modules [P].
class Slots {
 public:
  Adapters adapters;

  // Of a product with T rows and F features; false: they do not go together.
  bool read(xla::ffi::RemainingArgs args, int64_t T, int64_t F) {
    namespace ffi = xla::ffi;
    using Integers = ffi::BufferR1<ffi::S32>;
    const auto x = args.get<ffi::AnyBuffer>(0), down = args.get<ffi::AnyBuffer>(1),
               up = args.get<ffi::AnyBuffer>(2);
    const auto ranks = args.get<Integers>(3), slots = args.get<Integers>(4),
               order = args.get<Integers>(5), ends = args.get<Integers>(6);
    if (args.size() != 7 || !x || !down || !up || !ranks || !slots || !order || !ends) return false;
    const auto x_shape = x->dimensions(), up_shape = up->dimensions();
    const bool is_float32 = up->element_type() == ffi::DataType::F32;
    if (x_shape.size() != 2 || up_shape.size() < 3 ||
        (x->element_type() != ffi::DataType::F32 && x->element_type() != ffi::DataType::BF16) ||
        (!is_float32 && up->element_type() != ffi::DataType::U16) ||
        down->element_type() != up->element_type())
      return false;
    const Dense& kernels = *(is_float32 ? chosen().float32 : chosen().bfloat16);
    adapters.down_kernels = &kernels.multiplier;
    adapters.up_kernels = &kernels.shallow();
    adapters.element_bytes = is_float32 ? 4 : 2;
    adapters.depth = padded(x_shape[1], kDepth);
    adapters.strips = padded(F, kStrip) / kStrip;
    adapters.modules = ends->element_count();
    adapters.rank = up_shape[2] * (is_float32 ? 1 : 2);
    adapters.down = (const char*)down->untyped_data();
    adapters.up = (const char*)up->untyped_data();
    adapters.ends = ends->typed_data();
    x_ = *x;
    num_rows_ = T;
    num_slots_ = ranks->element_count();
    ranks_ = ranks->typed_data();
    slots_ = slots->typed_data();
    order_ = order->typed_data();
    const int64_t rank_bytes = num_slots_ * kStrip * adapters.element_bytes;  // of strips
    const int64_t down_ranks = adapters.modules * adapters.rank / kStrip * adapters.depth;
    const auto is_row = [T](int32_t row) { return 0 <= row && row < T; };
    return x_shape[0] == T && adapters.modules && adapters.rank % kStrip == 0 &&
           (int64_t)slots->element_count() == T && (int64_t)order->element_count() == T &&
           std::all_of(order_, order_ + T, is_row) &&
           (int64_t)down->size_bytes() == down_ranks * rank_bytes &&
           (int64_t)up->size_bytes() == adapters.strips * adapters.rank * rank_bytes;
  }

  std::vector<int64_t> order() const { return {order_, order_ + num_rows_}; }

  // Whether any row has an adapter that changes this matrix.
  bool are_used() const {
    for (int64_t row = 0; row < num_rows_; row++)
      if (rank_of(row)) return true;
    return false;
  }

  // The runs of rows of the first `count` of an order.
  void find_runs(const std::vector<int64_t>& order, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
      const int64_t rank = rank_of(order[i]), slot = slots_[order[i]];
      if (!rank) continue;
      std::vector<Run>& runs = adapters.runs;
      if (i && slots_[order[i - 1]] == slot)
        runs.back().num_rows++;
      else
        runs.push_back({slot, i, 1, rank});
      adapters.num_rows = i + 1;
    }
  }

  // Whether A multiplies the same activations as a weight.
  bool can_share(const xla::ffi::AnyBuffer& x, const Multiplier& kernels) const {
    return &kernels == adapters.down_kernels && x_->untyped_data() == x.untyped_data() &&
           x_->element_type() == x.element_type();
  }

  // Bytes of memory that `place` takes.
  int64_t bytes(bool shares) const {
    return (shares ? 0 : copy_bytes()) + adapters.low_bytes();
  }

  // Sets where activations lie: those that a weight shares, so many elements apart, or `put`'s.
  void place(char* memory, const char* shared_rows, int64_t padding) {
    adapters.x = shared_rows ? (char*)shared_rows : memory;
    adapters.x_padding = shared_rows ? padding : copy_padding();
    adapters.low = shared_rows ? memory : memory + copy_bytes();
  }

  // Puts some rows of an order where A multiplies them.
  void put(const std::vector<int64_t>& order, int64_t first, int64_t count) const {
    const int64_t D = x_->dimensions()[1], stop = std::min(first + count, adapters.num_rows);
    const bool is_float32 = x_->element_type() == xla::ffi::DataType::F32;
    const char* const rows = (const char*)x_->untyped_data();
    for (int64_t i = first; i < stop; i++)
      adapters.down_kernels->put(rows + order[i] * D * (is_float32 ? 4 : 2), is_float32, D,
                                 adapters.depth, adapters.x_at(i), 0);
  }

 private:
  int64_t copy_padding() const {
    return row_padding(adapters.down_kernels->activations, adapters.depth);
  }
  int64_t copy_bytes() const {
    const int64_t row = adapters.depth + copy_padding();
    return padded(adapters.num_rows * row * adapters.activation_bytes(), 64);
  }

  // What a row's adapter has here, in whole strips; 0: there is none.
  int64_t rank_of(int64_t row) const {
    const int64_t slot = slots_[row];
    if (slot < 0 || slot >= num_slots_ || ranks_[slot] <= 0) return 0;
    return std::min(padded(ranks_[slot], kStrip), adapters.rank);
  }

  std::optional<xla::ffi::AnyBuffer> x_;
  int64_t num_rows_ = 0, num_slots_ = 0;
  const int32_t *ranks_ = nullptr, *slots_ = nullptr, *order_ = nullptr;
};

}  // namespace ridgeline
