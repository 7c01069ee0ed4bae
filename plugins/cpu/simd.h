// Sixteen floats at a time, on whatever the compiler was told the target has. One type, v16, so kernels are written once.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // false alarms inside GCC 12's own header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#define PK_INLINE static inline __attribute__((always_inline))

struct bf16 { uint16_t bits; };

PK_INLINE float to_float(bf16 x) {
  uint32_t u = static_cast<uint32_t>(x.bits) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
PK_INLINE float to_float(float x) { return x; }
PK_INLINE bf16 to_bf16(float x) {  // round to nearest even; NaN stays NaN
  uint32_t u;
  memcpy(&u, &x, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40)};
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}
template <class T> PK_INLINE T from_float(float x) {
  if constexpr (sizeof(T) == sizeof(bf16)) return to_bf16(x);
  else return x;
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define PK_AVX512 1
struct v16 { __m512 v; };
PK_INLINE v16 zero() { return {_mm512_setzero_ps()}; }
PK_INLINE v16 set1(float x) { return {_mm512_set1_ps(x)}; }
PK_INLINE v16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
PK_INLINE void store(float* p, v16 a) { _mm512_storeu_ps(p, a.v); }
PK_INLINE v16 add(v16 a, v16 b) { return {_mm512_add_ps(a.v, b.v)}; }
PK_INLINE v16 sub(v16 a, v16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
PK_INLINE v16 mul(v16 a, v16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
PK_INLINE v16 div(v16 a, v16 b) { return {_mm512_div_ps(a.v, b.v)}; }
PK_INLINE v16 max(v16 a, v16 b) { return {_mm512_max_ps(a.v, b.v)}; }
PK_INLINE v16 min(v16 a, v16 b) { return {_mm512_min_ps(a.v, b.v)}; }
PK_INLINE v16 fma(v16 a, v16 b, v16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
PK_INLINE v16 round_nearest(v16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
PK_INLINE v16 scale_pow2(v16 a, v16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
PK_INLINE v16 load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1u), p)}; }
PK_INLINE void store_n(float* p, v16 a, int n) { _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1u), a.v); }
PK_INLINE v16 load(const bf16* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16))};
}
// lanes lo ≤ i < hi keep a, the rest become b
PK_INLINE v16 keep_range(v16 a, int lo, int hi, v16 b) {
  unsigned upper = hi >= 16 ? 0xffffu : hi <= 0 ? 0u : (1u << hi) - 1u, lower = lo <= 0 ? 0u : lo >= 16 ? 0xffffu : (1u << lo) - 1u;
  return {_mm512_mask_blend_ps(static_cast<__mmask16>(upper & ~lower), b.v, a.v)};
}
// a, but 0 in the lanes where x < limit
PK_INLINE v16 zero_where_less(v16 x, float limit, v16 a) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_NLT_UQ), a.v)};
}
// the even and odd elements of sixteen bf16 pairs
PK_INLINE v16 even(const bf16* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))}; }
PK_INLINE v16 odd(const bf16* p) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
#elif defined(__AVX2__) && defined(__FMA__)
#define PK_AVX2 1
struct v16 { __m256 lo, hi; };
PK_INLINE v16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
PK_INLINE v16 set1(float x) { __m256 v = _mm256_set1_ps(x); return {v, v}; }
PK_INLINE v16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
PK_INLINE void store(float* p, v16 a) { _mm256_storeu_ps(p, a.lo); _mm256_storeu_ps(p + 8, a.hi); }
PK_INLINE v16 add(v16 a, v16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
PK_INLINE v16 sub(v16 a, v16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
PK_INLINE v16 mul(v16 a, v16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
PK_INLINE v16 div(v16 a, v16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
PK_INLINE v16 max(v16 a, v16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
PK_INLINE v16 min(v16 a, v16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
PK_INLINE v16 fma(v16 a, v16 b, v16 c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
PK_INLINE v16 round_nearest(v16 a) {
  return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
PK_INLINE __m256 pow2_half(__m256 n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23)); }
PK_INLINE v16 scale_pow2(v16 a, v16 n) { return {_mm256_mul_ps(a.lo, pow2_half(n.lo)), _mm256_mul_ps(a.hi, pow2_half(n.hi))}; }
PK_INLINE __m256i lane_mask(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }
PK_INLINE v16 load_n(const float* p, int n) { return {_mm256_maskload_ps(p, lane_mask(n)), _mm256_maskload_ps(p + 8, lane_mask(n - 8))}; }
PK_INLINE void store_n(float* p, v16 a, int n) { _mm256_maskstore_ps(p, lane_mask(n), a.lo); _mm256_maskstore_ps(p + 8, lane_mask(n - 8), a.hi); }
PK_INLINE __m256 widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
PK_INLINE v16 load(const bf16* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {widen(_mm_loadu_si128(q)), widen(_mm_loadu_si128(q + 1))};
}
PK_INLINE v16 keep_range(v16 a, int lo, int hi, v16 b) {
  __m256i ml = _mm256_andnot_si256(lane_mask(lo), lane_mask(hi)), mh = _mm256_andnot_si256(lane_mask(lo - 8), lane_mask(hi - 8));
  return {_mm256_blendv_ps(b.lo, a.lo, _mm256_castsi256_ps(ml)), _mm256_blendv_ps(b.hi, a.hi, _mm256_castsi256_ps(mh))};
}
PK_INLINE v16 zero_where_less(v16 x, float limit, v16 a) {
  __m256 l = _mm256_set1_ps(limit);
  return {_mm256_and_ps(_mm256_cmp_ps(x.lo, l, _CMP_NLT_UQ), a.lo), _mm256_and_ps(_mm256_cmp_ps(x.hi, l, _CMP_NLT_UQ), a.hi)};
}
PK_INLINE __m256 even_half(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
PK_INLINE __m256 odd_half(__m256i x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000u)))); }
PK_INLINE v16 even(const bf16* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  return {even_half(_mm256_loadu_si256(q)), even_half(_mm256_loadu_si256(q + 1))};
}
PK_INLINE v16 odd(const bf16* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  return {odd_half(_mm256_loadu_si256(q)), odd_half(_mm256_loadu_si256(q + 1))};
}
#else
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
struct v16 { f32x16 v; };
PK_INLINE v16 load(const float* p) {
  v16 r;
  memcpy(&r, p, sizeof r);
  return r;
}
PK_INLINE void store(float* p, v16 a) { memcpy(p, &a, sizeof a); }
PK_INLINE v16 zero() { return {f32x16{}}; }
PK_INLINE v16 set1(float x) { return {f32x16{} + x}; }
PK_INLINE v16 add(v16 a, v16 b) { return {a.v + b.v}; }
PK_INLINE v16 sub(v16 a, v16 b) { return {a.v - b.v}; }
PK_INLINE v16 mul(v16 a, v16 b) { return {a.v * b.v}; }
PK_INLINE v16 div(v16 a, v16 b) { return {a.v / b.v}; }
PK_INLINE v16 max(v16 a, v16 b) { return {a.v > b.v ? a.v : b.v}; }
PK_INLINE v16 min(v16 a, v16 b) { return {a.v < b.v ? a.v : b.v}; }
PK_INLINE v16 fma(v16 a, v16 b, v16 c) { return {a.v * b.v + c.v}; }
PK_INLINE v16 round_nearest(v16 a) { return {(a.v + 12582912.0f) - 12582912.0f}; }  // |a| < 2^22
PK_INLINE v16 scale_pow2(v16 a, v16 n) {
  i32x16 bits = (__builtin_convertvector(n.v, i32x16) + 127) << 23;
  f32x16 power;
  memcpy(&power, &bits, sizeof power);
  return {a.v * power};
}
PK_INLINE v16 load_n(const float* p, int n) {
  v16 r = zero();
  memcpy(&r, p, static_cast<size_t>(n < 16 ? n : 16) * sizeof(float));
  return r;
}
PK_INLINE void store_n(float* p, v16 a, int n) { memcpy(p, &a, static_cast<size_t>(n < 16 ? n : 16) * sizeof(float)); }
PK_INLINE v16 from_bits(i32x16 bits) {
  v16 r;
  memcpy(&r, &bits, sizeof r);
  return r;
}
PK_INLINE v16 load(const bf16* p) {
  u16x16 half;
  memcpy(&half, p, sizeof half);
  return from_bits(__builtin_convertvector(half, i32x16) << 16);
}
PK_INLINE v16 keep_range(v16 a, int lo, int hi, v16 b) {
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return {(lane >= lo) & (lane < hi) ? a.v : b.v};
}
PK_INLINE v16 zero_where_less(v16 x, float limit, v16 a) { return {x.v < limit ? f32x16{} : a.v}; }
PK_INLINE v16 even(const bf16* p) {
  i32x16 both;
  memcpy(&both, p, sizeof both);
  return from_bits(both << 16);
}
PK_INLINE v16 odd(const bf16* p) {
  i32x16 both;
  memcpy(&both, p, sizeof both);
  return from_bits(both & static_cast<int32_t>(0xffff0000u));
}
#endif

PK_INLINE v16 load_n(const bf16* p, int n) {
  bf16 full[16] = {};
  memcpy(full, p, static_cast<size_t>(n) * sizeof(bf16));
  return load(full);
}
PK_INLINE void store(bf16* p, v16 a) {
#if defined(PK_AVX512) && defined(__AVX512BF16__)
  __m256bh r = _mm512_cvtneps_pbh(a.v);
  memcpy(p, &r, sizeof r);
#else
  float f[16];
  store(f, a);
  for (int i = 0; i < 16; ++i) p[i] = to_bf16(f[i]);
#endif
}
PK_INLINE void store_n(bf16* p, v16 a, int n) {
  bf16 full[16];
  store(full, a);
  memcpy(p, full, static_cast<size_t>(n) * sizeof(bf16));
}

// Sums and maxima across lanes, halving: the order is fixed, so the bits are the same on every instruction set.
#if defined(PK_AVX512) || defined(PK_AVX2)
#if defined(PK_AVX512)
PK_INLINE __m256 upper_half(v16 a) { return _mm512_extractf32x8_ps(a.v, 1); }
PK_INLINE __m256 lower_half(v16 a) { return _mm512_castps512_ps256(a.v); }
#else
PK_INLINE __m256 upper_half(v16 a) { return a.hi; }
PK_INLINE __m256 lower_half(v16 a) { return a.lo; }
#endif
PK_INLINE float sum(v16 a) {
  __m256 eight = _mm256_add_ps(lower_half(a), upper_half(a));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
PK_INLINE float maximum(v16 a) {
  __m256 eight = _mm256_max_ps(lower_half(a), upper_half(a));
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
#else
PK_INLINE float sum(v16 a) {
  float f[16];
  store(f, a);
  for (int w = 8; w; w /= 2)
    for (int i = 0; i < w; ++i) f[i] += f[i + w];
  return f[0];
}
PK_INLINE float maximum(v16 a) {
  float f[16];
  store(f, a);
  for (int w = 8; w; w /= 2)
    for (int i = 0; i < w; ++i) f[i] = f[i] > f[i + w] ? f[i] : f[i + w];
  return f[0];
}
#endif

// e^x by range reduction to |r| ≤ ln2/2 and a degree-6 Taylor polynomial in Horner form; error about 1 ulp.
// Below -87 the result is 0 (an exact zero for masked scores); x above 88 saturates; NaN stays NaN.
PK_INLINE v16 exp(v16 x) {
  v16 clamped = min(set1(88.0f), max(set1(-87.0f), x));
  v16 n = round_nearest(mul(clamped, set1(1.44269504088896341f)));
  v16 r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  v16 p = set1(1.0f / 720);
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return zero_where_less(x, -87.0f, scale_pow2(p, n));
}
