// AMX: products of bfloat16 by the matrix unit, sixteen rows by sixteen features by 32 of depth at
// a time, summed in float32. A strip of pairs is what its second operand must look like.
#include "amx.h"

#include "attention.h"
#include "dpbf16.h"
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
inline void prefetch(const char* w, int64_t remaining, int strips, int64_t strip_bytes) {
  constexpr int64_t kAhead = 2 << 10;
  const char* from = w + kAhead + (remaining <= kAhead ? (strips - 1) * strip_bytes : 0);
  UNROLL for (int line = 0; line < 16; line++)
    _mm_prefetch(from + 64 * line, _MM_HINT_T0);
}

// Where a strip of a product meets a row, and how far the next ones are.
struct Corner {
  const int64_t strip_bytes, x_bytes, y_bytes;
  const char *w, *x;
  float* y;

  Corner(const Product& p, int64_t strip, int64_t row)
      : strip_bytes(p.depth * kStrip * 2),
        x_bytes(p.x_stride() * 2),
        y_bytes(p.y_stride * 4),
        w((const char*)p.strips + strip * strip_bytes),
        x((const char*)p.x + row * x_bytes),
        y(p.y + row * p.y_stride + strip * kStrip) {}
};

// Up to four strips for up to 16 rows: the weights are read once, and nothing else is.
template <int STRIPS, bool IS_FAR>
void few_rows(const Product& p, int64_t strip, int64_t row) {
  Corner at(p, strip, row);
#define EACH_STRIP(DO)                      \
  DO(0) if constexpr (STRIPS > 1) { DO(1) } \
  if constexpr (STRIPS > 2) {               \
    DO(2)                                   \
  }                                         \
  if constexpr (STRIPS > 3) {               \
    DO(3)                                   \
  }
#define START(S)                                   \
  if (p.accumulates)                               \
    _tile_loadd(S, at.y + S * kStrip, at.y_bytes); \
  else                                             \
    _tile_zero(S);
#define STEP(S)                                                              \
  if constexpr (IS_FAR)                                                      \
    prefetch(at.w + S * at.strip_bytes, end - at.w, STRIPS, at.strip_bytes); \
  _tile_loadd(6, at.w + S * at.strip_bytes, 64);                             \
  _tile_dpbf16ps(S, 4, 6);
#define STORE(S) _tile_stored(S, at.y + S * kStrip, at.y_bytes);
  const char* const end = at.w + at.strip_bytes;
  EACH_STRIP(START)
  for (; at.w < end; at.w += kTileDepth * kStrip * 2, at.x += kTileDepth * 2) {
    _tile_loadd(4, at.x, at.x_bytes);
    EACH_STRIP(STEP)
  }
  EACH_STRIP(STORE)
#undef EACH_STRIP
#undef START
#undef STEP
#undef STORE
}

// What is due after the tiles at hand, a few lines in each step, so that memory never rests while
// they are multiplied: weights that are read, and rows of y that are written.
struct Ahead {
  const char *next = nullptr, *stop = nullptr;  // weights
  int lines = 0;                                // of them in a step
  char *y = nullptr, *y_stop = nullptr;         // rows that two strips leave
  int64_t y_bytes = 0;                          // from one to the next
  int rows = 0;                                 // of them in a step

  void fetch() {
    for (int line = 0; line < lines && next < stop; line++, next += 64)
      _mm_prefetch(next, _MM_HINT_T1);
    for (int row = 0; row < rows && y < y_stop; row++, y += y_bytes) {
      __builtin_prefetch(y, 1);
      __builtin_prefetch(y + 64, 1);
    }
  }
};

// Two strips (or one) for two groups of rows. Rows pass by the nearest cache where weights stay
// there.
template <bool TWO, bool IS_FAR, bool PASSES_BY>
void many_rows(const Product& p, int64_t strip, int64_t row, Ahead& ahead) {
  const Corner at(p, strip, row), below(p, strip, row + kTile);
  const int64_t strip_bytes = at.strip_bytes, y_bytes = at.y_bytes, x_bytes = at.x_bytes;
  if (p.accumulates) {
    _tile_loadd(0, at.y, y_bytes);
    _tile_loadd(2, below.y, y_bytes);
    if constexpr (TWO) {
      _tile_loadd(1, at.y + kStrip, y_bytes);
      _tile_loadd(3, below.y + kStrip, y_bytes);
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
  for (int64_t k = 0; k < p.depth; k += kTileDepth) {
    const char* const w = at.w + k * kStrip * 2;
    ahead.fetch();
    if constexpr (IS_FAR) {
      const int64_t bytes_to_end = strip_bytes - k * kStrip * 2;
      prefetch(w, bytes_to_end, 2, strip_bytes);
      if constexpr (TWO) prefetch(w + strip_bytes, bytes_to_end, 2, strip_bytes);
    }
    LOAD_ROWS(4, at.x + k * 2)
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    LOAD_ROWS(5, below.x + k * 2)
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (TWO) {
      _tile_loadd(7, w + strip_bytes, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
#undef LOAD_ROWS
  _tile_stored(0, at.y, y_bytes);
  _tile_stored(2, below.y, y_bytes);
  if constexpr (TWO) {
    _tile_stored(1, at.y + kStrip, y_bytes);
    _tile_stored(3, below.y + kStrip, y_bytes);
  }
}

// All strips for up to 16 rows.
template <bool IS_FAR>
void one_group(const Product& p, int64_t row, int rows) {
  configure(rows, 0);
  int64_t strip = 0;
  for (; strip + 4 <= p.num_strips; strip += 4) few_rows<4, IS_FAR>(p, strip, row);
  for (; strip + 2 <= p.num_strips; strip += 2) few_rows<2, IS_FAR>(p, strip, row);
  if (strip < p.num_strips) few_rows<1, IS_FAR>(p, strip, row);
}

// All strips for two groups of rows.
template <bool IS_FAR, bool PASSES_BY>
void two_groups(const Product& p, int64_t row, int rows, Ahead& ahead) {
  configure(kTile, rows - kTile);
  int64_t strip = 0;
  for (; strip + 2 <= p.num_strips; strip += 2)
    many_rows<true, IS_FAR, PASSES_BY>(p, strip, row, ahead);
  if (strip < p.num_strips) many_rows<false, IS_FAR, PASSES_BY>(p, strip, row, ahead);
}

// All strips, two tiles deep and in the cache, for up to 16 rows. These are loaded once, and the
// sums of one strip are stored while the next is multiplied.
void near_strips(const Product& p) {
  constexpr int64_t kTileBytes = kTileDepth * kStrip * 2, kStripBytes = 2 * kTileBytes;
  configure((int)p.num_rows, 0);
  const int64_t x_bytes = p.x_stride() * 2, y_bytes = p.y_stride * 4;
  const char* w = (const char*)p.strips;
  float* y = p.y;
  _tile_loadd(4, p.x, x_bytes);
  _tile_loadd(5, (const char*)p.x + kTileDepth * 2, x_bytes);
#define MULTIPLY(S)                                     \
  if (p.accumulates)                                    \
    _tile_loadd(S, y + S * kStrip, y_bytes);            \
  else                                                  \
    _tile_zero(S);                                      \
  _tile_loadd(6, w + S * kStripBytes, 64);              \
  _tile_loadd(7, w + S * kStripBytes + kTileBytes, 64); \
  _tile_dpbf16ps(S, 4, 6);                              \
  _tile_dpbf16ps(S, 5, 7);
#define STORE(S) _tile_stored(S, y + S * kStrip, y_bytes);
  int64_t strip = 0;
  for (; strip + 4 <= p.num_strips; strip += 4, w += 4 * kStripBytes, y += 4 * kStrip) {
    MULTIPLY(0)
    MULTIPLY(1)
    STORE(0)
    MULTIPLY(2)
    STORE(1)
    MULTIPLY(3)
    STORE(2)
    STORE(3)
  }
  for (; strip < p.num_strips; strip++, w += kStripBytes, y += kStrip) {
    MULTIPLY(0)
    STORE(0)
  }
#undef MULTIPLY
#undef STORE
}

// All strips for all rows, if these are at most two groups.
void few_groups(const Product& p) {
  const int rows = (int)p.num_rows;
  Ahead nothing;
  if (rows > kTile)
    two_groups<true, false>(p, 0, rows, nothing);
  else
    p.is_far ? one_group<true>(p, 0, rows) : one_group<false>(p, 0, rows);
}

// All strips for many rows: two at a time go through all rows, and the next two are fetched.
void many_groups(const Product& p) {
  constexpr int64_t kTogether = 2, kRows = 2 * kTile;
  const int64_t passes = (p.num_rows + kRows - 1) / kRows, steps = p.depth / kTileDepth;
  for (int64_t strip = 0; strip < p.num_strips; strip += kTogether) {
    const Corner start(p, strip, 0);
    Product part = p;
    part.strips = start.w;
    part.num_strips = least(kTogether, p.num_strips - strip);
    part.y = start.y;
    Ahead ahead;
    const int64_t next_strips = least(kTogether, p.num_strips - strip - part.num_strips);
    ahead.next = start.w + part.num_strips * start.strip_bytes;
    ahead.stop = ahead.next + next_strips * start.strip_bytes;
    ahead.lines = (int)((kRows + passes - 1) / passes);
    for (int64_t row = 0; row < p.num_rows; row += kRows) {
      const int rows = (int)least(kRows, p.num_rows - row);
      const bool is_far = strip == 0 && row == 0;
      if (p.y_is_far && part.num_strips == kTogether) {
        const int64_t next = row + kRows;
        ahead.y = (char*)Corner(part, 0, next).y;
        ahead.y_bytes = start.y_bytes;
        ahead.y_stop = ahead.y + least(kRows, p.num_rows - next) * start.y_bytes;
        ahead.rows = (int)((kRows + steps - 1) / steps);
      }
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
  static constexpr int64_t kNearRows = kTile;
  static void put(const Vector& v, uint16_t* x) { narrow(v, x); }
  static void put(const Vector& a, const Vector& b, uint16_t* x) { narrow(a, b, x); }
  static void multiply(const Product& p) {
    settle_memory();
    if (!p.is_far && p.num_rows <= kTile && p.depth == 2 * kTileDepth)
      near_strips(p);
    else
      p.num_rows > 2 * kTile ? many_groups(p) : few_groups(p);
    settle_memory();
  }
};

// Sums of integers, of both digits of sixteen rows by two strips: exact, like those of VNNI, which
// few rows take.
struct IntegersInTiles {
  static constexpr int64_t kNearRows = 2 * kTile;

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
constexpr Multiplier kShallow = {Activations::kBfloat16, put<InTiles>, InPairs<Dpbf16>::multiply};
constexpr Dense kBfloat16Amx = {{Activations::kBfloat16, put<InTiles>, multiply_in_session},
                                attend<InTiles, IntegersInTiles>, score<InTiles>, &kShallow};
}
