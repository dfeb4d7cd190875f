// AMX: products of bfloat16 by the matrix unit, sixteen rows by sixteen features by 32 of depth at
// a time, summed in float32. A strip of pairs is what its second operand must look like.
#include "amx.h"

#include "attention.h"
#include "product.h"
#include "scores.h"

namespace {

constexpr int kTileDepth = 32;

// Rows of the first and of the second group of rows that this thread's tiles are set to; 0: none.
// Set to digits of integers, rows of one group and minus the depth of a step.
thread_local int current_first = 0, current_second = 0;

// Tiles are set to nothing yet.
class ProductSession : public TileSession {
 public:
  ProductSession() { current_first = 0; }
};

// Tiles 0 to 3 are sums, of the first and (2, 3) of the second group; 4 and 5 their activations. A
// single group has all of them.
void configure(int first, int second) {
  if (first == current_first && second == current_second) return;
  TileConfig config;
  for (int tile = 0; tile < 8; tile++) {
    config.row_bytes[tile] = 64;
    config.rows[tile] = kTile;
  }
  config.rows[0] = config.rows[1] = config.rows[4] = (uint8_t)first;
  config.rows[2] = config.rows[3] = config.rows[5] = (uint8_t)(second ? second : first);
  config.load();
  current_first = first;
  current_second = second;
}

// Weights come from memory, and tile loads do not look ahead far enough on their own: the tile that
// is due in a while, which after a strip's end is one of the next `strips`.
inline void prefetch(const char* w, int64_t left, int strips, int64_t strip_bytes) {
  constexpr int64_t kAhead = 2 << 10;
  const char* from = w + kAhead + (left <= kAhead ? (strips - 1) * strip_bytes : 0);
  UNROLL for (int line = 0; line < 16; line++)
    _mm_prefetch(from + 64 * line, _MM_HINT_T0);
}

// Some strips of a product, and a part of their depth: the sums of those before it lie in y.
struct DepthPart {
  Product p;
  int64_t start, size;

  bool continues() const { return p.accumulates || start; }
  int64_t strip_bytes() const { return p.depth * kStrip * 2; }
  int64_t x_bytes() const { return p.x_stride() * 2; }
  int64_t y_bytes() const { return p.y_stride * 4; }
  const char* weights(int64_t strip) const {
    return (const char*)p.strips + strip * strip_bytes() + start * kStrip * 2;
  }
  const char* x(int64_t row) const { return (const char*)p.x + row * x_bytes() + start * 2; }
  float* y(int64_t row, int64_t strip) const { return p.y + row * p.y_stride + strip * kStrip; }
};

// Up to four strips for up to 16 rows: the weights are read once, and nothing else is.
template <int STRIPS, bool IS_FAR>
void few_rows(const DepthPart& part, int64_t strip, int64_t row) {
  const int64_t strip_bytes = part.strip_bytes(), y_bytes = part.y_bytes();
  const int64_t x_bytes = part.x_bytes();
  const char *w = part.weights(strip), *x = part.x(row);
  float* y = part.y(row, strip);
#define EACH_STRIP(DO)                      \
  DO(0) if constexpr (STRIPS > 1) { DO(1) } \
  if constexpr (STRIPS > 2) {               \
    DO(2)                                   \
  }                                         \
  if constexpr (STRIPS > 3) {               \
    DO(3)                                   \
  }
#define START(S)                             \
  if (part.continues())                      \
    _tile_loadd(S, y + S * kStrip, y_bytes); \
  else                                       \
    _tile_zero(S);
#define STEP(S)                                                                      \
  if constexpr (IS_FAR) prefetch(w + S * strip_bytes, end - w, STRIPS, strip_bytes); \
  _tile_loadd(6, w + S * strip_bytes, 64);                                           \
  _tile_dpbf16ps(S, 4, 6);
#define STORE(S) _tile_stored(S, y + S * kStrip, y_bytes);
  const char* const end = w + (part.p.depth - part.start) * kStrip * 2;
  EACH_STRIP(START)
  for (int64_t k = 0; k < part.size;
       k += kTileDepth, w += kTileDepth * kStrip * 2, x += kTileDepth * 2) {
    _tile_loadd(4, x, x_bytes);
    EACH_STRIP(STEP)
  }
  EACH_STRIP(STORE)
#undef EACH_STRIP
#undef START
#undef STEP
#undef STORE
}

// Weights that are due after those at hand: a few lines of each strip of them in each step, so that
// memory never rests while tiles are multiplied.
struct Ahead {
  const char *next = nullptr, *stop = nullptr;
  int64_t strip_bytes = 0;  // to the second strip; 0: there is none
  int lines = 0;            // of a strip in a step

  void fetch() {
    for (int line = 0; line < lines && next < stop; line++, next += 64) {
      _mm_prefetch(next, _MM_HINT_T1);
      if (strip_bytes) _mm_prefetch(next + strip_bytes, _MM_HINT_T1);
    }
  }
};

// Two strips (or one) for two groups of rows. Where they pass by, the weights are what stays in the
// nearest cache.
template <bool TWO, bool IS_FAR, bool PASSES_BY>
void many_rows(const DepthPart& part, int64_t strip, int64_t row, int64_t second, Ahead& ahead) {
  const int64_t strip_bytes = part.strip_bytes(), y_bytes = part.y_bytes();
  const int64_t x_bytes = part.x_bytes();
  const char *w = part.weights(strip), *x = part.x(row), *x2 = part.x(second);
  float *y = part.y(row, strip), *y2 = part.y(second, strip);
  if (part.continues()) {
    _tile_loadd(0, y, y_bytes);
    _tile_loadd(2, y2, y_bytes);
    if constexpr (TWO) {
      _tile_loadd(1, y + kStrip, y_bytes);
      _tile_loadd(3, y2 + kStrip, y_bytes);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
#define LOAD_ROWS(TILE, FROM)                \
  if constexpr (PASSES_BY)                   \
    _tile_stream_loadd(TILE, FROM, x_bytes); \
  else                                       \
    _tile_loadd(TILE, FROM, x_bytes);
  for (int64_t k = 0; k < part.size; k += kTileDepth) {
    ahead.fetch();
    if constexpr (IS_FAR) {
      const int64_t left = strip_bytes - (part.start + k) * kStrip * 2;
      prefetch(w + k * kStrip * 2, left, 2, strip_bytes);
      if constexpr (TWO) prefetch(w + strip_bytes + k * kStrip * 2, left, 2, strip_bytes);
    }
    LOAD_ROWS(4, x + k * 2)
    _tile_loadd(6, w + k * kStrip * 2, 64);
    _tile_dpbf16ps(0, 4, 6);
    LOAD_ROWS(5, x2 + k * 2)
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (TWO) {
      _tile_loadd(7, w + strip_bytes + k * kStrip * 2, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
#undef LOAD_ROWS
  _tile_stored(0, y, y_bytes);
  _tile_stored(2, y2, y_bytes);
  if constexpr (TWO) {
    _tile_stored(1, y + kStrip, y_bytes);
    _tile_stored(3, y2 + kStrip, y_bytes);
  }
}

// All strips for up to 16 rows.
template <bool IS_FAR>
void one_group(const DepthPart& part, int64_t row, int rows) {
  configure(rows, 0);
  int64_t strip = 0;
  for (; strip + 4 <= part.p.num_strips; strip += 4) few_rows<4, IS_FAR>(part, strip, row);
  for (; strip + 2 <= part.p.num_strips; strip += 2) few_rows<2, IS_FAR>(part, strip, row);
  if (strip < part.p.num_strips) few_rows<1, IS_FAR>(part, strip, row);
}

// All strips for two groups of rows.
template <bool IS_FAR, bool PASSES_BY>
void two_groups(const DepthPart& part, int64_t row, int rows, Ahead& ahead) {
  configure(kTile, rows - kTile);
  const int64_t second = row + kTile;
  int64_t strip = 0;
  for (; strip + 2 <= part.p.num_strips; strip += 2)
    many_rows<true, IS_FAR, PASSES_BY>(part, strip, row, second, ahead);
  if (strip < part.p.num_strips)
    many_rows<false, IS_FAR, PASSES_BY>(part, strip, row, second, ahead);
}

// All strips for all rows, if these are at most two groups.
void few_groups(const Product& p) {
  const DepthPart whole{p, 0, p.depth};
  const int rows = (int)p.num_rows;
  Ahead nothing;
  if (rows > kTile)
    p.is_far ? two_groups<true, false>(whole, 0, rows, nothing)
             : two_groups<false, false>(whole, 0, rows, nothing);
  else
    p.is_far ? one_group<true>(whole, 0, rows) : one_group<false>(whole, 0, rows);
}

// All strips for many rows: two at a time go through all rows, as much of their depth as stays in
// the nearest cache meanwhile, and the next come.
void many_groups(const Product& p) {
  constexpr int64_t kTogether = 2, kNearDepth = 576;  // 36 of 48 KB
  const int64_t parts = (p.depth + kNearDepth - 1) / kNearDepth, steps = p.depth / kTileDepth;
  const int64_t passes = (p.num_rows + 2 * kTile - 1) / (2 * kTile);
  auto start_of = [&](int64_t nth) { return steps * nth / parts * kTileDepth; };
  for (int64_t strip = 0; strip < p.num_strips; strip += kTogether)
    for (int64_t nth = 0; nth < parts; nth++) {
      DepthPart part{p, start_of(nth), start_of(nth + 1) - start_of(nth)};
      part.p.strips = (const char*)p.strips + strip * part.strip_bytes();
      part.p.num_strips = least(kTogether, p.num_strips - strip);
      part.p.y += strip * kStrip;
      Ahead ahead;
      if (p.is_far) {
        const bool is_deepest = nth + 1 == parts;
        const int64_t next_strips =
            is_deepest ? p.num_strips - strip - kTogether : part.p.num_strips;
        DepthPart next = part;
        next.start = is_deepest ? 0 : part.start + part.size;
        next.size = next_strips > 0 ? start_of(is_deepest ? 1 : nth + 2) - next.start : 0;
        ahead.next = next.weights(is_deepest ? kTogether : 0);
        ahead.stop = ahead.next + next.size * kStrip * 2;
        ahead.strip_bytes = next_strips > 1 ? part.strip_bytes() : 0;
        ahead.lines = (int)((kTile + passes - 1) / passes);
      }
      for (int64_t row = 0; row < p.num_rows; row += 2 * kTile) {
        const int rows = (int)least(2 * kTile, p.num_rows - row);
        const bool is_far = p.is_far && strip == 0 && row == 0;
        if (rows > kTile)
          is_far ? two_groups<true, true>(part, row, rows, ahead)
                 : two_groups<false, true>(part, row, rows, ahead);
        else
          one_group<false>(part, row, rows);
      }
    }
}

// Arithmetic by the matrix unit, on a thread that holds a session.
struct InTiles {
  using Element = uint16_t;
  using Activation = uint16_t;
  using Session = ProductSession;
  static void put(const Vector& v, uint16_t* x) { narrow(v, x); }
  static void multiply(const Product& p) {
    settle_memory();
    p.num_rows > 2 * kTile ? many_groups(p) : few_groups(p);
    settle_memory();
  }
};

// Sums of integers, of both digits of sixteen rows by two strips: exact, like those of VNNI, which
// few rows take.
struct IntegersInTiles {
  static void multiply(const IntegerProduct& p) {
    constexpr int64_t kLeastRows = 12;
    if (p.num_rows < kLeastRows) return IntegersByVnni::multiply(p);
    settle_memory();
    for (int64_t row = 0; row < p.num_rows; row += kTile) {
      const int rows = (int)(p.num_rows - row < kTile ? p.num_rows - row : kTile);
      configure_digits(rows, p.depth % 64 ? 32 : 64);
      int64_t strip = 0;
      for (; strip + 2 <= p.num_strips; strip += 2) strips<true>(p, row, rows, strip);
      if (strip < p.num_strips) strips<false>(p, row, rows, strip);
    }
  }

 private:
  // Tiles 0 and 1 are sums of upper and of lower digits of a strip, 2 and 3 of another; 4 and 5 are
  // the digits, 6 and 7 the strips, `step` of their depth.
  static void configure_digits(int rows, int step) {
    if (current_first == rows && current_second == -step) return;
    TileConfig config;
    for (int tile = 0; tile < 8; tile++) {
      config.row_bytes[tile] = tile / 2 == 2 ? (uint16_t)step : 64;
      config.rows[tile] = (uint8_t)(tile / 2 == 3 ? step / 4 : rows);
    }
    config.load();
    current_first = rows;
    current_second = -step;
  }

  template <bool TWO>
  static void strips(const IntegerProduct& p, int64_t row, int rows, int64_t strip) {
    const int64_t step = p.depth % 64 ? 32 : 64;
    const int8_t* x = p.digits + row * 2 * p.depth;
    const uint8_t* w = p.strips + strip * p.depth * kStrip;
    const uint8_t* const next = w + p.depth * kStrip;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < p.depth; k += step) {
      _tile_loadd(4, x + k, 2 * p.depth);
      _tile_loadd(5, x + p.depth + k, 2 * p.depth);
      _tile_loadd(6, w + k * kStrip, 64);
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 5, 6);
      if constexpr (TWO) {
        _tile_loadd(7, next + k * kStrip, 64);
        _tile_dpbsud(2, 4, 7);
        _tile_dpbsud(3, 5, 7);
      }
    }
    alignas(64) int32_t sums[4][kTile][kLanes];
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    if constexpr (TWO) {
      _tile_stored(2, sums[2], 64);
      _tile_stored(3, sums[3], 64);
    }
    settle_memory();
    for (int s = 0; s < (TWO ? 2 : 1); s++)
      for (int r = 0; r < rows; r++)
        p.put(*(const Ints*)sums[2 * s][r], *(const Ints*)sums[2 * s + 1][r], row + r, strip + s);
  }
};

void multiply_in_session(const Product& p) {
  ProductSession session;
  InTiles::multiply(p);
}

}  // namespace

namespace ridgeline {
constexpr Dense kBfloat16Amx = {{Activations::kBfloat16, put<InTiles>, multiply_in_session},
                                attend<InTiles, IntegersInTiles>, score<InTiles>};
}
