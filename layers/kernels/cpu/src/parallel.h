// Work in numbered pieces, phase after phase, on XLA's threads: whoever is free takes the next
// piece, and the caller does what nobody else does, so a busy machine never waits for a sleeper.
#pragma once
#include <atomic>
#include <cassert>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ridgeline {

// Calls work(phase, piece) for every piece, those of a phase before any of the next.
template <class Work>
void parallel(xla::ffi::ThreadPool& pool, std::initializer_list<int64_t> pieces, const Work& work) {
  constexpr size_t kMostPhases = 4;
  struct Job {
    const Work* work;
    int phases = 0;
    int64_t pieces[kMostPhases];
    std::atomic<int64_t> taken[kMostPhases] = {}, done[kMostPhases] = {};
    void run(bool waits) {
      for (int phase = 0; phase < phases; phase++) {
        for (int64_t i;
             (i = taken[phase].fetch_add(1, std::memory_order_relaxed)) < pieces[phase];) {
          (*work)(phase, i);
          done[phase].fetch_add(1, std::memory_order_release);
        }
        if (phase + 1 == phases && !waits) return;
        for (int spins = 0; done[phase].load(std::memory_order_acquire) < pieces[phase]; spins++)
          if (spins > 300) std::this_thread::yield();
      }
    }
  };
  // A thread that comes late finds nothing to take, and `work` is not there any more; the job is.
  auto job = std::make_shared<Job>();
  job->work = &work;
  assert(pieces.size() <= kMostPhases);
  int64_t most = 0;
  for (int64_t count : pieces) {
    job->pieces[job->phases++] = count;
    most = count > most ? count : most;
  }
  const int64_t threads = pool.num_threads() < most ? pool.num_threads() : most;
  for (int64_t i = 1; i < threads; i++) pool.Schedule([job] { job->run(false); });
  job->run(true);
}

}  // namespace ridgeline
