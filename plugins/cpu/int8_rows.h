// Sixteen int32 lanes, and rows of int8 activations with a scale for each group of G columns.
// One row: `width` values, then width/G scales and width/G sums of scale · value (floats), padded to a cache line.
#pragma once
#include "simd.h"

template <int G> struct Int8 { uint8_t byte; };

#if defined(PK_AVX512)
struct i16 { __m512i v; };
PK_INLINE i16 izero() { return {_mm512_setzero_si512()}; }
PK_INLINE v16 to_v16(i16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
PK_INLINE void store_int8(int8_t* p, v16 a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v))); }
#elif defined(PK_AVX2)
struct i16 { __m256i lo, hi; };
PK_INLINE i16 izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
PK_INLINE v16 to_v16(i16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
PK_INLINE void store_int8(int8_t* p, v16 a) {
  __m256i pair = _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)), 0xd8);
  __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(pair), _mm256_extracti128_si256(pair, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
#else
struct i16 { i32x16 v; };
PK_INLINE i16 izero() { return {i32x16{}}; }
PK_INLINE v16 to_v16(i16 a) { return {__builtin_convertvector(a.v, f32x16)}; }
PK_INLINE void store_int8(int8_t* p, v16 a) {
  float f[16];
  store(f, a);
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(f[i] == f[i] ? f[i] : 0.0f);
}
#endif

// Bytes from one row to the next.
template <int G> PK_INLINE int64_t int8_stride(int64_t width) { return (width + width / G * 8 + 63) / 64 * 64; }

constexpr float SMALLEST_PEAK = 1e-30f;  // below it a group counts as zero: 127 / peak must stay finite

// x [width] to one row: scale = max|x|/127 and values x·(127/max|x|) rounded to nearest even, for each group.
// A row with NaN or infinity gets NaN scales, so that it stays visible.
template <int G>
static void quantize_row(Int8<G>* row, const float* x, int64_t width) {
  int8_t* values = reinterpret_cast<int8_t*>(row);
  float *scales = reinterpret_cast<float*>(values + width), *sums = scales + width / G;
  v16 trouble = zero();
  for (int64_t k = 0; k < width; k += 16) trouble = fma(load(x + k), zero(), trouble);
  float poison = sum(trouble);
  for (int64_t g = 0; g < width / G; ++g) {
    const float* group = x + g * G;
    v16 highest = zero();
    for (int k = 0; k < G; k += 16) {
      v16 v = load(group + k);
      highest = max(highest, max(v, sub(zero(), v)));
    }
    float peak = maximum(highest);
    v16 inverse = set1(peak >= SMALLEST_PEAK ? 127.0f / peak : 0.0f), total = zero();
    for (int k = 0; k < G; k += 16) {
      v16 q = round_nearest(mul(load(group + k), inverse));
      store_int8(values + g * G + k, q);
      total = add(total, q);
    }
    scales[g] = peak * (1.0f / 127.0f) + poison;
    sums[g] = scales[g] * sum(total);
  }
}

// x [width] to one row by a given scale: values x/scale rounded to nearest even, saturating at -128 and 127.
template <int G>
static void quantize_row_static(Int8<G>* row, const float* x, int64_t width, float scale) {
  int8_t* values = reinterpret_cast<int8_t*>(row);
  float *scales = reinterpret_cast<float*>(values + width), *sums = scales + width / G;
  v16 trouble = zero();
  for (int64_t k = 0; k < width; k += 16) trouble = fma(load(x + k), zero(), trouble);
  float poison = sum(trouble);
  for (int64_t g = 0; g < width / G; ++g) {
    v16 total = zero();
    for (int k = 0; k < G; k += 16) {
      v16 q = max(set1(-128.0f), min(set1(127.0f), round_nearest(max(set1(-1024.0f), min(set1(1024.0f), div(load(x + g * G + k), set1(scale)))))));
      store_int8(values + g * G + k, q);
      total = add(total, q);
    }
    scales[g] = scale + poison;
    sums[g] = scales[g] * sum(total);
  }
}
