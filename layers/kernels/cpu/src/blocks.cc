// Blocks as GGUF's files have them (ggml's `block_q4_0` and the others), and ours
// (layers/quantized.py), laid out in strips; and rows of strips as numbers.
#include "blocks.h"

#include <cmath>
#include <cstring>
#include <vector>

namespace ridgeline {

using Half = uint16_t;  // the bits of a float16

// 32 numbers of a row and their scales, whatever the format has of them.
struct Group {
  uint8_t q[kDepth] = {};
  Half d = 0, e = 0;  // e is also Q4_1's m
  uint8_t s = 0, t = 0;
  float scale = 0;  // of ours, with a zero point t
};

// One feature of a group in a strip.
struct Place {
  uint8_t *integers, *super, *scales;
  int feature, bits;
  bool is_float;

  Place(const BlockLayout& layout, uint8_t* strip, int64_t depth, int64_t group, int column)
      : integers(strip + group * layout.integer_bytes()),
        super(strip + depth / kDepth * layout.integer_bytes() + layout.super_offset(group)),
        scales(super + layout.group_offset(group)),
        feature(column),
        bits(layout.bits),
        is_float(layout.is_float) {}

  uint8_t* byte(int row, int k) const { return integers + row * 64 + feature * 4 + k % 4; }

  void put(int k, int q) const {
    const int quad = k / 4;
    if (is_float && bits == 4) {
      integers[k / 2 * kStrip + feature] |= (uint8_t)(q << k % 2 * 4);
    } else if (is_float) {
      integers[k * kStrip + feature] = (uint8_t)q;
    } else if (bits == 8) {
      *byte(quad, k) = (uint8_t)q;
    } else if (bits <= 3) {
      *byte(quad / 4, k) |= (uint8_t)((q & 3) << quad % 4 * 2);
      if (bits == 3) *byte(2, k) |= (uint8_t)(q >> 2 << quad);
    } else {
      *byte(quad / 2, k) |= (uint8_t)((q & 15) << quad % 2 * 4);
      if (bits == 5) *byte(4, k) |= (uint8_t)(q >> 4 << quad);
      if (bits == 6) *byte(4 + quad / 4, k) |= (uint8_t)(q >> 4 << quad % 4 * 2);
    }
  }
  int get(int k) const {
    const int quad = k / 4;
    if (is_float && bits == 4) return integers[k / 2 * kStrip + feature] >> k % 2 * 4 & 15;
    if (is_float) return integers[k * kStrip + feature];
    if (bits == 8) return (int8_t)*byte(quad, k);
    if (bits <= 3) {
      const int low = *byte(quad / 4, k) >> quad % 4 * 2 & 3;
      return bits == 2 ? low : low | (*byte(2, k) >> quad & 1) << 2;
    }
    const int low = *byte(quad / 2, k) >> quad % 2 * 4 & 15;
    if (bits == 5) return low | (*byte(4, k) >> quad & 1) << 4;
    return bits == 4 ? low : low | (*byte(4 + quad / 4, k) >> quad % 4 * 2 & 3) << 4;
  }
};

// value = d[half] (q - offset - z) + m[half]
struct Scales {
  float d[2], m[2] = {}, z = 0;
};

namespace {

// Without the processor's help: instruction sets read scales in vectors.
float to_float(Half half) {
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  const float size = exponent ? std::ldexp((float)(1024 + mantissa), exponent - 25)
                              : std::ldexp((float)mantissa, -24);
  const float value = exponent == 31 ? (mantissa ? NAN : INFINITY) : size;
  return half >> 15 ? -value : value;
}

Half half_at(const uint8_t* p) {
  Half half;
  memcpy(&half, p, 2);
  return half;
}

// What e4m3 and e2m1 stand for, the latter twice.
float of_fp8(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float size = (code & 127) == 127 ? NAN
                     : exponent          ? std::ldexp((float)(8 + mantissa), exponent - 10)
                                         : std::ldexp((float)mantissa, -9);
  return code >> 7 ? -size : size;
}

float of_e2m1(int code) {
  const float twice[] = {0, 1, 2, 3, 4, 6, 8, 12};
  return code >> 3 ? -twice[code & 7] : twice[code & 7];
}

float of_iq4(int code) { return kIQ4[code]; }

// The low halves of 16 bytes, then the high ones.
void read_nibbles(const uint8_t* from, uint8_t* q) {
  for (int i = 0; i < 16; i++) {
    q[i] = from[i] & 15;
    q[i + 16] = from[i] >> 4;
  }
}

void read_q8_0(const uint8_t* row, int64_t group, Group& g) {
  const uint8_t* block = row + group * 34;
  g.d = half_at(block);
  memcpy(g.q, block + 2, kDepth);
}

void read_q5_0(const uint8_t* row, int64_t group, Group& g) {
  const uint8_t* block = row + group * 22;
  g.d = half_at(block);
  read_nibbles(block + 6, g.q);
  for (int k = 0; k < kDepth; k++) g.q[k] |= (block[2 + k / 8] >> k % 8 & 1) << 4;
}

void read_mxfp4(const uint8_t* row, int64_t group, Group& g) {
  const uint8_t* block = row + group * 17;
  g.s = block[0];
  read_nibbles(block + 1, g.q);
}

// Of a row that is one block.
void read_bytes(const uint8_t* row, int64_t group, Group& g) {
  memcpy(&g.scale, row, 4);
  memcpy(g.q, row + 4 + group * kDepth, kDepth);
}

// Of blocks of SIZE integers of BITS bits, whose elements lie apart (layers/quantized.py).
template <int BITS, int SIZE, bool has_zero>
void read_integers(const uint8_t* row, int64_t group, Group& g) {
  constexpr int kHead = 4 + has_zero, kShare = SIZE / kDepth;
  const uint8_t* block = row + group / kShare * (kHead + SIZE * BITS / 8);
  memcpy(&g.scale, block, 4);
  if (has_zero) g.t = block[4];
  const uint8_t *from = block + kHead, *upper = from + SIZE / 4;
  for (int k = 0; k < kDepth; k++) {
    const int n = (int)(group % kShare) * kDepth + k;
    if (BITS == 4)
      g.q[k] = from[n % (SIZE / 2)] >> n / (SIZE / 2) * 4 & 15;
    else
      g.q[k] = (uint8_t)((from[n % (SIZE / 4)] >> n / (SIZE / 4) * 2 & 3) |
                         (upper[n % (SIZE / 8)] >> n / (SIZE / 8) & 1) << 2);
  }
}

// Of which a row's last may be shorter.
void read_fp8_block(const uint8_t* row, int64_t group, Group& g) {
  const uint8_t* block = row + group / 4 * 132;
  memcpy(&g.scale, block, 4);
  memcpy(g.q, block + 4 + group % 4 * kDepth, kDepth);
}

void read_mxfp8(const uint8_t* row, int64_t group, Group& g) {
  const uint8_t* block = row + group * 33;
  g.s = block[0];
  memcpy(g.q, block + 1, kDepth);
}

// Behind the row's scale.
void read_nvfp4(const uint8_t* row, int64_t group, Group& g) {
  memcpy(&g.scale, row, 4);
  const uint8_t* block = row + 4 + group * 18;
  g.s = block[0];
  g.t = block[9];
  for (int k = 0; k < kDepth; k++) {
    const uint8_t* codes = block + k / 16 * 9 + 1;
    g.q[k] = codes[k % 8] >> k / 8 % 2 * 4 & 15;
  }
}

// IQ4_NL's lie likewise.
void read_q4_0(const uint8_t* row, int64_t group, Group& g) {
  const uint8_t* block = row + group * 18;
  g.d = half_at(block);
  read_nibbles(block + 2, g.q);
}

void read_q4_1(const uint8_t* row, int64_t group, Group& g) {
  const uint8_t* block = row + group * 20;
  g.d = half_at(block);
  g.e = half_at(block + 2);
  read_nibbles(block + 4, g.q);
}

// The scales and minima at the beginning of Q4_K's and Q5_K's blocks, of group `i`.
void read_scales_and_minima(const uint8_t* block, int i, Group& g) {
  const uint8_t* scales = block + 4;
  g.d = half_at(block);
  g.e = half_at(block + 2);
  // Six bits each: of the last four pairs, the upper two lie in the bytes of the first.
  g.s = i < 4 ? scales[i] & 63 : (scales[i + 4] & 15) | scales[i - 4] >> 6 << 4;
  g.t = i < 4 ? scales[i + 4] & 63 : scales[i + 4] >> 4 | scales[i] >> 6 << 4;
}

void read_q4_k(const uint8_t* row, int64_t group, Group& g) {
  const uint8_t* block = row + group / 8 * 144;
  const int i = (int)(group % 8);
  const uint8_t* from = block + 16 + i / 2 * kDepth;
  read_scales_and_minima(block, i, g);
  for (int k = 0; k < kDepth; k++) g.q[k] = i % 2 ? from[k] >> 4 : from[k] & 15;
}

void read_q5_k(const uint8_t* row, int64_t group, Group& g) {
  const uint8_t* block = row + group / 8 * 176;
  const int i = (int)(group % 8);
  const uint8_t *upper = block + 16, *from = block + 48 + i / 2 * kDepth;
  read_scales_and_minima(block, i, g);
  for (int k = 0; k < kDepth; k++) {
    const int nibble = i % 2 ? from[k] >> 4 : from[k] & 15;
    g.q[k] = (uint8_t)(nibble | (upper[k] >> i & 1) << 4);
  }
}

void read_q6_k(const uint8_t* row, int64_t group, Group& g) {
  const uint8_t* block = row + group / 8 * 210;
  const int half = (int)(group % 8 / 4), quarter = (int)(group % 4);
  const uint8_t* low = block + half * 64 + quarter % 2 * 32;
  const uint8_t* upper = block + 128 + half * 32;
  for (int k = 0; k < kDepth; k++) {
    const int nibble = quarter < 2 ? low[k] & 15 : low[k] >> 4;
    g.q[k] = (uint8_t)(nibble | (upper[k] >> 2 * quarter & 3) << 4);
  }
  const uint8_t* scales = block + 192 + group % 8 * 2;
  g.s = scales[0];
  g.t = scales[1];
  g.d = half_at(block + 208);
}

void read_q3_k(const uint8_t* row, int64_t group, Group& g) {
  const uint8_t* block = row + group / 8 * 110;
  const int i = (int)(group % 8);
  const uint8_t *lower = block + 32 + i / 4 * 32, *scales = block + 96;
  for (int k = 0; k < kDepth; k++)
    g.q[k] = (uint8_t)((lower[k] >> i % 4 * 2 & 3) | (block[k] >> i & 1) << 2);
  // Six bits each: the lower four of all sixteen, then the upper two.
  const auto scale = [&](int n) {
    const int low = scales[n % 8] >> n / 8 * 4 & 15, upper = scales[8 + n % 4] >> n / 4 * 2 & 3;
    return (uint8_t)((low | upper << 4) - 32);
  };
  g.s = scale(2 * i);
  g.t = scale(2 * i + 1);
  g.d = half_at(block + 108);
}

void read_q2_k(const uint8_t* row, int64_t group, Group& g) {
  const uint8_t* block = row + group / 8 * 84;
  const int i = (int)(group % 8);
  const uint8_t* from = block + 16 + i / 4 * 32;
  for (int k = 0; k < kDepth; k++) g.q[k] = from[k] >> i % 4 * 2 & 3;
  g.s = block[2 * i];
  g.t = block[2 * i + 1];
  g.d = half_at(block + 80);
  g.e = half_at(block + 82);
}

void read_iq4_xs(const uint8_t* row, int64_t group, Group& g) {
  const uint8_t* block = row + group / 8 * 136;
  const int i = (int)(group % 8);
  const int low = block[4 + i / 2] >> i % 2 * 4 & 15, upper = block[2 + i / 4] >> i % 4 * 2 & 3;
  g.d = half_at(block);
  g.s = (uint8_t)((low | upper << 4) - 32);
  read_nibbles(block + 8 + i * 16, g.q);
}

void put_half(uint8_t* row, int feature, Half half) { memcpy(row + 2 * feature, &half, 2); }

float get_half(const uint8_t* row, int feature) { return to_float(half_at(row + 2 * feature)); }

Scales one_scale(const Place& p) {
  const float d = get_half(p.scales, p.feature);
  return {{d, d}};
}

Scales scale_and_minimum(const Place& p) {
  const float d = get_half(p.scales, p.feature);
  const float m = get_half(p.scales + 32, p.feature);
  return {{d, d}, {m, m}};
}

Scales shared_scale_and_minimum(const Place& p) {
  const float d = get_half(p.super, p.feature) * p.scales[p.feature];
  const float m = -get_half(p.super + 32, p.feature) * p.scales[kStrip + p.feature];
  return {{d, d}, {m, m}};
}

Scales shared_scale(const Place& p) {
  const float d = get_half(p.super, p.feature) * (int8_t)p.scales[p.feature];
  return {{d, d}};
}

Scales scales_of_halves(const Place& p) {
  const float d = get_half(p.super, p.feature);
  const int8_t* s = (const int8_t*)p.scales + p.feature;
  return {{d * s[0], d * s[kStrip]}};
}

Scales scales_and_minima_of_halves(const Place& p) {
  const float d = get_half(p.super, p.feature), e = get_half(p.super + 32, p.feature);
  const uint8_t first = p.scales[p.feature], second = p.scales[kStrip + p.feature];
  return {{d * (first & 15), d * (second & 15)}, {-e * (first >> 4), -e * (second >> 4)}};
}

Scales whole_scale(const Place& p) {
  float d;
  memcpy(&d, p.super + 4 * p.feature, 4);
  return {{d, d}};
}

Scales scale_and_zero(const Place& p) {
  Scales scales = whole_scale(p);
  scales.z = p.super[64 + p.feature];
  return scales;
}

Scales power_of_two(const Place& p) {
  const float d = std::ldexp(1.0f, p.scales[p.feature] - 128);
  return {{d, d}};
}

Scales scale_of_strip(const Place& p) {
  float d;
  memcpy(&d, p.super, 4);
  return {{d, d}};
}

Scales whole_power_of_two(const Place& p) {
  const float d = std::ldexp(1.0f, p.scales[p.feature] - 127);
  return {{d, d}};
}

// Half of them, as `of_e2m1` has twice the numbers.
Scales scales_of_row_and_halves(const Place& p) {
  const float d = whole_scale(p).d[0];
  const uint8_t* s = p.scales + p.feature;
  return {{of_fp8(s[0]) * d / 2, of_fp8(s[kStrip]) * d / 2}};
}

template <int BITS, int SIZE, bool has_zero>
constexpr BlockFormat integers(std::string_view name, Multiplier Blocks::* multiplier) {
  constexpr BlockLayout kLayout = BITS == 4 ? has_zero ? kInt4Asym : kInt4
                                            : has_zero ? kInt3Asym : kInt3;
  constexpr int kShift = SIZE == 128 ? 2 : SIZE == 64 ? 1 : 0;
  return {name, kLayout.sharing(kShift), multiplier, has_zero ? 0 : 1 << (BITS - 1),
          has_zero ? scale_and_zero : whole_scale, read_integers<BITS, SIZE, has_zero>, SIZE,
          4 + has_zero + SIZE * BITS / 8};
}

const BlockFormat kFormats[] = {
    {"int8", kInt8, &Blocks::int8, 0, whole_scale, read_bytes, 0, 4},
    {"w8a8", kInt8, &Blocks::w8a8, 0, whole_scale, read_bytes, 0, 4},
    {"fp8", kFp8, &Blocks::fp8, 0, whole_scale, read_bytes, 0, 4},
    {"w8a8_fp8", kFp8, &Blocks::fp8, 0, whole_scale, read_bytes, 0, 4},
    integers<4, 128, false>("int4", &Blocks::int4),
    integers<4, 64, false>("int4_g64", &Blocks::int4),
    integers<4, 32, false>("int4_g32", &Blocks::int4),
    integers<4, 128, true>("int4_asym", &Blocks::int4_asym),
    integers<4, 64, true>("int4_asym_g64", &Blocks::int4_asym),
    integers<4, 32, true>("int4_asym_g32", &Blocks::int4_asym),
    integers<3, 128, false>("int3", &Blocks::int3),
    integers<3, 64, false>("int3_g64", &Blocks::int3),
    integers<3, 32, false>("int3_g32", &Blocks::int3),
    integers<3, 128, true>("int3_asym", &Blocks::int3_asym),
    integers<3, 64, true>("int3_asym_g64", &Blocks::int3_asym),
    integers<3, 32, true>("int3_asym_g32", &Blocks::int3_asym),
    {"mxfp4", kMxfp4, &Blocks::mxfp4, 0, power_of_two, read_mxfp4, 32, 17, 0, false, nullptr,
     of_e2m1},
    {"q8_0", kQ8_0, &Blocks::q8_0, 0, one_scale, read_q8_0, 32, 34},
    {"q5_0", kQ5_0, &Blocks::q5_0, 16, one_scale, read_q5_0, 32, 22},
    {"q4_0", kQ4_0, &Blocks::q4_0, 8, one_scale, read_q4_0, 32, 18},
    {"q4_1", kQ4_1, &Blocks::q4_1, 0, scale_and_minimum, read_q4_1, 32, 20},
    {"q4_k", kQ4_K, &Blocks::q4_k, 0, shared_scale_and_minimum, read_q4_k, 256, 144},
    {"q5_k", kQ5_K, &Blocks::q5_k, 0, shared_scale_and_minimum, read_q5_k, 256, 176},
    {"q6_k", kQ6_K, &Blocks::q6_k, 32, scales_of_halves, read_q6_k, 256, 210},
    {"q3_k", kQ3_K, &Blocks::q3_k, 4, scales_of_halves, read_q3_k, 256, 110},
    {"q2_k", kQ2_K, &Blocks::q2_k, 0, scales_and_minima_of_halves, read_q2_k, 256, 84},
    {"iq4_nl", kIQ4_NL, &Blocks::iq4_nl, 0, one_scale, read_q4_0, 32, 18, 0, false, nullptr,
     of_iq4},
    {"iq4_xs", kIQ4_XS, &Blocks::iq4_xs, 0, shared_scale, read_iq4_xs, 256, 136, 0, false, nullptr,
     of_iq4},
    {"fp8_block", kFp8Block, &Blocks::fp8_block, 0, scale_of_strip, read_fp8_block, 128, 132, 0,
     true, &HalfBlocks::fp8_block},
    {"mxfp8", kMxfp8, &Blocks::mxfp8, 0, whole_power_of_two, read_mxfp8, 32, 33, 0, false,
     &HalfBlocks::mxfp8},
    {"nvfp4", kNvfp4, &Blocks::nvfp4, 0, scales_of_row_and_halves, read_nvfp4, 16, 9, 4, false,
     &HalfBlocks::nvfp4, of_e2m1},
};

// Whether the scales fit in: those of a strip are one.
bool put_scales(const BlockFormat& format, const Place& place, const Group& g) {
  const int feature = place.feature;
  if (format.layout.super_bytes == 4) {
    if (feature == 0) memcpy(place.super, &g.scale, 4);
    return memcmp(place.super, &g.scale, 4) == 0;
  }
  if (format.layout.group_bytes == 0) {
    memcpy(place.super + 4 * feature, &g.scale, 4);
    if (format.layout.super_bytes == 80) place.super[64 + feature] = g.t;
    return true;
  }
  if (format.layout.group_bytes == 16) {
    if (format.layout.super_bytes) put_half(place.super, feature, g.d);
    place.scales[feature] = g.s;
    return true;
  }
  if (format.layout.shift == kWholeRow) {  // and halves
    memcpy(place.super + 4 * feature, &g.scale, 4);
    place.scales[feature] = g.s;
    place.scales[kStrip + feature] = g.t;
    return true;
  }
  if (format.layout.shift == 0) {
    put_half(place.scales, feature, g.d);
    if (format.layout.group_bytes == 64) put_half(place.scales + 32, feature, g.e);
    return true;
  }
  put_half(place.super, feature, g.d);
  if (format.layout.super_bytes == 64) put_half(place.super + 32, feature, g.e);
  place.scales[feature] = g.s;
  place.scales[kStrip + feature] = g.t;
  return true;
}

}  // namespace

const BlockFormat* find_block_format(std::string_view name) {
  for (const BlockFormat& format : kFormats)
    if (name == format.name) return &format;
  return nullptr;
}

void read_row(const BlockFormat& format, const uint8_t* strips, int64_t width, int64_t row,
              float* out) {
  const int64_t depth = padded(width, kDepth);
  auto* strip = (uint8_t*)strips + row / kStrip * format.layout.strip_bytes(depth);
  for (int64_t first = 0; first < width; first += kDepth) {
    const Place place(format.layout, strip, depth, first / kDepth, (int)(row % kStrip));
    const Scales scales = format.scales(place);
    for (int k = 0; k < kDepth && first + k < width; k++) {
      const int q = place.get(k);
      const float number = format.number            ? format.number(q)
                           : format.layout.is_float ? of_fp8(q)
                                                    : (float)(q - format.offset) - scales.z;
      out[first + k] = scales.d[k / 16] * number + scales.m[k / 16];
    }
  }
}

}  // namespace ridgeline

// Rows [F, D] of a file's blocks as strips, for which `out` has room; whether the format is known,
// `row_bytes` are those of D numbers, whole blocks, and rows that share scales have the same.
extern "C" __attribute__((visibility("default"))) bool ridgeline_pack_blocks(
    const char* name, const uint8_t* rows, int64_t F, int64_t row_bytes, int64_t D, uint8_t* out) {
  using namespace ridgeline;
  const BlockFormat* format = find_block_format(name);
  if (!format) return false;
  if (row_bytes != format->row_bytes(D)) return false;
  const int64_t depth = padded(D, kDepth), strip_bytes = format->layout.strip_bytes(depth);
  memset(out, 0, padded(F, kStrip) / kStrip * strip_bytes);
  std::vector<uint8_t> wide(row_bytes + 2 * kDepth);  // a row with zeros behind it
  for (int64_t f = 0; f < F; f++) {
    memcpy(wide.data(), rows + f * row_bytes, row_bytes);
    for (int64_t group = 0; group < depth / kDepth; group++) {
      const Place place(format->layout, out + f / kStrip * strip_bytes, depth, group,
                        (int)(f % kStrip));
      Group g;
      format->read(wide.data(), group, g);
      for (int k = 0; k < kDepth; k++) place.put(k, g.q[k]);
      if (!put_scales(*format, place, g)) return false;
    }
  }
  return true;
}
