// Which instruction set this processor gets. CPUID and XGETBV are read here, since not every
// compiler's `__builtin_cpu_supports` can be trusted.
#include "dispatch.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
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

enum Level { kAvx2, kAvx512, kAvx512Vnni, kAmx };

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
  // Tiles, and their products of bfloat16 and of int8; the conversion to bfloat16 is AVX-512's.
  const bool amx = vnni && has(states, {17, 18}) && has(seven.d, {22, 24, 25});
  if (!amx || !has(Leaf(7, 1).a, {5})) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(2)
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

struct {
  InstructionSet set;
  Level level;
} const kSets[] = {
    // the fastest first
    {{"amx", &kDenseAmx, &kBlocksAmx}, kAmx},
    {{"avx512vnni", &kDenseAvx512, &kBlocksVnni}, kAvx512Vnni},
    {{"avx512", &kDenseAvx512, &kBlocksAvx2}, kAvx512},
    {{"avx2", &kDenseAvx2, &kBlocksAvx2}, kAvx2},
};

#else

enum Level { kNeon };

bool supports(Level) { return true; }

struct {
  InstructionSet set;
  Level level;
} const kSets[] = {{{"neon", &kDenseNeon, &kBlocksNeon}, kNeon}};

#endif

std::atomic<const InstructionSet*> current{nullptr};

}  // namespace

const InstructionSet& chosen() { return *current.load(std::memory_order_relaxed); }

}  // namespace ridgeline

// Takes the named instruction set, or (null) the best that the processor has; its name, or null
// where the processor lacks it.
extern "C" __attribute__((visibility("default"))) const char* ridgeline_use(const char* name) {
  using namespace ridgeline;
  for (const auto& [set, level] : kSets)
    if ((!name || !strcmp(name, set.name)) && supports(level)) {
      current = &set;
      return set.name;
    }
  return nullptr;
}

// From here on a mapped file that is cut short ends the process with a line, not without a word.
// Where there is nothing behind an address, nothing can go on: a read has no way to fail.
extern "C" __attribute__((visibility("default"))) void ridgeline_name_bus_errors() {
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
