// Rows of float32: each is read in one order whatever lies beside it.
#pragma once
#include <math.h>

#include "row_kernels.h"
#include "scratch.h"
#include "vector.h"

namespace {

constexpr float kNothing = -__builtin_inff();

// The first `count` < 16 floats at p, and `other` in the rest.
inline Vector load_some(const float* p, int64_t count, float other) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; i++) lanes[i] = other;
  memcpy(lanes, p, count * sizeof(float));
  return Vector::load(lanes);
}
inline void store_some(const Vector& v, int64_t count, float* p) {
  float lanes[kLanes];
  v.store(lanes);
  memcpy(p, lanes, count * sizeof(float));
}

// Calls work(first, count) for sixteen at a time, and for what is left.
template <class Work>
inline void by_sixteen(int64_t size, const Work& work) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) work(i, kLanes);
  if (i < size) work(i, (int)(size - i));
}

inline Vector load_upto(const float* p, int count, float other) {
  return count == kLanes ? Vector::load(p) : load_some(p, count, other);
}
inline void store_upto(const Vector& v, int count, float* p) {
  count == kLanes ? v.store(p) : store_some(v, count, p);
}

// Sixteen elements of float32 or of bfloat16, or `count` of them, and 0.
inline Vector load_elements(const void* all, bool is_float32, int64_t first, int count) {
  if (is_float32) return load_upto((const float*)all + first, count, 0);
  const uint16_t* p = (const uint16_t*)all + first;
  if (count == kLanes) return widen(p);
  uint16_t lanes[kLanes] = {};
  memcpy(lanes, p, count * sizeof(uint16_t));
  return widen(lanes);
}

// Whether a row of float32 or of bfloat16 is all 0, of either sign, as padding is. Where it is not,
// its first number mostly is not, either, and nothing else is read.
bool is_zero(const void* row, bool is_float32, int64_t size) {
  constexpr int64_t kAtOnce = 256;
  const uint32_t all_but_signs = is_float32 ? 0x7fffffff : 0x7fff7fff;
  uint32_t first = 0;
  if (size) memcpy(&first, row, is_float32 ? 4 : 2);
  if (first & all_but_signs) return false;
  auto are_zero = [&](const char* bytes) {
    Words any = {};
    UNROLL for (int64_t i = 0; i < kAtOnce; i += kRegisterBytes) {
      Words part;  // at any address: a row of bfloat16 may have an odd size
      memcpy(&part, bytes + i, sizeof part);
      any |= part;
    }
    any &= all_but_signs;
    uint64_t parts[kRegisterBytes / 8], all = 0;
    memcpy(parts, &any, sizeof parts);
    UNROLL for (uint64_t part : parts) all |= part;
    return all == 0;
  };
  const char* bytes = (const char*)row;
  int64_t remaining = size * (is_float32 ? 4 : 2);
  for (; remaining >= kAtOnce; remaining -= kAtOnce, bytes += kAtOnce)
    if (!are_zero(bytes)) return false;
  char tail[kAtOnce] = {};
  memcpy(tail, bytes, remaining);
  return are_zero(tail);
}

// The sum over a row of of(sixteen entries), in four interleaved parts.
template <class Of>
inline float sum_of(const float* x, int64_t size, const Of& of) {
  constexpr int kParts = 4;
  Vector sums[kParts];
  for (Vector& part : sums) part = Vector::splat(0);
  int64_t i = 0;
  for (; i + kParts * kLanes <= size; i += kParts * kLanes) UNROLL
    for (int part = 0; part < kParts; part++)
      sums[part] = sums[part] + of(Vector::load(x + i + part * kLanes));
  for (; i + kLanes <= size; i += kLanes) sums[0] = sums[0] + of(Vector::load(x + i));
  float tail_sum = 0;
  if (i < size) {  // lanes without an entry add nothing, whatever `of` makes of them
    float lanes[kLanes] = {};
    store_some(of(load_some(x + i, size - i, 0)), size - i, lanes);
    tail_sum = sum(Vector::load(lanes));
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3])) + tail_sum;
}

void norm(const ridgeline::Norm& n, int64_t row) {
  const float* x = n.x + row * n.size;
  float* y = n.y + row * n.size;
  if (!n.bias && is_zero(x, true, n.size)) {
    memset(y, 0, n.size * sizeof(float));
    return;
  }
  Vector mean = Vector::splat(0);
  if (n.bias) {
    const float total = sum_of(x, n.size, [](const Vector& v) { return v; });
    mean = Vector::splat(total / (float)n.size);
  }
  const float squares = sum_of(x, n.size, [&](const Vector& v) {
    const Vector centered = v - mean;
    return centered * centered;
  });
  const Vector scale = Vector::splat(1 / __builtin_sqrtf(squares / (float)n.size + n.epsilon));
  const Vector offset = Vector::splat(n.offset);
  by_sixteen(n.size, [&](int64_t i, int count) {
    const Vector weight = load_elements(n.weight, n.is_float32, i, count) + offset;
    Vector v = (load_upto(x + i, count, 0) - mean) * scale * weight;
    if (n.bias) v = v + load_elements(n.bias, n.is_float32, i, count);
    store_upto(v, count, y + i);
  });
}

// 1 / (1 + e^-x).
inline Vector sigmoid(const Vector& v) {
  constexpr int32_t kSign = INT32_MIN;
  Vector out;
  UNROLL for (int i = 0; i < kRegisters; i++)
    out.part[i] = (Floats)((Ints)v.part[i] | kSign);  // -|x|
  const Vector e = exponential(out);
  UNROLL for (int i = 0; i < kRegisters; i++) {
    const Floats one = Floats{} + 1.f;
    out.part[i] = (v.part[i] < 0.f ? e.part[i] : one) / (one + e.part[i]);
  }
  return out;
}

// v sigmoid(2 sqrt(2 / pi) (v + 0.044715 v^3)): GELU with its tanh.
inline Vector gelu(const Vector& v) {
  constexpr float kSlope = 1.5957691216f;
  const Vector bend = multiply_add(v * v, Vector::splat(kSlope * 0.044715f), Vector::splat(kSlope));
  return v * sigmoid(v * bend);
}

// To bfloat16, to the nearest and to even; NaN stays NaN.
inline void store_bfloat16(const Vector& v, int count, uint16_t* p) {
  uint16_t lanes[kLanes];
  UNROLL for (int i = 0; i < kRegisters; i++) {
    const Words bits = (Words)v.part[i];
    const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Words word = v.part[i] == v.part[i] ? rounded : (bits >> 16 | 0x40);
    *(LooseHalves*)(lanes + i * kRegisterLanes) = __builtin_convertvector(word, Halves);
  }
  memcpy(p, lanes, count * sizeof(uint16_t));
}

template <class Activation>
void gate(const ridgeline::Gated& g, int64_t row, const Activation& activation) {
  const float *gates = g.gate_up + row * 2 * g.size, *ups = gates + g.size;
  if (is_zero(gates, true, 2 * g.size)) {
    const int64_t bytes = g.size * (g.is_float32 ? 4 : 2);
    memset((char*)g.y + row * bytes, 0, bytes);
    return;
  }
  by_sixteen(g.size, [&](int64_t i, int count) {
    const Vector v = activation(load_upto(gates + i, count, 0)) * load_upto(ups + i, count, 0);
    if (g.is_float32)
      store_upto(v, count, (float*)g.y + row * g.size + i);
    else
      store_bfloat16(v, count, (uint16_t*)g.y + row * g.size + i);
  });
}

void gate(const ridgeline::Gated& g, int64_t row) {
  if (g.gate == ridgeline::Gate::kSilu)
    gate(g, row, [](const Vector& v) { return v * sigmoid(v); });
  else
    gate(g, row, gelu);
}

// What is subtracted before exp: nothing where all is impossible, so that the sum is 0.
inline float finite_or_0(float top) { return __builtin_isfinite(top) ? top : 0; }

ridgeline::Mass summarize(const float* x, int64_t size, float* maxima) {
  if (is_zero(x, true, size)) {
    for (int64_t group = 0; group * ridgeline::kGroup < size; group++) maxima[group] = 0;
    return {0, (float)size};
  }
  float top = kNothing;
  for (int64_t group = 0; group * ridgeline::kGroup < size; group++) {
    const float* entries = x + group * ridgeline::kGroup;
    const int64_t behind = size - group * ridgeline::kGroup;
    Vector tops = Vector::splat(kNothing);
    by_sixteen(behind < ridgeline::kGroup ? behind : ridgeline::kGroup, [&](int64_t i, int count) {
      tops = maximum(tops, load_upto(entries + i, count, kNothing));
    });
    maxima[group] = largest(tops);
    top = maxima[group] > top ? maxima[group] : top;
  }
  const Vector zero = Vector::splat(finite_or_0(top));
  const float total = sum_of(x, size, [&](const Vector& v) { return exponential(v - zero); });
  return {top, total};
}

float log_sum_exp(const ridgeline::Mass* chunks, int64_t count) {
  float top = kNothing, total = 0;
  for (int64_t i = 0; i < count; i++) top = chunks[i].top > top ? chunks[i].top : top;
  const float zero = finite_or_0(top);
  for (int64_t i = 0; i < count; i++)
    if (chunks[i].sum != 0) total += chunks[i].sum * expf(finite_or_0(chunks[i].top) - zero);
  return zero + logf(total);
}

// The least score that is chosen is found bit by bit, from how many are not below. Scores have
// XLA's order, -NaN < -inf < -0 < 0 < inf < NaN, as integers.
void choose(const ridgeline::Choice& c, int64_t row) {
  static thread_local Scratch scratch;
  int32_t* const keys = (int32_t*)scratch.reserve(c.size * sizeof(int32_t));
  const float* const scores = c.scores + row * c.size;
  const uint8_t* const is_open = c.is_open + row * c.size;
  int64_t count = 0;
  for (int64_t i = 0; i < c.size; i++) {
    int32_t bits;
    memcpy(&bits, scores + i, sizeof bits);
    const int32_t key = bits ^ (bits >> 31 & INT32_MAX);
    keys[i] = !is_open[i] ? INT32_MIN : key > INT32_MIN ? key : INT32_MIN + 1;
    count += is_open[i] != 0;
  }
  count = count < c.max_chosen ? count : c.max_chosen;
  auto not_below = [&](int32_t key) {
    int32_t reaching = 0;
    for (int64_t i = 0; i < c.size; i++) reaching += keys[i] >= key;
    return (int64_t)reaching;
  };
  uint32_t least = 0;  // its sign turned, so that bits count upwards
  int64_t not_below_least = c.size;
  for (uint32_t bit = 1u << 31; bit && not_below_least > count; bit >>= 1) {
    const int64_t above = not_below((int32_t)((least | bit) ^ 1u << 31));
    if (above < count) continue;
    least |= bit;
    not_below_least = above;
  }
  const int32_t key = (int32_t)(least ^ 1u << 31);
  int64_t equals = count;  // that are chosen
  for (int64_t i = 0; i < c.size; i++) equals -= keys[i] > key;
  int32_t* const index = c.index + row * c.max_chosen;
  int64_t taken = 0;
  for (int64_t i = 0; taken < count; i++) {
    const bool is_equal = keys[i] == key && equals > 0;
    index[taken] = (int32_t)i;
    taken += keys[i] > key || is_equal;
    equals -= is_equal;
  }
  for (; taken < c.max_chosen; taken++) index[taken] = (int32_t)c.size;
  c.counts[row] = (int32_t)count;
}

}  // namespace
