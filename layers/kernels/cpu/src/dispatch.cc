// Which instruction sets this processor has, and the one in use. CPUID and XGETBV are read here,
// since not every compiler's `__builtin_cpu_supports` can be trusted; what they claim is tried.
#include "dispatch.h"

#include <setjmp.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <initializer_list>
#include <mutex>
#include <vector>

#include "blocks.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#else
#include <sys/sysctl.h>
#endif

namespace ridgeline {
namespace {

#if defined(__x86_64__)

struct Leaf {
  unsigned a = 0, b = 0, c = 0, d = 0;
  Leaf(unsigned leaf, unsigned part) { __get_cpuid_count(leaf, part, &a, &b, &c, &d); }
};

bool has(unsigned word, std::initializer_list<int> bits) {
  for (int bit : bits)
    if (!(word >> bit & 1)) return false;
  return true;
}

// States that the system saves: 1, 2 SSE and AVX; 5-7 AVX-512; 17, 18 tiles.
unsigned saved_states() {
  if (!has(Leaf(1, 0).c, {27})) return 0;
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

enum Level { kAvx2, kAvx512, kAvx512Vnni, kAvx512Bf16, kAmx };

bool supports(Level level) {
  const Leaf one(1, 0), seven(7, 0), extended(0x80000001, 0);
  const unsigned states = saved_states();
  // x86-64-v3: FMA, MOVBE, AVX, F16C; BMI, AVX2, BMI2; LZCNT.
  const bool avx2 = has(states, {1, 2}) && has(one.c, {12, 22, 28, 29}) &&
                    has(seven.b, {3, 5, 8}) && has(extended.c, {5});
  // x86-64-v4: AVX-512 F, DQ, CD, BW and VL.
  const bool avx512 = avx2 && has(states, {5, 6, 7}) && has(seven.b, {16, 17, 28, 30, 31});
  if (level == kAvx2) return avx2;
  if (level == kAvx512) return avx512;
  const bool vnni = avx512 && has(seven.c, {11});
  if (level == kAvx512Vnni) return vnni;
  const bool bf16 = vnni && has(Leaf(7, 1).a, {5});
  if (level == kAvx512Bf16) return bf16;
  // Tiles, and their products of bfloat16 and of int8; the conversion to bfloat16 is AVX-512's.
  // All such processors permute bytes, too (VBMI).
  if (!bf16 || !has(states, {17, 18}) || !has(seven.d, {22, 24, 25}) || !has(seven.c, {1}))
    return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(2)
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

struct {
  InstructionSet set;
  Level level;
} const kSets[] = {
    {{"amx", &kFloat32Avx512, &kBfloat16Amx, &kRowsAvx512, &kStatesAvx512, &kBoundsAvx512,
      &kBlocksAmx, &kHalfBlocksAmx},
     kAmx},
    {{"avx512bf16", &kFloat32Avx512, &kBfloat16Pairs, &kRowsAvx512, &kStatesAvx512, &kBoundsAvx512,
      &kBlocksVnni},
     kAvx512Bf16},
    {{"avx512vnni", &kFloat32Avx512, &kBfloat16Vnni, &kRowsAvx512, &kStatesAvx512, &kBoundsAvx512,
      &kBlocksVnni},
     kAvx512Vnni},
    {{"avx512", &kFloat32Avx512, &kBfloat16Avx512, &kRowsAvx512, &kStatesAvx512, &kBoundsAvx512,
      &kBlocksAvx2},
     kAvx512},
    {{"avx2", &kFloat32Avx2, &kBfloat16Avx2, &kRowsAvx2, &kStatesAvx2, &kBoundsAvx2, &kBlocksAvx2},
     kAvx2},
};

#else

enum Level { kNeon, kDotprod, kBf16 };

#if defined(__linux__)
// Bits of the system's hwcap.h, which older C libraries lack.
bool has_dotprod() { return getauxval(AT_HWCAP) >> 20 & 1; }
bool has_i8mm_and_bf16() { return (getauxval(AT_HWCAP2) >> 13 & 3) == 3; }
#else
bool has(const char* feature) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value;
}
bool has_dotprod() { return has("hw.optional.arm.FEAT_DotProd"); }
bool has_i8mm_and_bf16() {
  return has("hw.optional.arm.FEAT_I8MM") && has("hw.optional.arm.FEAT_BF16");
}
#endif

bool supports(Level level) {
  return level == kNeon || (has_dotprod() && (level == kDotprod || has_i8mm_and_bf16()));
}

struct {
  InstructionSet set;
  Level level;
} const kSets[] = {
    {{"neonbf16", &kFloat32Neon, &kBfloat16Bfmmla, &kRowsNeon, &kStatesNeon, &kBoundsNeon,
      &kBlocksI8mm},
     kBf16},
    {{"neondotprod", &kFloat32Neon, &kBfloat16Neon, &kRowsNeon, &kStatesNeon, &kBoundsNeon,
      &kBlocksDotprod},
     kDotprod},
    {{"neon", &kFloat32Neon, &kBfloat16Neon, &kRowsNeon, &kStatesNeon, &kBoundsNeon, &kBlocksNeon},
     kNeon},
};

#endif

// The named instruction set, or null where the processor lacks it.
const InstructionSet* find(const char* name) {
  for (const auto& [set, level] : kSets)
    if (!strcmp(name, set.name) && supports(level)) return &set;
  return nullptr;
}

std::atomic<const InstructionSet*> current{nullptr};

std::mutex trial_mutex;                       // one thread at a time replaces the handler
struct sigaction handler_before;              // of illegal instructions
thread_local sigjmp_buf* way_back = nullptr;  // of the thread that tries them

// Whether the processor can do what `work` does; if not, no destructor of what it calls runs.
template <class Work>
bool can_do(const Work& work) {
  const std::lock_guard<std::mutex> lock(trial_mutex);
  struct sigaction action = {};
  action.sa_handler = [](int) {
    if (way_back) siglongjmp(*way_back, 1);
    sigaction(SIGILL, &handler_before, nullptr);  // another thread's, which faults again
  };
  sigaction(SIGILL, &action, &handler_before);
  sigjmp_buf start;
  way_back = &start;
  volatile bool is_done = false;
  if (!sigsetjmp(start, 1)) {
    work();
    is_done = true;
  }
  way_back = nullptr;
  sigaction(SIGILL, &handler_before, nullptr);
  return is_done;
}

// A product with a format's weights: 32 rows, 128 features, which the second cache holds.
class Trial {
 public:
  Trial(const Multiplier& kernels, int64_t strip_bytes, int shift)
      : kernels_(kernels),
        shift_(shift),
        ones_(kSize, 1.f),
        strips_(kStrips * strip_bytes / 2, kOne),
        x_(bytes_of_rows(kernels.activations, kRows, kSize)),
        y_(kRows * kStrips * kStrip) {}

  void put() {
    for (int64_t row = 0; row < kRows; row++)
      kernels_.put(ones_.data(), true, kSize, kSize, x_.data(), row);
  }
  void multiply() {
    kernels_.multiply({strips_.data(), kStrips, kSize, x_.data(), kRows, y_.data(),
                       kStrips * kStrip, false, true, shift_});
  }

  static constexpr int64_t kRows = 32, kStrips = 8, kSize = 1024;

 private:
  static constexpr uint16_t kOne = 0x3f80;  // of bfloat16

  const Multiplier& kernels_;
  const int shift_;
  std::vector<float> ones_;
  std::vector<uint16_t> strips_;
  std::vector<char> x_;
  std::vector<float> y_;
};

}  // namespace

const InstructionSet& chosen() { return *current.load(std::memory_order_relaxed); }

}  // namespace ridgeline

#pragma GCC visibility push(default)

extern "C" {

// Takes an instruction set that the processor has.
void ridgeline_use(const char* name) { ridgeline::current = ridgeline::find(name); }

// Tries an instruction set: the seconds of a product of bfloat16, -1 where the processor lacks it,
// -2 where it claims it, as some hypervisors have it, and does not know an instruction.
double ridgeline_try(const char* name) {
  using namespace ridgeline;
  const auto* set = find(name);
  if (!set) return -1;
  Trial dense(set->bfloat16->multiplier, Trial::kSize * kStrip * 2, 0);
  Trial blocks(set->blocks->int8, kInt8.strip_bytes(Trial::kSize), kInt8.shift);
  const auto once = [&] {
    for (Trial* trial : {&dense, &blocks}) {
      trial->put();
      trial->multiply();
    }
  };
  if (!can_do(once)) return -2;
  const auto start = std::chrono::steady_clock::now();
  dense.multiply();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// From here on a mapped file that is cut short ends the process with a line, not without a word.
// Where there is nothing behind an address, nothing can go on: a read has no way to fail.
void ridgeline_name_bus_errors() {
  struct sigaction action = {};
  action.sa_handler = [](int) {
    static const char line[] =
        "error: a mapped file became shorter, or its disk failed, while it was in use: write "
        "another file and rename it, never in place\n";
    [[maybe_unused]] ssize_t written = write(2, line, sizeof line - 1);
    _exit(1);
  };
  sigaction(SIGBUS, &action, nullptr);
}
}

#pragma GCC visibility pop
