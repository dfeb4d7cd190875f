// Products of activations with weights as XLA calls them.
#include "xla/ffi/api/ffi.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>
#include <string_view>
#include <vector>

#include "blocks.h"
#include "dispatch.h"
#include "memory.h"
#include "parallel.h"
#include "scratch.h"
#include "slots.h"

namespace ffi = xla::ffi;

namespace ridgeline {
namespace {

// The product with no matrix.
constexpr Multiplier kZeros = {
    Activations::kFloat32, nullptr, [](const Product& p) {
      for (int64_t row = 0; row < p.num_rows; row++)
        memset(p.y + row * p.y_stride, 0, p.num_strips * kStrip * sizeof(float));
    }};

// A format of weights: what multiplies it with activations, or null, and the bytes of a strip.
struct Format {
  const Multiplier* multiplier;
  int64_t strip_bytes;
  int shift = 0;
};

Format find_format(std::string_view name, int64_t depth, bool is_float32) {
  const int64_t elements = depth * kStrip;
  if (name == "float32") return {&chosen().float32->multiplier, elements * 4};
  if (name == "bfloat16") return {&chosen().bfloat16->multiplier, elements * 2};
  if (name.empty()) return {&kZeros, 0};
  const BlockFormat* blocks = find_block_format(name);
  if (!blocks) return {nullptr, 0};
  const BlockLayout& layout = blocks->layout;
  if (!is_float32 && chosen().half_blocks && blocks->half)
    return {&(chosen().half_blocks->*blocks->half), layout.strip_bytes(depth), layout.shift};
  return {&(chosen().blocks->*blocks->multiplier), layout.strip_bytes(depth), layout.shift};
}

// Rows of x, one after another, and the matrix that multiplies them; pieces count on over groups.
struct Group {
  int64_t matrix;  // -1: none, their results are 0
  int64_t row, num_rows;
  int64_t place, first_put;                      // of their activations: the first, its piece
  int64_t together, shares, block, first_piece;  // strips of a piece, pieces and rows of a block
};

// The group of a piece, of those that `first` counts.
const Group& group_of(const std::vector<Group>& groups, int64_t Group::* first, int64_t piece) {
  const auto is_before = [first](int64_t p, const Group& g) { return p < g.*first; };
  return *std::prev(std::upper_bound(groups.begin(), groups.end(), piece, is_before));
}

// Moves the rows of zeros of a matrix of float32 or bfloat16 behind the others of an order; how many
// the others are.
int64_t move_zeros(const ffi::AnyBuffer& x, std::vector<int64_t>& order) {
  const int64_t T = order.size(), D = x.dimensions()[1];
  const bool is_float32 = x.element_type() == ffi::DataType::F32;
  const auto is_zero = chosen().rows->is_zero;
  const char* const rows = (const char*)x.untyped_data();
  const int64_t row_bytes = D * (is_float32 ? 4 : 2);
  constexpr int64_t kAhead = 16;  // rows whose beginnings come from where other threads left them
  std::vector<int64_t> zeros;
  int64_t num_used = 0;
  for (int64_t t = 0; t < T; t++) {
    __builtin_prefetch(rows + order[t + kAhead < T ? t + kAhead : t] * row_bytes);
    if (is_zero(rows + order[t] * row_bytes, is_float32, D))
      zeros.push_back(order[t]);
    else
      order[num_used++] = order[t];
  }
  std::copy(zeros.begin(), zeros.end(), order.begin() + num_used);
  return num_used;
}

// Whether so many rows of an order follow each other.
bool are_adjacent(const int64_t* order, int64_t count) {
  for (int64_t i = 1; i < count; i++)
    if (order[i] != order[0] + i) return false;
  return true;
}

// What a product leaves: [T, F], of float32, or of either type where its features are gates and,
// behind them, as many that they multiply.
struct Result {
  ffi::AnyBuffer& y;
  const Gate* gate = nullptr;

  bool is_float32() const { return y.element_type() == ffi::DataType::F32; }
  int64_t row_bytes() const { return y.dimensions()[1] * element_bytes(); }
  int64_t element_bytes() const { return is_float32() ? 4 : 2; }
  char* at(int64_t row, int64_t feature) const {
    return (char*)y.untyped_data() + row * row_bytes() + feature * element_bytes();
  }
};

constexpr int64_t kLeastBlock = 64;  // rows, of which a block has a multiple
constexpr int64_t kMostTogether = 8;  // strips of a piece of more than two rows

// How a product is divided: into `shares` of `together` strips, and blocks of rows.
struct Cut {
  int64_t together, shares, block;
};

// Of so many rows with one of `matrices`, each of so many parts and strips. A piece has enough
// strips to be worth a claim, and is small enough for threads to end together. Many rows are worth
// it in fewer strips, down to those that go through together, and in blocks of fewer rows.
Cut cut(int64_t rows, int64_t strips, int64_t parts, int64_t matrices, int64_t tile_strips,
        int64_t num_threads, int64_t block_rows) {
  constexpr int64_t kManyRows = 32;
  const int64_t threads = std::max<int64_t>(1, num_threads);
  const bool is_many = rows >= kManyRows;
  const int64_t least = is_many ? tile_strips * parts : 4, enough = is_many ? 12 * threads : 8;
  int64_t together = rows <= 2 ? 2 * kMostTogether : kMostTogether;
  while (together > least && parts * strips * matrices < enough * together) together /= 2;
  together /= parts;
  const int64_t shares = (strips + together - 1) / together;
  if (!is_many) return {together, shares, block_rows};
  const int64_t blocks = (8 * threads + shares * matrices - 1) / (shares * matrices);
  return {together, shares,
          std::min(block_rows, padded((rows + blocks - 1) / blocks, kLeastBlock))};
}

// y = x w^T: x [T, D] of float32 or bfloat16, w matrices in strips of a format, one behind the
// other. Matrix e multiplies the next sizes[e] rows; those behind them all are 0.
// Without sizes there is one matrix for all rows, of which those of zeros, as padding has them,
// cost nothing: their results are 0, whatever is in the matrix.
ffi::Error multiply(ffi::ThreadPool& pool, std::string_view format, const ffi::AnyBuffer& x,
                    const ffi::AnyBuffer& w, const std::vector<int64_t>* given_sizes,
                    const Result& result, Slots* slots = nullptr) {
  const ffi::AnyBuffer& y = result.y;
  if (x.dimensions().size() != 2 || y.dimensions().size() != 2)
    return ffi::Error::InvalidArgument("a product of Ridgeline: x or y is not a matrix");
  const int64_t T = x.dimensions()[0], D = x.dimensions()[1], F = y.dimensions()[1];
  const int64_t parts = result.gate ? 2 : 1;  // of a matrix, F features each
  const bool is_float = x.element_type() == ffi::DataType::F32;
  const int64_t depth = padded(D, kDepth), strips = padded(F, kStrip) / kStrip;
  const Format weight_format = find_format(format, depth, is_float);
  if (!weight_format.multiplier || (!is_float && x.element_type() != ffi::DataType::BF16) ||
      (!result.is_float32() && (!result.gate || y.element_type() != ffi::DataType::BF16)))
    return ffi::Error::InvalidArgument("a product of Ridgeline: x, w or y of another type");
  const Multiplier& kernels = *weight_format.multiplier;
  Adapters* const adapters = slots ? &slots->adapters : nullptr;
  const RowKernels& row_kernels = *chosen().rows;
  const Activations type = kernels.activations;
  const int64_t strip_bytes = weight_format.strip_bytes;
  const int64_t matrices = given_sizes ? given_sizes->size() : 1;
  if ((int64_t)w.size_bytes() != matrices * parts * strips * strip_bytes ||
      y.dimensions()[0] != T || (result.gate && F % kStrip))
    return ffi::Error::InvalidArgument("a product of Ridgeline: shapes do not go together");
  if (T * F == 0) return ffi::Error::Success();
  prefer_large_pages(y.untyped_data(), y.size_bytes());
  if (D == 0) {
    memset(y.untyped_data(), 0, T * result.row_bytes());
    return ffi::Error::Success();
  }
  std::vector<int64_t> order(T), sizes;  // of rows as they are taken
  std::iota(order.begin(), order.end(), 0);
  int64_t num_used = T;
  if (given_sizes) {
    sizes = *given_sizes;
  } else {
    if (slots) order = slots->order();
    num_used = move_zeros(x, order);
    if (slots) slots->find_runs(order, num_used);
    sizes.push_back(num_used);
  }
  constexpr int64_t kPutRows = 8, kFewRows = 4;
  // Of rows, with gates and what they multiply, that stay in the second cache beside weights.
  const int64_t block_bytes = type == Activations::kFloat32 ? 1 << 19 : 1 << 20;
  const int64_t padding = T > kFewRows ? row_padding(type, depth) : 0;
  const int64_t gated_bytes = result.gate ? kLeastBlock * (kMostTogether + 1) * kStrip * 4 : 0;
  const int64_t fitting =
      block_bytes / (bytes_of_rows(type, kLeastBlock, depth + padding) + gated_bytes);
  const int64_t block_rows = kLeastBlock * (fitting < 1 ? 1 : fitting);
  constexpr int64_t kZeroBytes = 1 << 18;  // that a thread writes at a time
  const int64_t zero_rows = std::max<int64_t>(1, kZeroBytes / (F * 4));
  const int64_t apart = type == Activations::kInt8 ? kRowsTogether : 1;
  const int64_t unused = std::count(sizes.begin(), sizes.end(), 0);
  std::vector<Group> groups;
  int64_t row = 0, place = 0, puts = 0, pieces = 0;
  auto add = [&](int64_t matrix, int64_t size) {
    if (!size) return;
    const Cut c = matrix < 0 ? Cut{strips, 1, zero_rows}
                             : cut(size, strips, parts, matrices - unused, kernels.strips,
                                   pool.num_threads(), block_rows);
    groups.push_back({matrix, row, size, place, puts, c.together, c.shares, c.block, pieces});
    row += size;
    place += padded(size, apart);
    if (matrix >= 0) puts += (size + kPutRows - 1) / kPutRows;
    pieces += c.shares * ((size + c.block - 1) / c.block);
  };
  for (size_t e = 0; e < sizes.size(); e++) add((int64_t)e, sizes[e]);
  const int64_t places = place;
  add(-1, T - row);

  const char* rows = (const char*)x.untyped_data() + order[0] * D * (is_float ? 4 : 2);
  const auto input_type = is_float ? Activations::kFloat32 : Activations::kBfloat16;
  const bool is_ready = !strip_bytes || (type == input_type && depth == D && !padding && num_used &&
                                         are_adjacent(order.data(), num_used));
  const int64_t copy_bytes = is_ready ? 0 : padded(bytes_of_rows(type, places, depth + padding), 64);
  const bool shares = slots && slots->can_share(x, kernels);
  const int64_t adapter_bytes = slots ? slots->bytes(shares) : 0;
  static thread_local Scratch scratch;
  char* const memory = (char*)scratch.reserve(copy_bytes + adapter_bytes);
  char* const copies = is_ready ? nullptr : memory;
  if (copies) rows = copies;
  if (adapters) {
    slots->place(memory + copy_bytes, shares ? rows : nullptr, padding);
    adapters->cut(pool.num_threads());
  }
  const int64_t adapter_puts = slots && !shares ? (adapters->num_rows + kPutRows - 1) / kPutRows : 0;
  if (!copies) puts = 0;
  auto work = [&](int phase, int64_t piece) {
    if (phase == 1) return adapters->compute(adapters->pieces[piece]);
    if (phase == 0) {
      if (piece >= puts) return slots->put(order, (piece - puts) * kPutRows, kPutRows);
      const Group& g = group_of(groups, &Group::first_put, piece);
      const int64_t start = (piece - g.first_put) * kPutRows;
      for (int64_t t = start; t < g.num_rows && t < start + kPutRows; t++)
        kernels.put((const char*)x.untyped_data() + order[g.row + t] * D * (is_float ? 4 : 2),
                    is_float, D, depth, copies + bytes_of_rows(type, g.place + t, padding),
                    g.place + t);
      return;
    }
    const Group& g = group_of(groups, &Group::first_piece, piece);
    const int64_t block = (piece - g.first_piece) / g.shares * g.block;
    const int64_t first = (piece - g.first_piece) % g.shares * g.together;
    Product p;
    p.depth = depth;
    p.x = rows + bytes_of_rows(type, g.place + block, depth + padding);
    p.x_padding = padding;
    p.num_rows = g.num_rows - block < g.block ? g.num_rows - block : g.block;
    p.accumulates = false;
    p.shift = weight_format.shift;
    p.num_strips = std::min(strips - first, g.together);
    auto strips_of = [&](int64_t part) {
      const int64_t strip = (g.matrix * parts + part) * strips + first;
      return (const char*)w.untyped_data() + strip * strip_bytes;
    };
    const int64_t width = std::min(F - first * kStrip, p.num_strips * kStrip);
    const int64_t bytes = width * result.element_bytes();
    const int64_t* const block_order = order.data() + g.row + block;
    auto out = [&](int64_t t) { return result.at(block_order[t], first * kStrip); };
    if (g.matrix < 0) {
      for (int64_t t = 0; t < p.num_rows; t++) memset(out(t), 0, bytes);
      return;
    }
    p.strips = strips_of(0);
    for (int64_t part = 0; adapters && part < parts; part++)
      adapters->fetch(p, g.row + block, part * strips + first);
    const bool is_whole = are_adjacent(block_order, p.num_rows);
    if (!result.gate && is_whole && width == p.num_strips * kStrip) {
      p.y = (float*)out(0);
      p.y_stride = F;
      p.y_is_far = true;
      kernels.multiply(p);
      if (adapters) adapters->add(p, g.row + block, first);
      return;
    }
    // Rows of y lie apart, the last strip is wider than y, or gates and what they multiply meet.
    static thread_local Scratch wide;
    p.y_stride = (parts * p.num_strips + 1) * kStrip;  // or rows would share few sets of the cache
    float* const wide_rows = p.y = (float*)wide.reserve(p.num_rows * p.y_stride * sizeof(float));
    kernels.multiply(p);
    if (adapters) adapters->add(p, g.row + block, first);
    if (!result.gate) {
      for (int64_t t = 0; t < p.num_rows; t++) memcpy(out(t), wide_rows + t * p.y_stride, bytes);
      return;
    }
    p.strips = strips_of(1);
    p.y += width;
    kernels.multiply(p);
    if (adapters) adapters->add(p, g.row + block, strips + first);
    for (int64_t t = 0; t < p.num_rows; t++) {
      const float* const gates = wide_rows + t * p.y_stride;
      row_kernels.gate({gates, width, *result.gate, result.is_float32(), out(t)}, 0);
    }
  };
  const int64_t low_pieces = adapters ? (int64_t)adapters->pieces.size() : 0;
  parallel(pool, {puts + adapter_puts, low_pieces, pieces}, work);
  scratch.trim();
  return ffi::Error::Success();
}

// All rows with one matrix, and with their adapters, if there are any.
ffi::Error adapt(ffi::ThreadPool& pool, std::string_view format, const ffi::AnyBuffer& x,
                 const ffi::AnyBuffer& w, ffi::RemainingArgs args, const Result& result) {
  const auto shape = result.y.dimensions();
  if (args.size() == 0 || shape.size() != 2) return multiply(pool, format, x, w, nullptr, result);
  Slots slots;
  if (!slots.read(args, shape[0], shape[1] * (result.gate ? 2 : 1)))
    return ffi::Error::InvalidArgument("adapters of Ridgeline: they do not go with a product");
  return multiply(pool, format, x, w, nullptr, result, slots.are_used() ? &slots : nullptr);
}

// y = x w^T.
ffi::Error linear(ffi::ThreadPool pool, std::string_view format, ffi::AnyBuffer x, ffi::AnyBuffer w,
                  ffi::RemainingArgs adapters, ffi::Result<ffi::AnyBuffer> y) {
  return adapt(pool, format, x, w, adapters, {*y});
}

// act(gate) up of a product with a matrix whose first half are gates.
ffi::Error gated(ffi::ThreadPool pool, std::string_view format, int32_t activation,
                 ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::RemainingArgs adapters,
                 ffi::Result<ffi::AnyBuffer> y) {
  const auto gate = (Gate)activation;
  return adapt(pool, format, x, w, adapters, {*y, &gate});
}

// Rows that are sorted by their matrix, `sizes` of each; sizes that x does not have are cut.
ffi::Error grouped(ffi::ThreadPool pool, std::string_view format, ffi::AnyBuffer x,
                   ffi::AnyBuffer w, ffi::BufferR1<ffi::S32> sizes,
                   ffi::Result<ffi::AnyBuffer> y) {
  std::vector<int64_t> clipped_sizes(sizes.typed_data(),
                                     sizes.typed_data() + sizes.element_count());
  int64_t remaining = y->dimensions().size() == 2 ? y->dimensions()[0] : 0;
  for (int64_t& size : clipped_sizes) {
    size = size < 0 ? 0 : size < remaining ? size : remaining;
    remaining -= size;
  }
  return multiply(pool, format, x, w, &clipped_sizes, {*y});
}

}  // namespace
}  // namespace ridgeline

#pragma GCC visibility push(default)

extern "C" {

XLA_FFI_DEFINE_HANDLER_SYMBOL(ridgeline_linear, ridgeline::linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<std::string_view>("format")
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ridgeline_gated, ridgeline::gated,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<std::string_view>("format")
                                  .Attr<int32_t>("activation")
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ridgeline_grouped, ridgeline::grouped,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<std::string_view>("format")
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());
}

#pragma GCC visibility pop
