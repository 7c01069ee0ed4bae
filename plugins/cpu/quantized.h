// Low-bit weights: y[M, N] = x[M, K] · W with W in groups of G columns that share a scale (and minimum): float16 or float.
//   W: [ceil(N/32)] tiles of [K/G] groups of { [G/32] parts, scale[32], minimum[32] if MIN }.
//   A part is 32 columns of 32 outputs, in two halves of 16 that alternate every 64 bytes: for 8-bit values
//   [8 steps of 4 columns][2 halves][16 outputs][4], for 4-bit values [4][2][16][4] bytes whose low nibble is step 2j and
//   whose high nibble is step 2j+1. Values are unsigned: a weight is scale·u + minimum, and without a stored minimum it is
//   scale·(u - 2^(BITS-1)).
// Activations come as int8 rows (int8_rows.h) or, in the reference variant, as float rows.
// Integer sums are exact and groups are added in ascending order by fused multiply-adds: bits depend on the row alone.
#pragma once
#include "elementwise.h"

struct half { uint16_t bits; };
template <int BITS_, int GROUP_, bool MIN_, class SCALE = half> struct Quantized {
  static constexpr int BITS = BITS_, GROUP = GROUP_;
  static_assert((BITS == 4 || BITS == 8) && GROUP % 32 == 0, "groups are made of parts of 32 columns");
  static constexpr bool MIN = MIN_;
  static constexpr float OFFSET = 1 << (BITS - 1);
  static constexpr int LOADS = BITS == 4 ? 4 : 8;                          // of 64 bytes, for a half's part
  static constexpr int64_t PART = 128 * LOADS;                             // bytes of 32 columns × 32 outputs
  static constexpr int64_t SCALES = GROUP / 32 * PART;                     // where a group's scales start
  static constexpr int64_t FIELD = 32 * sizeof(SCALE);                     // bytes of 32 scales, or minima
  static constexpr int64_t BLOCK = SCALES + (MIN ? 2 : 1) * FIELD;         // bytes of a group × 32 outputs
  using Scale = SCALE;
};

#if defined(PK_AVX512)
struct u8x64 { __m512i v; };
PK_INLINE u8x64 load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
PK_INLINE u8x64 low_nibbles(u8x64 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
PK_INLINE u8x64 high_nibbles(u8x64 a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
PK_INLINE v16 load_half(const uint8_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
PK_INLINE v16 byte_of_lanes(u8x64 a, int index) {  // byte `index` of each lane's four, as float
  return {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srl_epi32(a.v, _mm_cvtsi32_si128(8 * index)), _mm512_set1_epi32(255)))};
}
#if defined(__AVX512VNNI__)
template <int BITS> PK_INLINE i16 dot4(i16 c, u8x64 w, const int8_t* x) {
  int32_t four;
  memcpy(&four, x, 4);
  return {_mm512_dpbusd_epi32(c.v, w.v, _mm512_set1_epi32(four))};
}
#else
PK_INLINE __m512i dot4_small(__m512i w, __m512i x) { return _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1)); }
template <int BITS> PK_INLINE i16 dot4(i16 c, u8x64 w, const int8_t* x) {
  int32_t four;
  memcpy(&four, x, 4);
  __m512i a = _mm512_set1_epi32(four);
  if constexpr (BITS == 4) return {_mm512_add_epi32(c.v, dot4_small(w.v, a))};
  __m512i high = _mm512_slli_epi32(dot4_small(high_nibbles(w).v, a), 4);  // in nibbles: 16-bit sums cannot saturate
  return {_mm512_add_epi32(c.v, _mm512_add_epi32(dot4_small(low_nibbles(w).v, a), high))};
}
#endif
#elif defined(PK_AVX2)
struct u8x64 { __m256i lo, hi; };
PK_INLINE u8x64 load_bytes(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + 1)};
}
PK_INLINE __m256i low_half(__m256i a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
PK_INLINE u8x64 low_nibbles(u8x64 a) { return {low_half(a.lo), low_half(a.hi)}; }
PK_INLINE u8x64 high_nibbles(u8x64 a) { return {low_half(_mm256_srli_epi16(a.lo, 4)), low_half(_mm256_srli_epi16(a.hi, 4))}; }
PK_INLINE v16 load_half(const uint8_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
PK_INLINE __m256 byte_of_half(__m256i a, int index) {
  return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srl_epi32(a, _mm_cvtsi32_si128(8 * index)), _mm256_set1_epi32(255)));
}
PK_INLINE v16 byte_of_lanes(u8x64 a, int index) { return {byte_of_half(a.lo, index), byte_of_half(a.hi, index)}; }
PK_INLINE __m256i dot4_small(__m256i w, __m256i x) { return _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)); }
template <int BITS> PK_INLINE __m256i dot4_half(__m256i c, __m256i w, __m256i x) {
  if constexpr (BITS == 4) return _mm256_add_epi32(c, dot4_small(w, x));
  __m256i high = _mm256_slli_epi32(dot4_small(low_half(_mm256_srli_epi16(w, 4)), x), 4);  // 16-bit sums cannot saturate
  return _mm256_add_epi32(c, _mm256_add_epi32(dot4_small(low_half(w), x), high));
}
template <int BITS> PK_INLINE i16 dot4(i16 c, u8x64 w, const int8_t* x) {
  int32_t four;
  memcpy(&four, x, 4);
  __m256i a = _mm256_set1_epi32(four);
  return {dot4_half<BITS>(c.lo, w.lo, a), dot4_half<BITS>(c.hi, w.hi, a)};
}
#else
struct u8x64 { uint32_t lane[16]; };  // the four bytes of a lane, lowest first
PK_INLINE u8x64 load_bytes(const uint8_t* p) {
  u8x64 r;
  memcpy(&r, p, sizeof r);
  return r;
}
PK_INLINE u8x64 low_nibbles(u8x64 a) {
  for (uint32_t& lane : a.lane) lane &= 0x0f0f0f0fu;
  return a;
}
PK_INLINE u8x64 high_nibbles(u8x64 a) {
  for (uint32_t& lane : a.lane) lane = lane >> 4 & 0x0f0f0f0fu;
  return a;
}
PK_INLINE float half_to_float(uint16_t h) {
  uint32_t exponent = h >> 10 & 31, mantissa = h & 1023;
  float magnitude = exponent == 31 ? (mantissa ? NAN : INFINITY)
                    : exponent     ? ldexpf(static_cast<float>(1024 + mantissa), static_cast<int>(exponent) - 25)
                                   : ldexpf(static_cast<float>(mantissa), -24);
  return h & 0x8000 ? -magnitude : magnitude;
}
PK_INLINE v16 load_half(const uint8_t* p) {
  float f[16];
  for (int i = 0; i < 16; ++i) f[i] = half_to_float(static_cast<uint16_t>(p[2 * i] | p[2 * i + 1] << 8));
  return load(f);
}
PK_INLINE v16 byte_of_lanes(u8x64 a, int index) {
  float f[16];
  for (int i = 0; i < 16; ++i) f[i] = static_cast<float>(a.lane[i] >> 8 * index & 255);
  return load(f);
}
template <int BITS> PK_INLINE i16 dot4(i16 c, u8x64 w, const int8_t* x) {
  for (int i = 0; i < 16; ++i) {
    uint32_t u = w.lane[i];
    c.v[i] += static_cast<int32_t>(u & 255) * x[0] + static_cast<int32_t>(u >> 8 & 255) * x[1] +
              static_cast<int32_t>(u >> 16 & 255) * x[2] + static_cast<int32_t>(u >> 24) * x[3];
  }
  return c;
}
#endif

// y = x·factors as int8 rows, by one scale for all or, where that is null, by scales of their own.
// x [rows, width] floats; factors [width] floats or null (1); scale [1] float or null
template <int G>
static __attribute__((noinline)) void quantize_scaled(Int8<G>* y, const float* x, const float* factors, const float* scale, int64_t width) {
  PK_SCRATCH(row, width);
  for (int64_t k = 0; k < width; k += 16) store(row + k, factors ? mul(load(x + k), load(factors + k)) : load(x + k));
  if (scale) quantize_row_static(y, row, width, *scale);
  else quantize_row(y, row, width);
}
template <int G>
static void quantize_rows(Thread& t, Int8<G>* y, const float* x, const uint8_t* factors, const uint8_t* scale, int64_t rows, int64_t width) {
  const float *f = reinterpret_cast<const float*>(factors), *s = reinterpret_cast<const float*>(scale);
  each(t, rows, [&](int64_t m) { quantize_scaled(y + m * int8_stride<G>(width), x + m * width, f, s, width); });
}

// Scales and minima of one half's 16 outputs.
PK_INLINE v16 load_scales(const half* p) { return load_half(reinterpret_cast<const uint8_t*>(p)); }
PK_INLINE v16 load_scales(const float* p) { return load(p); }
template <class W> PK_INLINE v16 group_field(const uint8_t* block, int half, int64_t field) {
  return load_scales(reinterpret_cast<const typename W::Scale*>(block + W::SCALES + field * W::FIELD) + 16 * half);
}
template <class W> PK_INLINE v16 group_scale(const uint8_t* block, int half) { return group_field<W>(block, half, 0); }
template <class W> PK_INLINE v16 group_minimum(const uint8_t* block, int half, v16 scale) {
  return W::MIN ? group_field<W>(block, half, 1) : mul(scale, set1(-W::OFFSET));
}
// Step 0 … 7 (four columns) of one half of a part.
template <class W> PK_INLINE u8x64 part_step(const uint8_t* part, int half, int step) {
  u8x64 bytes = load_bytes(part + step * W::LOADS / 8 * 128 + 64 * half);
  if (W::BITS == 8) return bytes;
  return step % 2 ? high_nibbles(bytes) : low_nibbles(bytes);
}

// A tile's outputs that exist, for each of its halves.
struct Lanes {
  int half[2];
  Lanes(int64_t N, int64_t n) {
    for (int i = 0; i < 2; ++i) half[i] = static_cast<int>(N - n - 16 * i < 0 ? 0 : N - n - 16 * i > 16 ? 16 : N - n - 16 * i);
  }
};

// The 32 outputs of a tile for ROWS int8 rows: each value of x is broadcast once for both halves.
template <class W, int ROWS>
static void quantized_tile(float* y, int64_t ldy, const Int8<W::GROUP>* x, const uint8_t* tile, int64_t K, const Lanes& lanes) {
  const int64_t groups = K / W::GROUP, stride = int8_stride<W::GROUP>(K);
  v16 acc[2][ROWS];
  for (int m = 0; m < ROWS; ++m) acc[0][m] = acc[1][m] = zero();
  for (int64_t g = 0; g < groups; ++g, tile += W::BLOCK) {
    i16 dots[2][ROWS];
    for (int m = 0; m < ROWS; ++m) dots[0][m] = dots[1][m] = izero();
    for (int part = 0; part < W::GROUP / 32; ++part) {
      const int8_t* values = reinterpret_cast<const int8_t*>(x) + g * W::GROUP + part * 32;
#pragma GCC unroll 8
      for (int step = 0; step < 8; ++step) {
        u8x64 a = part_step<W>(tile + part * W::PART, 0, step), b = part_step<W>(tile + part * W::PART, 1, step);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; ++m) {
          dots[0][m] = dot4<W::BITS>(dots[0][m], a, values + m * stride + 4 * step);
          dots[1][m] = dot4<W::BITS>(dots[1][m], b, values + m * stride + 4 * step);
        }
      }
    }
    for (int n = 0; n < 2; ++n) {
      v16 scale = group_scale<W>(tile, n), minimum = group_minimum<W>(tile, n, scale);
      for (int m = 0; m < ROWS; ++m) {
        const float *scales = reinterpret_cast<const float*>(x + m * stride + K), *sums = scales + groups;
        acc[n][m] = fma(to_v16(dots[n][m]), mul(scale, set1(scales[g])), acc[n][m]);
        acc[n][m] = fma(minimum, set1(sums[g]), acc[n][m]);
      }
    }
  }
  for (int m = 0; m < ROWS; ++m)
    for (int n = 0; n < 2; ++n) store_some(y + m * ldy + 16 * n, acc[n][m], lanes.half[n]);
}

// The 32 outputs of a tile for ROWS float rows: weights dequantized in registers, nothing rounded.
template <class W, int ROWS>
static void dequantized_tile(float* y, int64_t ldy, const float* x, const uint8_t* tile, int64_t K, const Lanes& lanes) {
  v16 acc[2][ROWS];
  for (int m = 0; m < ROWS; ++m) acc[0][m] = acc[1][m] = zero();
  for (int64_t g = 0; g < K / W::GROUP; ++g, tile += W::BLOCK)
    for (int n = 0; n < 2; ++n) {
      v16 scale = group_scale<W>(tile, n), minimum = group_minimum<W>(tile, n, scale);
      for (int step = 0; step < W::GROUP / 4; ++step) {
        u8x64 four = part_step<W>(tile + step / 8 * W::PART, n, step % 8);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
          v16 w = fma(byte_of_lanes(four, k), scale, minimum);
#pragma GCC unroll 8
          for (int m = 0; m < ROWS; ++m) acc[n][m] = fma(w, set1(x[m * K + g * W::GROUP + 4 * step + k]), acc[n][m]);
        }
      }
    }
  for (int m = 0; m < ROWS; ++m)
    for (int n = 0; n < 2; ++n) store_some(y + m * ldy + 16 * n, acc[n][m], lanes.half[n]);
}

// A tile for any number of int8 rows, in blocks of up to MOST that are as even as they can be.
template <class W>
static void quantized_rows(float* y, int64_t ldy, const Int8<W::GROUP>* x, const uint8_t* tile, int64_t K, int64_t rows, const Lanes& lanes) {
#if defined(PK_AVX512)
  constexpr int MOST = 6;
#else
  constexpr int MOST = 2;
#endif
  const int64_t stride = int8_stride<W::GROUP>(K);
  for (int64_t blocks = (rows + MOST - 1) / MOST; blocks; --blocks) {
    int64_t now = (rows + blocks - 1) / blocks;
    switch (now) {
      case 1: quantized_tile<W, 1>(y, ldy, x, tile, K, lanes); break;
      case 2: quantized_tile<W, 2>(y, ldy, x, tile, K, lanes); break;
#if defined(PK_AVX512)
      case 3: quantized_tile<W, 3>(y, ldy, x, tile, K, lanes); break;
      case 4: quantized_tile<W, 4>(y, ldy, x, tile, K, lanes); break;
      case 5: quantized_tile<W, 5>(y, ldy, x, tile, K, lanes); break;
      default: quantized_tile<W, 6>(y, ldy, x, tile, K, lanes);
#endif
    }
    rows -= now, y += now * ldy, x += now * stride;
  }
}

// x: int8 rows or float rows. y rows are ldy floats apart.
template <class W>
static void quantized_linear(Thread& t, float* y, int64_t ldy, const Int8<W::GROUP>* x, const uint8_t* packed, int64_t M, int64_t N, int64_t K) {
  parallel(t, M ? (N + 31) / 32 : 0, 1, [&](int64_t n, int64_t end) {
    for (; n < end; ++n)
      quantized_rows<W>(y + n * 32, ldy, x, packed + n * (K / W::GROUP) * W::BLOCK, K, M, Lanes(N, n * 32));
  });
}
template <class W>
static void quantized_linear(Thread& t, float* y, int64_t ldy, const float* x, const uint8_t* packed, int64_t M, int64_t N, int64_t K) {
  parallel(t, M ? (N + 31) / 32 : 0, 1, [&](int64_t n, int64_t end) {
    for (; n < end; ++n) {
      const uint8_t* tile = packed + n * (K / W::GROUP) * W::BLOCK;
      Lanes lanes(N, n * 32);
      int64_t m = 0;
      for (; m + 4 <= M; m += 4) dequantized_tile<W, 4>(y + m * ldy + n * 32, ldy, x + m * K, tile, K, lanes);
      for (; m < M; ++m) dequantized_tile<W, 1>(y + m * ldy + n * 32, ldy, x + m * K, tile, K, lanes);
    }
  });
}

// y[m, :] = row ids[m] of a quantized table.
template <class W>
static void embed_quantized(Thread& t, float* y, const uint8_t* packed, const int32_t* ids, int64_t rows, int64_t width) {
  each(t, rows, [&](int64_t m) {
    const uint8_t* block = packed + ids[m] / 32 * (width / W::GROUP) * W::BLOCK;
    int half = ids[m] / 16 % 2, lane = ids[m] % 16;
    for (int64_t g = 0; g < width / W::GROUP; ++g, block += W::BLOCK) {
      float scale[16], minimum[16];
      store(scale, group_scale<W>(block, half));
      store(minimum, group_minimum<W>(block, half, load(scale)));
      for (int k = 0; k < W::GROUP; ++k) {
        int step = k % 32 / 4, value = block[k / 32 * W::PART + step * W::LOADS / 8 * 128 + 64 * half + lane * 4 + k % 4];
        if (W::BITS == 4) value = value >> step % 2 * 4 & 15;
        y[m * width + g * W::GROUP + k] = static_cast<float>(value) * scale[lane] + minimum[lane];
      }
    }
  });
}
