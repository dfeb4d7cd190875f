// Recurrent states of decode rows, each read and written once, where it lies. What belongs to one
// head or to one channel has one order, whatever is computed beside it.
#pragma once
#include <cfloat>

#include "kernels.h"
#include "rows.h"
#include "scratch.h"
#include "vector.h"

namespace {

constexpr int kRowsAtOnce = 4;  // of a state: so often its sums are in registers

// A head's state before a token and after it, [M, H], which may be the same.
struct HeadState {
  int64_t keys, values;  // M, H
  const float* decay;    // of each key, `decay_stride` apart: 0 is one for all
  int64_t decay_stride;
  const float* before;
  float* after;
};

// sums += factors^T S of rows [m, m + rows), S being the decayed state; with values what
// it is after the token: decayed, plus keys times values, and written.
template <int rows, bool writes>
inline void add_rows(const HeadState& s, int64_t m, const float* keys, const float* values,
                     const float* factors, float* sums) {
  Vector decay[rows], key[rows], factor[rows];
  UNROLL for (int r = 0; r < rows; r++) {
    decay[r] = Vector::splat(s.decay[(m + r) * s.decay_stride]);
    if (writes) key[r] = Vector::splat(keys[m + r]);
    factor[r] = Vector::splat(factors[m + r]);
  }
  by_sixteen(s.values, [&](int64_t i, int count) {
    Vector sum = load_upto(sums + i, count, 0), value;
    if (writes) value = load_upto(values + i, count, 0);
    UNROLL for (int r = 0; r < rows; r++) {
      const int64_t at = (m + r) * s.values + i;
      Vector state = decay[r] * load_upto(s.before + at, count, 0);
      if (writes) {
        state = multiply_add(key[r], value, state);
        store_upto(state, count, s.after + at);
      }
      sum = multiply_add(factor[r], state, sum);
    }
    store_upto(sum, count, sums + i);
  });
}

template <bool writes>
inline void read_state(const HeadState& s, const float* keys, const float* values,
                       const float* factors, float* sums) {
  memset(sums, 0, s.values * sizeof(float));
  int64_t m = 0;
  for (; m + kRowsAtOnce <= s.keys; m += kRowsAtOnce)
    add_rows<kRowsAtOnce, writes>(s, m, keys, values, factors, sums);
  for (; m < s.keys; m++) add_rows<1, writes>(s, m, keys, values, factors, sums);
}

// The tokens of a row in one head; outputs of padding are 0.
void update(const ridgeline::Update& u, int64_t y, int64_t head) {
  static thread_local Scratch scratch;
  float* const change = u.beta ? (float*)scratch.reserve(u.values * sizeof(float)) : nullptr;
  const int64_t key_head = head / (u.num_heads / u.key_heads);
  HeadState s = {u.keys, u.values, nullptr, u.decays_of_keys, nullptr, nullptr};
  const int64_t count = u.rows.count_of(y);
  for (int64_t w = 0; w < u.rows.num_tokens; w++) {
    const int64_t token = y * u.rows.num_tokens + w;
    const int64_t item = token * u.num_heads + head;
    const int64_t shared = (token * u.key_heads + key_head) * u.keys;
    float* const out = u.out + item * u.values;
    if (w >= count) {
      memset(out, 0, u.values * sizeof(float));
      continue;
    }
    auto state = [&](int64_t after) {
      return u.states + (u.rows.place(y, after) * u.num_heads + head) * u.keys * u.values;
    };
    s.before = state(w - 1);
    s.after = state(w);
    s.decay = u.decay + item * (u.decays_of_keys ? u.keys : 1);
    const float* values = u.v + item * u.values;
    if (u.beta) {
      read_state<false>(s, nullptr, nullptr, u.k + shared, change);
      const Vector beta = Vector::splat(u.beta[item]);
      by_sixteen(u.values, [&](int64_t i, int n) {
        const Vector recalled = load_upto(change + i, n, 0);
        store_upto(beta * (load_upto(values + i, n, 0) - recalled), n, change + i);
      });
      values = change;
    }
    read_state<true>(s, u.k + shared, values, u.q + shared, out);
  }
}

// The tokens of a row in channels [first, first + size).
void scan(const ridgeline::Scan& s, int64_t y, int64_t first, int64_t size) {
  const int64_t count = s.rows.count_of(y);
  for (int64_t w = 0; w < s.rows.num_tokens; w++) {
    const int64_t token = y * s.rows.num_tokens + w;
    float* const out = s.out + token * s.channels + first;
    memset(out, 0, size * sizeof(float));
    if (w >= count) continue;
    auto state = [&](int64_t after) {
      return s.states + s.rows.place(y, after) * s.width * s.channels + first;
    };
    const float *const before = state(w - 1), *const x = s.x + token * s.channels + first;
    const float* const step = s.step + token * s.channels + first;
    float* const after = state(w);
    for (int64_t m = 0; m < s.width; m++) {
      const Vector in = Vector::splat(s.in[token * s.width + m]);
      const Vector factor = Vector::splat(s.factors[token * s.width + m]);
      const float* const rate = s.rates + m * s.channels + first;
      by_sixteen(size, [&](int64_t i, int n) {
        const Vector dt = load_upto(step + i, n, 0);
        const Vector decay = exponential(dt * load_upto(rate + i, n, 0));
        const int64_t at = m * s.channels + i;
        const Vector added = dt * load_upto(x + i, n, 0) * in;
        const Vector state = multiply_add(decay, load_upto(before + at, n, 0), added);
        store_upto(state, n, after + at);
        store_upto(multiply_add(factor, state, load_upto(out + i, n, 0)), n, out + i);
      });
    }
  }
}

// Bits are those of layers/recurrence/convolution.py: a maximum keeps compilers from making one
// operation of a product and a sum.
void convolve(const ridgeline::Convolution& c, int64_t first, int64_t size) {
  static thread_local Scratch scratch;
  float* const taps = (float*)scratch.reserve(c.width * size * sizeof(float));
  for (int64_t i = 0; i < size; i++)
    for (int64_t t = 0; t < c.width; t++) taps[t * size + i] = c.taps[(first + i) * c.width + t];
  const Vector lowest = Vector::splat(-FLT_MAX);
  const int64_t newest = c.width - 1;
  for (int64_t y = 0; y < c.num_rows; y++) {
    const int64_t count = c.rows.count_of(y);
    for (int64_t w = 0; w < c.rows.num_tokens; w++) {
      const int64_t token = (y * c.rows.num_tokens + w) * c.channels + first;
      if (w >= count) {
        memset(c.out + token, 0, size * sizeof(float));
        continue;
      }
      auto tail = [&](int64_t after) {
        return c.tails + c.rows.place(y, after) * newest * c.channels + first;
      };
      const float* const before = tail(w - 1);
      float* const after = tail(w);
      by_sixteen(size, [&](int64_t i, int n) {
        Vector sum = c.bias ? load_upto(c.bias + first + i, n, 0) : Vector::splat(0);
        for (int64_t t = 0; t < c.width; t++) {
          const float* const input = t < newest ? before + t * c.channels : c.x + token;
          const Vector x = load_upto(input + i, n, 0);
          sum = sum + maximum(lowest, load_upto(taps + t * size + i, n, 0) * x);
          if (t) store_upto(x, n, after + (t - 1) * c.channels + i);
        }
        store_upto(sum, n, c.out + token + i);
      });
    }
  }
}

constexpr ridgeline::StateKernels kStateKernels = {update, scan, convolve};

}  // namespace
