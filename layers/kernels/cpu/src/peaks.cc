// The most that a core's multiply-adds compute: loops on registers alone, to set steps beside.
// Each function has the instructions that it is about, whatever the rest of the library has.
#include <chrono>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define TARGET(features) __attribute__((target(features)))
#if defined(__clang__) && __clang_major__ >= 18 && __clang_major__ <= 21
#define WIDE "avx512f,evex512"  // these versions alone ask for it
#else
#define WIDE "avx512f"
#endif
#else
#include <arm_neon.h>
#define TARGET(features) __attribute__((target("arch=armv8.2-a+" features)))
#endif

namespace {

constexpr int kSums = 12;         // accumulators, which hide an instruction's latency
constexpr int64_t kTrips = 4096;  // of a loop: some microseconds

// What a loop reads and leaves behind: accumulators and two factors, unknown to the compiler.
struct alignas(64) State {
  char sums[kSums][64], factors[2][64];
};

#define EACH(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define LOAD(i) memcpy(&s##i, state.sums[i], sizeof s##i);
#define STORE(i) memcpy(state.sums[i], &s##i, sizeof s##i);

// Between two steps GCC would move accumulators to other registers and back.
#if defined(__clang__)
#define STAY(value)
#elif defined(__x86_64__)
#define STAY(value) __asm__ volatile("" : "+v"(value))
#else
#define STAY(value) __asm__ volatile("" : "+w"(value))
#endif
#define NEXT(sum, STEP)  \
  sum = STEP(sum, x, y); \
  STAY(sum);

// Adds a product to each accumulator, again and again: STEP(sum, x, y). They are variables, since
// an array could lie in memory.
#define LOOP(SUM, FACTOR, STEP)                          \
  SUM s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11;  \
  FACTOR x, y;                                           \
  memcpy(&x, state.factors[0], sizeof x);                \
  memcpy(&y, state.factors[1], sizeof y);                \
  EACH(LOAD)                                             \
  for (int64_t trip = 0; trip < kTrips; trip++) {        \
    NEXT(s0, STEP) NEXT(s1, STEP) NEXT(s2, STEP)         \
    NEXT(s3, STEP) NEXT(s4, STEP) NEXT(s5, STEP)         \
    NEXT(s6, STEP) NEXT(s7, STEP) NEXT(s8, STEP)         \
    NEXT(s9, STEP) NEXT(s10, STEP) NEXT(s11, STEP)       \
  }                                                      \
  EACH(STORE)

#if defined(__x86_64__)

#define FMA256(sum, x, y) _mm256_fmadd_ps(x, y, sum)
#define FMA512(sum, x, y) _mm512_fmadd_ps(x, y, sum)
#define BF16(sum, x, y) _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y)

TARGET("avx2,fma") void avx2_float32(State& state) { LOOP(__m256, __m256, FMA256) }
TARGET(WIDE) void avx512_float32(State& state) { LOOP(__m512, __m512, FMA512) }
TARGET(WIDE ",avx512vnni") void avx512vnni_int8(State& state) {
  LOOP(__m512i, __m512i, _mm512_dpbusd_epi32)
}
TARGET(WIDE ",avx512bf16") void avx512bf16_bfloat16(State& state) {
  LOOP(__m512, __m512i, BF16)
}

struct alignas(64) Tiles {
  uint8_t palette = 1, reserved[15] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Four accumulators, of two tiles of rows and two of features. Whoever used the matrix unit on this
// thread finds its configuration, not its tiles.
#define TILE_LOOP(STEP)                           \
  Tiles before, tiles;                            \
  _tile_storeconfig(&before);                     \
  __asm__ volatile("" ::: "memory");              \
  _tile_loadconfig(&tiles);                       \
  for (int64_t trip = 0; trip < kTrips; trip++) { \
    STEP(0, 4, 6);                                \
    STEP(1, 4, 7);                                \
    STEP(2, 5, 6);                                \
    STEP(3, 5, 7);                                \
  }                                               \
  if (before.palette)                             \
    _tile_loadconfig(&before);                    \
  else                                            \
    _tile_release();

TARGET("amx-tile,amx-bf16") void amx_bfloat16(State&) { TILE_LOOP(_tile_dpbf16ps) }
TARGET("amx-tile,amx-int8") void amx_int8(State&) { TILE_LOOP(_tile_dpbssd) }

#else

void neon_float32(State& state) { LOOP(float32x4_t, float32x4_t, vfmaq_f32) }
TARGET("dotprod") void neondotprod_int8(State& state) { LOOP(int32x4_t, int8x16_t, vdotq_s32) }
TARGET("bf16") void neonbf16_bfloat16(State& state) {
  LOOP(float32x4_t, bfloat16x8_t, vbfmmlaq_f32)
}
TARGET("i8mm") void neonbf16_int8(State& state) { LOOP(int32x4_t, int8x16_t, vmmlaq_s32) }

#endif

// Operations of a trip: a multiply-add is two.
const struct {
  const char *instruction_set, *type;
  void (*run)(State&);
  double operations;
} kLoops[] = {
#if defined(__x86_64__)
    {"avx2", "float32", avx2_float32, 2 * 8 * kSums},
    {"avx512", "float32", avx512_float32, 2 * 16 * kSums},
    {"avx512vnni", "int8", avx512vnni_int8, 2 * 64 * kSums},
    {"avx512bf16", "bfloat16", avx512bf16_bfloat16, 2 * 32 * kSums},
    {"amx", "bfloat16", amx_bfloat16, 2 * 16 * 16 * 32 * 4},
    {"amx", "int8", amx_int8, 2 * 16 * 16 * 64 * 4},
#else
    {"neon", "float32", neon_float32, 2 * 4 * kSums},
    {"neondotprod", "int8", neondotprod_int8, 2 * 16 * kSums},
    {"neonbf16", "bfloat16", neonbf16_bfloat16, 2 * 16 * kSums},
    {"neonbf16", "int8", neonbf16_int8, 2 * 32 * kSums},
#endif
};

}  // namespace

#pragma GCC visibility push(default)

// Operations a second of this core with numbers of a type, by instructions that an instruction set
// of this processor brings, over so many seconds; 0 where it brings none.
extern "C" double ridgeline_peak(const char* instruction_set, const char* type, double seconds) {
  for (const auto& loop : kLoops) {
    if (strcmp(instruction_set, loop.instruction_set) || strcmp(type, loop.type)) continue;
    const auto start = std::chrono::steady_clock::now();
    State state;
    double elapsed = 0;
    int64_t runs = 0;
    for (; elapsed < seconds; runs++) {
      memset(&state, 0x3f, sizeof state);  // numbers near 1, and sums that stay finite
      loop.run(state);
      elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    return runs * kTrips * loop.operations / elapsed;
  }
  return 0;
}

#pragma GCC visibility pop
