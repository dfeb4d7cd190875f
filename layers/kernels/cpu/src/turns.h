// How threads share processors with other programs.
#pragma once
#include <chrono>
#include <cstdint>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ridgeline {

using Clock = std::chrono::steady_clock;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  asm volatile("yield");
#endif
}

// Waits until is_over() or for so long without giving the processor away; whether it is over.
template <class Condition>
bool spin(Clock::duration limit, const Condition& is_over) {
  constexpr int kBetweenLooks = 16;  // at the clock
  const auto stop = Clock::now() + limit;
  do {
    for (int i = 0; i < kBetweenLooks; i++, relax())
      if (is_over()) return true;
  } while (Clock::now() < stop);
  return false;
}

#if defined(__linux__)

inline int current_cpu() { return sched_getcpu(); }

// Moves this thread to another processor that it may use, whatever runs there. It may use the same
// ones afterwards; where the system forbids the move, it stays.
inline void leave_cpu(int cpu) {
  cpu_set_t allowed, other_cpus;
  if (cpu < 0 || cpu >= CPU_SETSIZE || sched_getaffinity(0, sizeof(allowed), &allowed)) return;
  other_cpus = allowed;
  CPU_CLR(cpu, &other_cpus);
  if (CPU_COUNT(&other_cpus) && !sched_setaffinity(0, sizeof(other_cpus), &other_cpus))
    sched_setaffinity(0, sizeof(allowed), &allowed);
}

// Asks for turns of 0.1 ms (Linux 6.12; older ones ignore that): this thread runs as much as any
// other, but sooner after it wakes, and loses less by a turn that it ends early.
inline void take_short_turns() {
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime_ns, deadline_ns, period_ns;
  } attributes;
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0) ||
      attributes.policy != SCHED_OTHER)
    return;
  attributes.runtime_ns = 100'000;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

#else

inline int current_cpu() { return -1; }
inline void leave_cpu(int) {}
inline void take_short_turns() {}

#endif

// This thread's turn on its processor. It ends its turn between two pieces: the scheduler would end
// it within a piece, for which a whole call waits.
class Turn {
 public:
  static Turn& of_this_thread() {
    static thread_local Turn turn;
    return turn;
  }
  void give_way() {
    const auto now = Clock::now();
    if (now - start_ < kMost) return;
    std::this_thread::yield();
    start_ = Clock::now();
  }

 private:
  Turn() { take_short_turns(); }

  static constexpr auto kMost = std::chrono::microseconds(200);
  Clock::time_point start_ = Clock::now();
};

}  // namespace ridgeline
