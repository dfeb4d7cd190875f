// Blocks by the matrix unit: sums of int8 of sixteen rows by sixteen features over a group, which
// wait in memory for their scales while the next group is multiplied. A few rows go without it.
#include "amx.h"
#include "block_product.h"
#include "scratch.h"

namespace {

constexpr int kLeastRows = 12;  // fewer are multiplied faster by VNNI

// A strip's integers as the matrix unit takes them: int8, 8 rows of 64 bytes a group.
template <class Format>
void unpack(const BlockStrip<Format>& strip, int64_t depth, int8_t* out) {
  for (int64_t g = 0; g < depth / kDepth; g++) {
    strip.fetch_ahead(g);
    UNROLL for (int quad = 0; quad < 8; quad++) {
      const Bytes bytes = (Bytes)Format::integers(strip.group(g), quad).part[0];
      *(Bytes*)(out + g * kDepth * kStrip + quad * 64) = bytes - (uint8_t)Format::kOffset;
    }
  }
}

// Tiles 0 to 3 hold sums of four groups, or of the halves of two; 4 and 5 are activations, 6 and 7
// weights.
template <class Format>
void configure_blocks(int rows) {
  constexpr int kSteps = Format::kHasHalves ? 2 : 1;
  TileConfig config;
  for (int tile = 0; tile < 8; tile++) {
    config.row_bytes[tile] = tile / 2 == 2 ? kDepth / kSteps : 64;
    config.rows[tile] = (uint8_t)(tile / 2 == 3 ? kDepth / 4 / kSteps : rows);
  }
  config.load();
}

// `Sums` of nothing, known when it is compiled: code that runs as the library is loaded may use no
// instruction that a processor lacks.
#define FOUR kZeroBits, kZeroBits, kZeroBits, kZeroBits
alignas(64) constexpr int32_t kNone[kLanes] = {FOUR, FOUR, FOUR, FOUR};
#undef FOUR

// Begins a group's products with up to sixteen rows.
template <class Format>
void begin(int64_t group, const int8_t* w, const Int8Rows& rows) {
  w += group * kDepth * kStrip;
  const int8_t* x = rows.integers(group);
#define BEGIN(SUMS, X, W, x, w) \
  _tile_loadd(SUMS, kNone, 0);  \
  _tile_loadd(X, x, kDepth);    \
  _tile_loadd(W, w, 64);        \
  _tile_dpbssd(SUMS, X, W);
  if constexpr (Format::kHasHalves) {
    const int8_t *second_w = w + kDepth / 2 * kStrip, *second_x = x + kDepth / 2;
    if (group % 2) {
      BEGIN(2, 4, 6, x, w)
      BEGIN(3, 5, 7, second_x, second_w)
    } else {
      BEGIN(0, 4, 6, x, w)
      BEGIN(1, 5, 7, second_x, second_w)
    }
    return;
  }
  switch (group % 4) {
    case 0:
      BEGIN(0, 4, 6, x, w)
      break;
    case 1:
      BEGIN(1, 5, 7, x, w)
      break;
    case 2:
      BEGIN(2, 4, 6, x, w)
      break;
    default:
      BEGIN(3, 5, 7, x, w)
  }
#undef BEGIN
}

// Stores them: those of the halves after one another.
template <class Format>
void store(int64_t group, int32_t* sums) {
  if constexpr (Format::kHasHalves) {
    int32_t* second = sums + kTile * kLanes;
    if (group % 2) {
      _tile_stored(2, sums, 64);
      _tile_stored(3, second, 64);
    } else {
      _tile_stored(0, sums, 64);
      _tile_stored(1, second, 64);
    }
    return;
  }
  switch (group % 4) {
    case 0:
      _tile_stored(0, sums, 64);
      break;
    case 1:
      _tile_stored(1, sums, 64);
      break;
    case 2:
      _tile_stored(2, sums, 64);
      break;
    default:
      _tile_stored(3, sums, 64);
  }
}

// One strip for up to ROWS rows, of which `rows` count. The matrix unit multiplies a group while
// the one before it is stored and the one before that is scaled.
template <class Format, int ROWS>
void rows_of_strip(const Product& p, int64_t strip, int64_t row, const int8_t* w, int rows) {
  const int64_t groups = p.depth / kDepth;
  const BlockStrip<Format> weights(p, strip);
  const Int8Rows x(p.x, row, p.depth);
  alignas(64) int32_t products[2][2 * kTile * kLanes];
  Vector sums[ROWS][1];
  UNROLL for (auto& of_row : sums) of_row[0] = Vector::splat(0);
  constexpr int kAhead = Format::kHasHalves ? 2 : 4;  // groups that tiles hold
  for (int64_t g = 0; g < kAhead && g < groups; g++) begin<Format>(g, w, x);
  store<Format>(0, products[0]);
  for (int64_t g = 0; g < groups; g++) {
    if (g + 1 < groups) store<Format>(g + 1, products[(g + 1) % 2]);
    if (g + kAhead < groups) begin<Format>(g + kAhead, w, x);
    settle_memory();
    const GroupFactors<Format> factors = weights.factors(g);
    const int32_t* from = products[g % 2];
    UNROLL for (int r = 0; r < ROWS; r++) {
      const Vector d = Vector::splat(x.d(g, r));
      Vector& sum = sums[r][0];
      UNROLL for (int half = 0; half < GroupFactors<Format>::kHalves; half++) {
        Sums of_half;
        of_half.part[0] = *(const Ints*)(from + (half * kTile + r) * kLanes);
        sum = factors.add(sum, of_half, half, d);
      }
    }
    settle_memory();
  }
  store_results<Format>(sums, p, strip, row, rows);
}

template <class Format, auto FEW>
void multiply_in_tiles(const Product& p) {
  if (p.num_rows < kLeastRows) return (ridgeline::kBlocksVnni.*FEW).multiply(p);
  static thread_local Scratch scratch;
  auto* const unpacked = (int8_t*)scratch.reserve(p.num_strips * p.depth * kStrip);
  for (int64_t s = 0; s < p.num_strips; s++)
    unpack(BlockStrip<Format>(p, s), p.depth, unpacked + s * p.depth * kStrip);
  TileSession session;
  int current = 0;
  // Activations of sixteen rows stay in the nearest cache for all strips.
  for (int64_t row = 0; row < p.num_rows; row += kTile) {
    const int rows = (int)(p.num_rows - row < kTile ? p.num_rows - row : kTile);
    if (rows != current) configure_blocks<Format>(rows);
    current = rows;
    for (int64_t s = 0; s < p.num_strips; s++) {
      const int8_t* w = unpacked + s * p.depth * kStrip;
      if (rows > kTile / 2)
        rows_of_strip<Format, kTile>(p, s, row, w, rows);
      else
        rows_of_strip<Format, kTile / 2>(p, s, row, w, rows);
    }
  }
}

template <class Format, auto FEW, bool is_whole = false>
constexpr ridgeline::Multiplier tile_multiplier() {
  return {ridgeline::Activations::kInt8, put_int8<Format, is_whole>,
          multiply_in_tiles<Format, FEW>};
}

}  // namespace

namespace ridgeline {
constexpr Blocks kBlocksAmx = {
    tile_multiplier<Int8, &Blocks::int8>(),
    tile_multiplier<Int8, &Blocks::w8a8, true>(),
    kFp8Multiplier,
    tile_multiplier<Int4, &Blocks::int4>(),
    tile_multiplier<Int4Asym, &Blocks::int4_asym>(),
    tile_multiplier<Int3, &Blocks::int3>(),
    tile_multiplier<Int3Asym, &Blocks::int3_asym>(),
    tile_multiplier<Mxfp4, &Blocks::mxfp4>(),
    tile_multiplier<Q8_0, &Blocks::q8_0>(),
    tile_multiplier<Q5_0, &Blocks::q5_0>(),
    tile_multiplier<Q4_0, &Blocks::q4_0>(),
    tile_multiplier<Q4_1, &Blocks::q4_1>(),
    tile_multiplier<Q4_K, &Blocks::q4_k>(),
    tile_multiplier<Q5_K, &Blocks::q5_k>(),
    tile_multiplier<Q6_K, &Blocks::q6_k>(),
    tile_multiplier<Q3_K, &Blocks::q3_k>(),
    tile_multiplier<Q2_K, &Blocks::q2_k>(),
    tile_multiplier<IQ4_NL, &Blocks::iq4_nl>(),
    tile_multiplier<IQ4_XS, &Blocks::iq4_xs>(),
    scaled_multiplier<Fp8Block>(),
    scaled_multiplier<Mxfp8>(),
    scaled_multiplier<Nvfp4>(),
};
}
