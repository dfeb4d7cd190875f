// The kernels of rows as XLA calls them.
#include <algorithm>
#include <cstring>

#include "dispatch.h"
#include "memory.h"
#include "parallel.h"
#include "scratch.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace ridgeline {
namespace {

using Floats = ffi::Buffer<ffi::F32>;
using Integers = ffi::BufferR1<ffi::S32>;

// Entries that are worth waking a thread for.
constexpr int64_t kPiece = 1 << 14;
// That a thread computes at a time: what they add up stays in the first cache.
constexpr int64_t kChannels = 512;

// Calls work(row) for all rows, many at a time.
template <class Work>
void by_row(ffi::ThreadPool& pool, int64_t rows, int64_t size, const Work& work) {
  const int64_t together = size < kPiece ? kPiece / std::max<int64_t>(1, size) : 1;
  auto some = [&](int, int64_t piece) {
    const int64_t stop = (piece + 1) * together < rows ? (piece + 1) * together : rows;
    for (int64_t row = piece * together; row < stop; row++) work(row);
  };
  parallel(pool, {(rows + together - 1) / together}, some);
}

// Calls work(row, first, size) for some channels of a row at a time, each with so many entries.
template <class Work>
void by_channels(ffi::ThreadPool& pool, int64_t rows, int64_t channels, int64_t entries,
                 const Work& work) {
  const int64_t parts = (channels + kChannels - 1) / kChannels;
  by_row(pool, rows * parts, entries * kChannels, [&](int64_t part) {
    const int64_t first = part % parts * kChannels;
    work(part / parts, first, channels - first < kChannels ? channels - first : kChannels);
  });
}

bool is_float32(const ffi::AnyBuffer& x) { return x.element_type() == ffi::DataType::F32; }

// RMSNorm, or LayerNorm where the bias is not empty, over the last axis.
ffi::Error norm(ffi::ThreadPool pool, float epsilon, float offset, Floats x, ffi::AnyBuffer weight,
                ffi::AnyBuffer bias, ffi::Result<Floats> y) {
  const int64_t size = weight.element_count(), total = x.element_count();
  const bool has_bias = bias.element_count();
  if ((!is_float32(weight) && weight.element_type() != ffi::DataType::BF16) ||
      bias.element_type() != weight.element_type())
    return ffi::Error::InvalidArgument("ridgeline_norm: weight or bias of another type");
  if (y->dimensions().size() != x.dimensions().size() || (int64_t)y->element_count() != total)
    return ffi::Error::InvalidArgument("ridgeline_norm: y of another shape");
  if (!total) return ffi::Error::Success();
  if (!size || !x.dimensions().size() || x.dimensions().back() != size ||
      (has_bias && (int64_t)bias.element_count() != size))
    return ffi::Error::InvalidArgument("ridgeline_norm: shapes do not go together");
  Norm n;
  n.x = x.typed_data();
  n.size = size;
  n.weight = weight.untyped_data();
  n.bias = has_bias ? bias.untyped_data() : nullptr;
  n.is_float32 = is_float32(weight);
  n.epsilon = epsilon;
  n.offset = offset;
  n.y = y->typed_data();
  const RowKernels& kernels = *chosen().rows;
  by_row(pool, total / size, size, [&](int64_t row) { kernels.norm(n, row); });
  return ffi::Error::Success();
}

// act(gate) up: [T, 2 F] -> [T, F], float32 or bfloat16.
ffi::Error gate(ffi::ThreadPool pool, int32_t activation, ffi::BufferR2<ffi::F32> gate_up,
                ffi::Result<ffi::AnyBuffer> y) {
  const int64_t rows = gate_up.dimensions()[0], size = gate_up.dimensions()[1] / 2;
  if ((int64_t)y->element_count() != rows * size || gate_up.dimensions()[1] % 2 ||
      (!is_float32(*y) && y->element_type() != ffi::DataType::BF16))
    return ffi::Error::InvalidArgument("ridgeline_gate: y of another shape or type");
  if (!rows || !size) return ffi::Error::Success();
  Gated g;
  g.gate_up = gate_up.typed_data();
  g.size = size;
  g.gate = (Gate)activation;
  g.is_float32 = is_float32(*y);
  g.y = y->untyped_data();
  const RowKernels& kernels = *chosen().rows;
  by_row(pool, rows, size, [&](int64_t row) { kernels.gate(g, row); });
  return ffi::Error::Success();
}

// Of each row of logits, read once: maxima of groups, the first of the largest, log(sum(exp)).
ffi::Error summarize(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x,
                     ffi::Result<ffi::BufferR2<ffi::F32>> maxima,
                     ffi::Result<ffi::BufferR1<ffi::S32>> best,
                     ffi::Result<ffi::BufferR1<ffi::F32>> total) {
  const int64_t rows = x.dimensions()[0], size = x.dimensions()[1];
  const int64_t groups = (size + kGroup - 1) / kGroup, chunks = (size + kChunk - 1) / kChunk;
  if (maxima->dimensions()[0] != rows || maxima->dimensions()[1] != groups || !size ||
      (int64_t)best->element_count() != rows || (int64_t)total->element_count() != rows)
    return ffi::Error::InvalidArgument("ridgeline_summarize: shapes do not go together");
  static thread_local Scratch scratch;
  Mass* const masses = (Mass*)scratch.reserve(rows * chunks * sizeof(Mass));
  const RowKernels& kernels = *chosen().rows;
  auto work = [&](int phase, int64_t piece) {
    if (phase == 0) {
      const int64_t row = piece / chunks, first = piece % chunks * kChunk;
      masses[piece] = kernels.summarize(x.typed_data() + row * size + first,
                                        size - first < kChunk ? size - first : kChunk,
                                        maxima->typed_data() + row * groups + first / kGroup);
      return;
    }
    const float *entries = x.typed_data() + piece * size,
                *tops = maxima->typed_data() + piece * groups;
    int64_t group = 0;
    for (int64_t i = 1; i < groups; i++)
      if (tops[i] > tops[group]) group = i;
    int64_t largest = group * kGroup;
    const int64_t stop = largest + kGroup < size ? largest + kGroup : size;
    for (int64_t i = largest + 1; i < stop; i++)
      if (entries[i] > entries[largest]) largest = i;
    best->typed_data()[piece] = (int32_t)largest;
    total->typed_data()[piece] = kernels.log_sum_exp(masses + piece * chunks, chunks);
  };
  parallel(pool, {rows * chunks, rows}, work);
  return ffi::Error::Success();
}

// Of each row of scores the best that are open: which they are, and how many.
ffi::Error choose(ffi::ThreadPool pool, Floats scores, ffi::Buffer<ffi::PRED> open,
                  ffi::Result<ffi::Buffer<ffi::S32>> index,
                  ffi::Result<ffi::Buffer<ffi::S32>> counts) {
  const int64_t rows = counts->element_count(), total = scores.element_count();
  if (!rows || !index->element_count()) return ffi::Error::Success();
  Choice c;
  c.size = total / rows;
  c.max_chosen = (int64_t)index->element_count() / rows;
  if (c.size * rows != total || c.max_chosen * rows != (int64_t)index->element_count() ||
      (int64_t)open.element_count() != total)
    return ffi::Error::InvalidArgument("ridgeline_choose: shapes do not go together");
  c.scores = scores.typed_data();
  c.is_open = (const uint8_t*)open.untyped_data();
  c.index = index->typed_data();
  c.counts = counts->typed_data();
  const RowKernels& kernels = *chosen().rows;
  constexpr int64_t kReadings = 8;  // that cost what reading a row from memory does
  by_row(pool, rows, kReadings * c.size, [&](int64_t row) { kernels.choose(c, row); });
  return ffi::Error::Success();
}

// Of each token's heads the queries, rotated and scaled, for attention; its keys and values go where
// they belong in the pages, in place.
ffi::Error append(ffi::ThreadPool pool, int64_t kv_heads, float epsilon, float offset, float scale,
                  ffi::BufferR2<ffi::F32> qkv, ffi::BufferR2<ffi::F32> cos,
                  ffi::BufferR2<ffi::F32> sin, ffi::AnyBuffer query_norm, ffi::AnyBuffer key_norm,
                  ffi::BufferR1<ffi::S32> page, ffi::BufferR1<ffi::S32> token_of_page,
                  ffi::AnyBuffer pages, ffi::Result<ffi::AnyBuffer> q,
                  ffi::Result<ffi::AnyBuffer> written) {
  const auto shape = q->dimensions(), page_shape = pages.dimensions();
  if (shape.size() != 3 || page_shape.size() != 3)
    return ffi::Error::InvalidArgument("ridgeline_append: q or pages of another rank");
  const int64_t tokens = shape[0];
  Heads h;
  h.num_heads = shape[1];
  h.kv_heads = kv_heads;
  h.width = shape[2];
  h.pairs = cos.dimensions()[1];
  h.num_pages = page_shape[0];
  h.page_tokens = page_shape[1];
  h.is_float32 = is_float32(*q);
  const bool has_norms = query_norm.element_count();
  h.is_float32_norm = is_float32(query_norm);
  const auto stored = h.is_float32 ? ffi::DataType::F32 : ffi::DataType::U16;
  if ((!h.is_float32 && q->element_type() != ffi::DataType::BF16) ||
      pages.element_type() != stored || written->element_type() != stored ||
      (!h.is_float32_norm && query_norm.element_type() != ffi::DataType::BF16) ||
      key_norm.element_type() != query_norm.element_type())
    return ffi::Error::InvalidArgument("ridgeline_append: q, pages or norms of another type");
  auto fits = [&](const auto& x) { return (int64_t)x.element_count() == tokens * h.pairs; };
  const int64_t norm_size = has_norms ? h.width : 0;
  if (qkv.dimensions()[0] != tokens ||
      qkv.dimensions()[1] != (h.num_heads + 2 * kv_heads) * h.width || 2 * h.pairs > h.width ||
      !fits(cos) || !fits(sin) || (int64_t)page.element_count() != tokens ||
      (int64_t)token_of_page.element_count() != tokens ||
      page_shape[2] != 2 * kv_heads * h.width || written->size_bytes() != pages.size_bytes() ||
      (int64_t)query_norm.element_count() != norm_size ||
      (int64_t)key_norm.element_count() != norm_size)
    return ffi::Error::InvalidArgument("ridgeline_append: shapes do not go together");
  if (written->untyped_data() != pages.untyped_data())
    memcpy(written->untyped_data(), pages.untyped_data(), pages.size_bytes());
  if (!q->element_count()) return ffi::Error::Success();
  h.qkv = qkv.typed_data();
  h.cos = cos.typed_data();
  h.sin = sin.typed_data();
  h.query_norm = has_norms ? query_norm.untyped_data() : nullptr;
  h.key_norm = has_norms ? key_norm.untyped_data() : nullptr;
  h.epsilon = epsilon;
  h.offset = offset;
  h.scale = scale;
  h.page = page.typed_data();
  h.token_of_page = token_of_page.typed_data();
  h.q = q->untyped_data();
  h.pages = written->untyped_data();
  const RowKernels& kernels = *chosen().rows;
  by_row(pool, tokens, qkv.dimensions()[1], [&](int64_t token) { kernels.append(h, token); });
  return ffi::Error::Success();
}

// The memory of the states after a step: theirs, or, where XLA gives another one, a copy.
float* in_place(const Floats& states, ffi::Result<Floats>& after) {
  if (states.size_bytes() && after->untyped_data() != states.untyped_data())
    memcpy(after->untyped_data(), states.untyped_data(), states.size_bytes());
  return after->typed_data();
}

// Rows and places of states [slots, 1 + k, ...].
StateRows rows_of(const Floats& states, int64_t num_tokens, const Integers& slot,
                  const Integers& start, const Integers& valid) {
  return {num_tokens,        states.dimensions()[0], states.dimensions()[1],
          slot.typed_data(), start.typed_data(),     valid.typed_data()};
}

bool are_of_rows(int64_t rows, const Integers& slot, const Integers& start,
                 const Integers& valid) {
  for (const Integers* x : {&slot, &start, &valid})
    if ((int64_t)x->element_count() != rows) return false;
  return true;
}

// Matrix states of decode rows, as row_kernels.h has it; no beta: empty.
ffi::Error update(ffi::ThreadPool pool, ffi::BufferR4<ffi::F32> q, ffi::BufferR4<ffi::F32> k,
                  ffi::BufferR4<ffi::F32> v, Floats decay, Floats beta, Integers slot,
                  Integers start, Integers valid, Floats states, ffi::Result<Floats> out,
                  ffi::Result<Floats> after) {
  const auto read = k.dimensions(), added = v.dimensions(), shape = states.dimensions();
  if (shape.size() != 5)
    return ffi::Error::InvalidArgument("ridgeline_update: states of another rank");
  const int64_t Y = added[0], W = added[1];
  Update u;
  u.num_heads = added[2];
  u.key_heads = read[2];
  u.keys = read[3];
  u.values = added[3];
  const int64_t scalars = Y * W * u.num_heads, decays = decay.element_count();
  u.decays_of_keys = decay.dimensions().size() == 4;
  const bool has_beta = beta.element_count();
  if (read[0] != Y || read[1] != W || !u.key_heads || u.num_heads % u.key_heads ||
      q.element_count() != k.element_count() || q.dimensions()[3] != u.keys ||
      decays != scalars * (u.decays_of_keys ? u.keys : 1) ||
      (has_beta && (int64_t)beta.element_count() != scalars) || !u.keys || !shape[1] ||
      shape[2] != u.num_heads || shape[3] != u.keys || shape[4] != u.values ||
      !are_of_rows(Y, slot, start, valid) || out->element_count() != v.element_count() ||
      after->element_count() != states.element_count())
    return ffi::Error::InvalidArgument("ridgeline_update: shapes do not go together");
  u.states = in_place(states, after);
  if (!v.element_count()) return ffi::Error::Success();
  u.rows = rows_of(states, W, slot, start, valid);
  u.q = q.typed_data();
  u.k = k.typed_data();
  u.v = v.typed_data();
  u.decay = decay.typed_data();
  u.beta = has_beta ? beta.typed_data() : nullptr;
  u.out = out->typed_data();
  const StateKernels& kernels = *chosen().states;
  by_row(pool, Y * u.num_heads, W * u.keys * u.values, [&](int64_t item) {
    kernels.update(u, item / u.num_heads, item % u.num_heads);
  });
  return ffi::Error::Success();
}

// States of channels of decode rows, as row_kernels.h has it.
ffi::Error scan(ffi::ThreadPool pool, ffi::BufferR3<ffi::F32> x, ffi::BufferR3<ffi::F32> step,
                ffi::BufferR2<ffi::F32> rates, ffi::BufferR3<ffi::F32> in,
                ffi::BufferR3<ffi::F32> factors, Integers slot, Integers start, Integers valid,
                Floats states, ffi::Result<Floats> out, ffi::Result<Floats> after) {
  const auto x_shape = x.dimensions(), in_shape = in.dimensions(), shape = states.dimensions();
  if (shape.size() != 4)
    return ffi::Error::InvalidArgument("ridgeline_scan: states of another rank");
  const int64_t Y = x_shape[0], W = x_shape[1];
  Scan s;
  s.width = shape[2];
  s.channels = shape[3];
  if (x_shape[2] != s.channels || !s.width || step.element_count() != x.element_count() ||
      rates.dimensions()[0] != s.width || rates.dimensions()[1] != s.channels ||
      in_shape[0] != Y || in_shape[1] != W || in_shape[2] != s.width || !shape[1] ||
      factors.element_count() != in.element_count() || !are_of_rows(Y, slot, start, valid) ||
      out->element_count() != x.element_count() ||
      after->element_count() != states.element_count())
    return ffi::Error::InvalidArgument("ridgeline_scan: shapes do not go together");
  s.states = in_place(states, after);
  if (!x.element_count()) return ffi::Error::Success();
  s.rows = rows_of(states, W, slot, start, valid);
  s.x = x.typed_data();
  s.step = step.typed_data();
  s.rates = rates.typed_data();
  s.in = in.typed_data();
  s.factors = factors.typed_data();
  s.out = out->typed_data();
  const StateKernels& kernels = *chosen().states;
  by_channels(pool, Y, s.channels, W * s.width, [&](int64_t y, int64_t first, int64_t size) {
    kernels.scan(s, y, first, size);
  });
  return ffi::Error::Success();
}

// Convolutions of channels of decode rows, as row_kernels.h has it; no bias: empty.
ffi::Error convolve(ffi::ThreadPool pool, ffi::BufferR3<ffi::F32> x, ffi::BufferR2<ffi::F32> taps,
                    Floats bias, Integers slot, Integers start, Integers valid, Floats tails,
                    ffi::Result<Floats> out, ffi::Result<Floats> after) {
  const auto x_shape = x.dimensions(), shape = tails.dimensions();
  if (shape.size() != 4)
    return ffi::Error::InvalidArgument("ridgeline_convolve: tails of another rank");
  const int64_t W = x_shape[1];
  Convolution c;
  c.num_rows = x_shape[0];
  c.width = taps.dimensions()[1];
  c.channels = x_shape[2];
  const bool has_bias = bias.element_count();
  if (taps.dimensions()[0] != c.channels || !c.width || !shape[1] || shape[2] != c.width - 1 ||
      shape[3] != c.channels || (has_bias && (int64_t)bias.element_count() != c.channels) ||
      !are_of_rows(c.num_rows, slot, start, valid) || out->element_count() != x.element_count() ||
      after->element_count() != tails.element_count())
    return ffi::Error::InvalidArgument("ridgeline_convolve: shapes do not go together");
  c.tails = in_place(tails, after);
  if (!x.element_count()) return ffi::Error::Success();
  c.rows = rows_of(tails, W, slot, start, valid);
  c.x = x.typed_data();
  c.taps = taps.typed_data();
  c.bias = has_bias ? bias.typed_data() : nullptr;
  c.out = out->typed_data();
  const StateKernels& kernels = *chosen().states;
  by_channels(pool, 1, c.channels, c.num_rows * W * c.width,
              [&](int64_t, int64_t first, int64_t size) { kernels.convolve(c, first, size); });
  return ffi::Error::Success();
}

ffi::Error zeros(ffi::Result<ffi::AnyBuffer> y) {
  write_zeros(y->untyped_data(), y->size_bytes());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace ridgeline

#pragma GCC visibility push(default)

extern "C" {

XLA_FFI_DEFINE_HANDLER_SYMBOL(ridgeline_norm, ridgeline::norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<float>("epsilon")
                                  .Attr<float>("offset")
                                  .Arg<ridgeline::Floats>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ridgeline::Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ridgeline_gate, ridgeline::gate,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int32_t>("activation")
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ridgeline_summarize, ridgeline::summarize,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Ret<ffi::BufferR1<ffi::S32>>()
                                  .Ret<ffi::BufferR1<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ridgeline_choose, ridgeline::choose,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ridgeline::Floats>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ridgeline_append, ridgeline::append,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int64_t>("kv_heads")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("offset")
                                  .Attr<float>("scale")
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ridgeline_update, ridgeline::update,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR4<ffi::F32>>()
                                  .Arg<ffi::BufferR4<ffi::F32>>()
                                  .Arg<ffi::BufferR4<ffi::F32>>()
                                  .Arg<ridgeline::Floats>()
                                  .Arg<ridgeline::Floats>()
                                  .Arg<ridgeline::Integers>()
                                  .Arg<ridgeline::Integers>()
                                  .Arg<ridgeline::Integers>()
                                  .Arg<ridgeline::Floats>()
                                  .Ret<ridgeline::Floats>()
                                  .Ret<ridgeline::Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ridgeline_scan, ridgeline::scan,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR3<ffi::F32>>()
                                  .Arg<ffi::BufferR3<ffi::F32>>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::BufferR3<ffi::F32>>()
                                  .Arg<ffi::BufferR3<ffi::F32>>()
                                  .Arg<ridgeline::Integers>()
                                  .Arg<ridgeline::Integers>()
                                  .Arg<ridgeline::Integers>()
                                  .Arg<ridgeline::Floats>()
                                  .Ret<ridgeline::Floats>()
                                  .Ret<ridgeline::Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ridgeline_convolve, ridgeline::convolve,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR3<ffi::F32>>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ridgeline::Floats>()
                                  .Arg<ridgeline::Integers>()
                                  .Arg<ridgeline::Integers>()
                                  .Arg<ridgeline::Integers>()
                                  .Arg<ridgeline::Floats>()
                                  .Ret<ridgeline::Floats>()
                                  .Ret<ridgeline::Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ridgeline_zeros, ridgeline::zeros,
                              ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());
}

#pragma GCC visibility pop
