// Work in numbered pieces, phase after phase, on XLA's threads: whoever is free takes the next
// piece, and the caller does what nobody else does, so a busy machine never waits for a sleeper.
#pragma once
#include <atomic>
#include <cassert>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <thread>

#include "turns.h"

namespace ridgeline {

// Calls work(phase, piece) for every piece, those of a phase before any of the next, on at most as
// many threads as a pool (XLA's) has.
template <class Pool, class Work>
void parallel(Pool& pool, std::initializer_list<int64_t> pieces, const Work& work) {
  constexpr size_t kMostPhases = 4;
  struct Job {
    const Work* work;
    const int caller_cpu = current_cpu();
    int phases = 0;
    int64_t pieces[kMostPhases];
    std::atomic<int64_t> taken[kMostPhases] = {}, done[kMostPhases] = {};

    void call() {
      for (int phase = 0; phase < phases; phase++) {
        while (run_piece(phase)) continue;
        wait(phase);
      }
    }
    void help() {
      if (current_cpu() == caller_cpu) leave_cpu(caller_cpu);  // where it would only take turns
      Turn& turn = Turn::of_this_thread();
      for (int phase = 0; phase < phases; phase++) {
        if (phase) wait(phase - 1);
        do turn.give_way();
        while (run_piece(phase));
      }
    }
    bool run_piece(int phase) {
      const int64_t piece = taken[phase].fetch_add(1, std::memory_order_relaxed);
      if (piece >= pieces[phase]) return false;
      (*work)(phase, piece);
      done[phase].fetch_add(1, std::memory_order_release);
      return true;
    }
    void wait(int phase) const {
      constexpr auto kSpin = std::chrono::microseconds(50);
      const auto is_done = [this, phase] {
        return done[phase].load(std::memory_order_acquire) >= pieces[phase];
      };
      if (spin(kSpin, is_done)) return;
      while (!is_done()) std::this_thread::yield();
    }
  };
  // A thread that comes late finds nothing to take, and `work` is not there any more; the job is.
  auto job = std::make_shared<Job>();
  job->work = &work;
  assert(pieces.size() <= kMostPhases);
  int64_t most_pieces = 0;
  for (int64_t count : pieces) {
    job->pieces[job->phases++] = count;
    most_pieces = count > most_pieces ? count : most_pieces;
  }
  const int64_t threads = pool.num_threads() < most_pieces ? pool.num_threads() : most_pieces;
  for (int64_t i = 1; i < threads; i++) pool.Schedule([job] { job->help(); });
  job->call();
}

}  // namespace ridgeline
