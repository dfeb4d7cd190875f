// Random calls of `parallel` whose helpers come late or after it and whose pieces take long: every
// piece runs once, behind those of the phase before it, and none after the call.
#include "parallel.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <utility>
#include <vector>

namespace {

using Random = std::minstd_rand;

void check(bool holds, const char* rule) {
  if (holds) return;
  fprintf(stderr, "%s\n", rule);
  _Exit(1);
}

void linger(int yields) {
  while (yields-- > 0) std::this_thread::yield();
}

// As XLA's, but each of its threads starts when it likes.
struct LatePool {
  const int64_t threads;
  Random random;
  std::atomic<bool> is_over = false;
  std::vector<std::thread> helpers = {};

  int64_t num_threads() const { return threads; }
  template <class Task>
  void Schedule(Task task) {
    const bool is_too_late = random() % 4 == 0;
    const int yields = random() % 20;
    helpers.emplace_back([this, is_too_late, yields, task = std::move(task)] {
      while (is_too_late && !is_over) std::this_thread::yield();
      linger(yields);
      task();
    });
  }
};

void call(int seed) {
  Random random(seed);
  LatePool pool{1 + (int64_t)(random() % 4), random};
  struct Piece {
    int yields, runs = 0;
  };
  std::vector<Piece> phases[4];
  for (auto& phase : phases)
    for (int count = random() % 12; count; count--)
      phase.push_back({random() % 4 ? 0 : (int)(random() % 20)});
  const auto work = [&](int phase, int64_t piece) {
    check(!pool.is_over, "a piece ran after the call");
    for (int other = 0; other < 4; other++)
      for (const Piece& its : phases[other])
        check(other == phase || its.runs == (other < phase), "a piece ran beside another phase");
    linger(phases[phase][piece].yields);
    phases[phase][piece].runs++;
  };
  const auto size = [&](int phase) { return (int64_t)phases[phase].size(); };
  ridgeline::parallel(pool, {size(0), size(1), size(2), size(3)}, work);
  for (const auto& phase : phases)
    for (const Piece& piece : phase) check(piece.runs == 1, "a piece ran never or twice");
  pool.is_over = true;
  for (std::thread& helper : pool.helpers) helper.join();
}

}  // namespace

int main() {
  for (int seed = 1; seed <= 500; seed++) call(seed);
}
