// The library's functions as XLA calls them, and the packing of weights as Python does.
#include "xla/ffi/api/ffi.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <vector>

#include "blocks.h"
#include "dispatch.h"
#include "parallel.h"
#include "scratch.h"

namespace ffi = xla::ffi;

namespace ridgeline {

using Integers = ffi::Buffer<ffi::S32>;

namespace {

// Some rows of a matrix in strips of blocks: float32 [T, D].
ffi::Error lookup(std::string_view format, ffi::BufferR1<ffi::S32> ids, ffi::AnyBuffer w,
                  ffi::Result<ffi::BufferR2<ffi::F32>> out) {
  const int64_t T = out->dimensions()[0], D = out->dimensions()[1];
  const BlockFormat* block_format = find_block_format(format);
  if (!block_format) return ffi::Error::InvalidArgument("ridgeline_lookup: w is not in blocks");
  if (T * D == 0) return ffi::Error::Success();
  const int64_t strip_bytes = block_format->layout.strip_bytes(padded(D, kDepth));
  const int64_t bytes = w.size_bytes();
  if ((int64_t)ids.element_count() != T || !bytes || bytes % strip_bytes)
    return ffi::Error::InvalidArgument("ridgeline_lookup: shapes do not go together");
  const int64_t count = bytes / strip_bytes * kStrip;
  for (int64_t t = 0; t < T; t++) {
    const int64_t id = ids.typed_data()[t], row = id < 0 ? 0 : id < count ? id : count - 1;
    read_row(*block_format, (const uint8_t*)w.untyped_data(), D, row, out->typed_data() + t * D);
  }
  return ffi::Error::Success();
}

const int32_t* unless_empty(const Integers& x) {
  return x.element_count() ? x.typed_data() : nullptr;
}

// What queries [Y, W, N, key width] meet in pages; false: these have another type or rank.
bool find_paged(std::string_view format, const ffi::AnyBuffer& q, const ffi::AnyBuffer& pages,
                const ffi::BufferR2<ffi::S32>& table, Paged& p) {
  const auto shape = q.dimensions(), page_shape = pages.dimensions();
  const bool is_float = q.element_type() == ffi::DataType::F32;
  p.stored = format == "int8"   ? Stored::kInt8
             : format == "fp8"  ? Stored::kFp8
             : format == "int4" ? Stored::kInt4
                                : Stored::kPlain;
  const auto type = p.stored != Stored::kPlain ? ffi::DataType::U8
                    : is_float                 ? ffi::DataType::F32
                                               : ffi::DataType::U16;
  if (pages.element_type() != type || (!is_float && q.element_type() != ffi::DataType::BF16) ||
      shape.size() != 4 || page_shape.size() != 3)
    return false;
  p.num_tokens = shape[1];
  p.num_heads = shape[2];
  p.key_width = shape[3];
  p.bits = p.stored == Stored::kInt4 ? 4 : p.stored != Stored::kPlain ? 8 : is_float ? 32 : 16;
  p.num_pages = page_shape[0];
  p.page_tokens = page_shape[1];
  p.table_columns = table.dimensions()[1];
  p.q = q.untyped_data();
  p.pages = pages.untyped_data();
  p.table = table.typed_data();
  return true;
}

// Whether pages have the rows, and the table the columns, of what queries meet.
bool goes_together(const Paged& p, const ffi::AnyBuffer& pages,
                   const ffi::BufferR2<ffi::S32>& table, int64_t Y) {
  const int64_t element_bytes = p.stored == Stored::kPlain ? p.bits / 8 : 1;
  return p.num_pages && p.page_tokens && p.kv_heads > 0 && p.num_heads % p.kv_heads == 0 &&
         pages.dimensions()[2] * element_bytes == p.row_bytes() &&
         (p.stored != Stored::kInt4 || (p.key_width % 32 == 0 && p.value_width % 32 == 0)) &&
         table.dimensions()[0] == Y * p.tables && (p.tables == 1 || p.tables == p.kv_heads);
}

constexpr int64_t kTileRows = 128;

// Tokens of a tile of about `rows` rows of `group` query heads, if a token has not more. Where
// whole sixteens of rows are, attention.h fills them; the last tile may be a small one.
int64_t tile_tokens(int64_t tokens, int64_t group, int64_t rows = kTileRows) {
  constexpr int64_t kTogether = 16;
  const int64_t tiles = (tokens * group + rows - 1) / rows, tile = (tokens + tiles - 1) / tiles;
  const int64_t multiple = kTogether / std::gcd(kTogether, group);
  return multiple * group <= rows ? padded(tile, multiple) : tile;
}

// Tiles of rows' tokens, those first whose last key is the newest, so that threads end together.
std::vector<int64_t> by_newest_key(const Attention& a, int64_t rows, int64_t tile) {
  std::vector<std::pair<int64_t, int64_t>> tiles;  // minus the last key that is seen, which tile
  for (int64_t y = 0; y < rows; y++)
    for (int64_t first = 0; first < a.num_tokens; first += tile) {
      int64_t token = std::min(first + tile, a.num_tokens) - 1;
      while (token > first && !a.valid[y * a.num_tokens + token]) token--;
      token += y * a.num_tokens;
      tiles.push_back({a.valid[token] ? -(int64_t)a.last[token] : 1, (int64_t)tiles.size()});
    }
  std::sort(tiles.begin(), tiles.end());
  std::vector<int64_t> order;
  for (const auto& tile : tiles) order.push_back(tile.second);
  return order;
}

// Attention of a rectangle over pages, as kernels.h has it. An array that is not there is empty.
ffi::Error attend(ffi::ThreadPool pool, std::string_view format, float score_cap, int64_t kv_heads,
                  bool values_in_keys, ffi::AnyBuffer q, ffi::AnyBuffer pages,
                  ffi::BufferR2<ffi::S32> table, ffi::BufferR2<ffi::PRED> valid,
                  ffi::BufferR2<ffi::S32> last, Integers first, Integers head,
                  Integers tree_start, Integers tree_bits, ffi::BufferR1<ffi::F32> sinks,
                  ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> totals) {
  Attention a;
  a.is_float32_out = out->element_type() == ffi::DataType::F32;
  if (!find_paged(format, q, pages, table, a) || out->dimensions().size() != 4 ||
      (!a.is_float32_out && out->element_type() != ffi::DataType::BF16))
    return ffi::Error::InvalidArgument(
        "ridgeline_attend: q, pages or the result of another type or rank");
  if (q.element_count() == 0 || out->element_count() == 0) return ffi::Error::Success();
  const int64_t Y = q.dimensions()[0];
  a.kv_heads = kv_heads;
  a.value_width = out->dimensions()[3];
  a.values_in_keys = values_in_keys;
  a.tables = table.dimensions()[0] / Y;
  a.score_cap = score_cap;
  a.valid = (const uint8_t*)valid.untyped_data();
  a.last = last.typed_data();
  a.first = unless_empty(first);
  a.first_tokens = head.element_count() ? head.typed_data()[0] : 0;  // of every token alike
  a.tree_start = unless_empty(tree_start);
  a.tree_bits = unless_empty(tree_bits);
  a.sinks = sinks.element_count() ? sinks.typed_data() : nullptr;
  a.out = out->untyped_data();
  a.totals = totals->element_count() ? totals->typed_data<float>() : nullptr;
  const int64_t tokens = Y * a.num_tokens;
  auto fits = [&](const auto& x) {
    return !x.element_count() || (int64_t)x.element_count() == tokens;
  };
  if (!goes_together(a, pages, table, Y) ||
      (int64_t)out->element_count() != tokens * a.num_heads * a.value_width ||
      (values_in_keys && a.value_width > a.key_width) ||
      (int64_t)valid.element_count() != tokens || (int64_t)last.element_count() != tokens ||
      !fits(first) || !fits(head) || !fits(tree_start) || !fits(tree_bits) ||
      (a.sinks && (int64_t)sinks.element_count() != a.num_heads) ||
      (a.totals && (int64_t)totals->element_count() != tokens * a.num_heads))
    return ffi::Error::InvalidArgument("ridgeline_attend: shapes do not go together");
  constexpr int64_t kLeastQueries = 32, kMostSums = 128 << 10;  // floats, 512 KB
  const int64_t group = a.num_heads / a.kv_heads, enough_pieces = 4 * pool.num_threads();
  auto tiles_of = [&](int64_t size) { return (a.num_tokens + size - 1) / size; };
  int64_t tile = tile_tokens(a.num_tokens, group), tiles = tiles_of(tile);
  // All heads of a row together, since they lie together, unless that leaves a thread without work.
  const bool is_whole = a.tables == 1 && Y * tiles >= enough_pieces;
  const int64_t heads = is_whole ? a.kv_heads : 1;
  const int64_t parts = (a.kv_heads + heads - 1) / heads;
  // Twice the rows pack keys and values half as often, where threads still have work and the second
  // cache has room for the sums.
  const int64_t larger = tile_tokens(a.num_tokens, group, 2 * kTileRows);
  if (Y * tiles_of(larger) * parts >= enough_pieces &&
      larger * group * heads * a.value_width <= kMostSums) {
    tile = larger;
    tiles = tiles_of(larger);
  }
  // Query heads of one KV head, as latents have it, are divided where threads would have no work at
  // all: each of them packs the same keys.
  const int64_t idle = pool.num_threads() / (Y * tiles * parts), enough = group / kLeastQueries;
  const int64_t splits = std::max<int64_t>(1, std::min(idle, enough));
  const bool is_float = q.element_type() == ffi::DataType::F32;
  const Attend attend = (is_float ? chosen().float32 : chosen().bfloat16)->attend;
  const std::vector<int64_t> order = by_newest_key(a, Y, tile);
  auto work = [&](int, int64_t piece) {
    const int64_t split = piece % splits;
    piece /= splits;
    const int64_t nth = order[piece / parts];
    AttentionItem item;
    item.first_query = group * split / splits;
    item.stop_query = group * (split + 1) / splits;
    item.y = nth / tiles;
    item.first_head = piece % parts * heads;
    item.stop_head = item.first_head + heads;
    item.first_token = nth % tiles * tile;
    item.stop_token = std::min(item.first_token + tile, a.num_tokens);
    attend(a, item);
  };
  parallel(pool, {Y * tiles * parts * splits}, work);
  return ffi::Error::Success();
}

// Scores of each row's first keys, as many as `counts` says, as kernels.h has them.
ffi::Error scores(ffi::ThreadPool pool, std::string_view format, ffi::AnyBuffer q,
                  ffi::BufferR3<ffi::F32> weights, ffi::AnyBuffer pages,
                  ffi::BufferR2<ffi::S32> table, ffi::BufferR1<ffi::S32> counts,
                  ffi::Result<ffi::BufferR3<ffi::F32>> out) {
  Scores s;
  if (!find_paged(format, q, pages, table, s))
    return ffi::Error::InvalidArgument("ridgeline_scores: q or pages of another type or rank");
  if (q.element_count() == 0 || out->element_count() == 0) return ffi::Error::Success();
  const int64_t Y = q.dimensions()[0], tokens = Y * s.num_tokens;
  s.kv_heads = s.tables = 1;
  s.value_width = 0;
  s.values_in_keys = false;
  s.out = out->typed_data();
  s.weights = weights.typed_data();
  if (!goes_together(s, pages, table, Y) || (int64_t)counts.element_count() != Y ||
      (int64_t)weights.element_count() != tokens * s.num_heads ||
      (int64_t)out->element_count() != tokens * s.capacity())
    return ffi::Error::InvalidArgument("ridgeline_scores: shapes do not go together");
  constexpr int64_t kPieceKeys = 1024;
  const int64_t tile = tile_tokens(s.num_tokens, s.num_heads);
  const int64_t tiles = (s.num_tokens + tile - 1) / tile;
  const int64_t pieces = (s.capacity() + kPieceKeys - 1) / kPieceKeys;
  const bool is_float = q.element_type() == ffi::DataType::F32;
  const Score score = (is_float ? chosen().float32 : chosen().bfloat16)->score;
  auto work = [&](int, int64_t piece) {
    const int64_t start = piece % pieces * kPieceKeys, y = piece / pieces / tiles;
    const int64_t count = std::min<int64_t>(counts.typed_data()[y], s.capacity());
    if (start >= count) return;
    const int64_t first = piece / pieces % tiles * tile;
    const AttentionItem item = {y, first, std::min(first + tile, s.num_tokens), 0, 1, 0,
                                s.num_heads};
    score(s, item, start, std::min(start + kPieceKeys, count));
  };
  parallel(pool, {Y * tiles * pieces}, work);
  return ffi::Error::Success();
}

// Bounds of the scores of each row's first pages, as many as `counts` says, as kernels.h has them.
ffi::Error bounds(ffi::ThreadPool pool, int64_t kv_heads, ffi::AnyBuffer q, ffi::AnyBuffer extremes,
                  ffi::BufferR2<ffi::S32> table, ffi::BufferR1<ffi::S32> counts,
                  ffi::Result<ffi::BufferR4<ffi::F32>> out) {
  const auto shape = q.dimensions(), extremes_shape = extremes.dimensions();
  Bounds b;
  b.is_float32 = q.element_type() == ffi::DataType::F32;
  if ((!b.is_float32 && q.element_type() != ffi::DataType::BF16) ||
      extremes.element_type() != (b.is_float32 ? ffi::DataType::F32 : ffi::DataType::U16))
    return ffi::Error::InvalidArgument("ridgeline_bounds: q or extremes of another type");
  if (shape.size() != 4 || extremes_shape.size() != 3)
    return ffi::Error::InvalidArgument("ridgeline_bounds: q or extremes of another rank");
  if (q.element_count() == 0 || out->element_count() == 0) return ffi::Error::Success();
  const int64_t Y = shape[0];
  b.num_tokens = shape[1];
  b.num_heads = shape[2];
  b.kv_heads = kv_heads;
  b.width = shape[3];
  b.num_pages = extremes_shape[0];
  b.columns = table.dimensions()[1];
  const int64_t tokens = Y * b.num_tokens;
  if (kv_heads <= 0 || b.num_heads % kv_heads || !b.num_pages || extremes_shape[1] != 2 ||
      extremes_shape[2] != kv_heads * b.width || table.dimensions()[0] != Y ||
      (int64_t)counts.element_count() != Y ||
      (int64_t)out->element_count() != tokens * kv_heads * b.columns)
    return ffi::Error::InvalidArgument("ridgeline_bounds: shapes do not go together");
  b.q = q.untyped_data();
  b.extremes = extremes.untyped_data();
  b.table = table.typed_data();
  b.out = out->typed_data();
  static thread_local Scratch scratch;
  b.sums = (float*)scratch.reserve(tokens * kv_heads * 2 * b.padded_width() * sizeof(float));
  constexpr int64_t kPiecePages = 64;
  const int64_t pieces = (b.columns + kPiecePages - 1) / kPiecePages;
  const BoundKernels& kernels = *chosen().bounds;
  const auto bound = b.is_float32 ? kernels.of_float32 : kernels.of_bfloat16;
  auto work = [&](int phase, int64_t piece) {
    if (phase == 0) return kernels.sum_signs(b, piece);
    const int64_t y = piece / pieces, first = piece % pieces * kPiecePages;
    const int64_t count = std::min<int64_t>(counts.typed_data()[y], b.columns);
    bound(b, y, first, std::min(first + kPiecePages, count));
  };
  parallel(pool, {tokens, Y * pieces}, work);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace ridgeline

#pragma GCC visibility push(default)

extern "C" {

XLA_FFI_DEFINE_HANDLER_SYMBOL(ridgeline_lookup, ridgeline::lookup,
                              ffi::Ffi::Bind()
                                  .Attr<std::string_view>("format")
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::BufferR2<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ridgeline_attend, ridgeline::attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<std::string_view>("format")
                                  .Attr<float>("score_cap")
                                  .Attr<int64_t>("kv_heads")
                                  .Attr<bool>("values_in_keys")
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR2<ffi::S32>>()
                                  .Arg<ffi::BufferR2<ffi::PRED>>()
                                  .Arg<ffi::BufferR2<ffi::S32>>()
                                  .Arg<ridgeline::Integers>()
                                  .Arg<ridgeline::Integers>()
                                  .Arg<ridgeline::Integers>()
                                  .Arg<ridgeline::Integers>()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ridgeline_scores, ridgeline::scores,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<std::string_view>("format")
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR3<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR2<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Ret<ffi::BufferR3<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ridgeline_bounds, ridgeline::bounds,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int64_t>("kv_heads")
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR2<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Ret<ffi::BufferR4<ffi::F32>>());

// Rows [F, D] of elements of 2 or 4 bytes as strips (kernels.h) of a depth; `out` has room for them.
void ridgeline_pack(const void* rows, int64_t F, int64_t D, int64_t depth, int64_t bytes,
                    void* out) {
  using namespace ridgeline;
  memset(out, 0, padded(F, kStrip) * depth * bytes);
  const int64_t pair = 4 / bytes;  // elements of a word
  for (int64_t f = 0; f < F; f++) {
    char* strip = (char*)out + f / kStrip * depth * kStrip * bytes + f % kStrip * 4;
    const char* row = (const char*)rows + f * D * bytes;
    int64_t k = 0;
    for (; k + pair <= D; k += pair) memcpy(strip + k / pair * kStrip * 4, row + k * bytes, 4);
    if (k < D) memcpy(strip + k / pair * kStrip * 4, row + k * bytes, (D - k) * bytes);
  }
}
}

#pragma GCC visibility pop
