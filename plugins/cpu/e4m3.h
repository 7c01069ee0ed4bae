// e4m3: a sign, four bits of exponent (bias 7) and three of fraction; no infinities, ±448 the largest, 0x7f and 0xff NaN.
#pragma once
#include "simd.h"

struct e4m3 { uint8_t bits; };

PK_INLINE float to_float(e4m3 x) {
  uint32_t sign = static_cast<uint32_t>(x.bits & 0x80) << 24, rest = x.bits & 0x7f, bits;
  float value = static_cast<float>(rest) * 0x1p-9f;  // what it is below 2^-6
  memcpy(&bits, &value, 4);
  if (rest >= 8) bits = (rest << 20) + (120u << 23);
  if (rest == 0x7f) bits = 0x7fc00000u;
  bits |= sign;
  memcpy(&value, &bits, 4);
  return value;
}

// a: what round_e4m3 made, or NaN.
PK_INLINE e4m3 to_e4m3(float a) {
  uint32_t bits;
  memcpy(&bits, &a, 4);
  uint32_t sign = bits >> 24 & 0x80, rest = bits & 0x7fffffffu;
  uint32_t code = rest < (121u << 23) ? static_cast<uint32_t>(fabsf(a) * 512.0f) : (rest >> 20) - (120u << 3);
  return {static_cast<uint8_t>(sign | (rest > 0x7f800000u ? 0x7f : code))};
}

// load: moved to where float16 has them, an e4m3 value's bits are that value divided by 256.
#if defined(PK_AVX512) || defined(PK_AVX2)
PK_INLINE __m256i e4m3_as_halves(const e4m3* p) {
  __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  __m256i ones = _mm256_set1_epi16(-1), nan = _mm256_cmpeq_epi16(_mm256_or_si256(wide, _mm256_set1_epi16(-128)), ones);
  return _mm256_or_si256(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80))), nan);
}
#endif
#if defined(PK_AVX512)
PK_INLINE v16 load(const e4m3* p) { return {_mm512_mul_ps(_mm512_cvtph_ps(e4m3_as_halves(p)), _mm512_set1_ps(256.0f))}; }
PK_INLINE v16 exponent_of(v16 a) { return {_mm512_and_ps(a.v, _mm512_castsi512_ps(_mm512_set1_epi32(0x7f800000)))}; }
PK_INLINE v16 absolute(v16 a) { return {_mm512_and_ps(a.v, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fffffff)))}; }
PK_INLINE v16 with_sign_of(v16 x, v16 a) { return {_mm512_or_ps(a.v, _mm512_andnot_ps(_mm512_castsi512_ps(_mm512_set1_epi32(0x7fffffff)), x.v))}; }
#elif defined(PK_AVX2)
PK_INLINE v16 load(const e4m3* p) {
  __m256i halves = e4m3_as_halves(p);
  __m256 up = _mm256_set1_ps(256.0f);
  return {_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), up), _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), up)};
}
PK_INLINE v16 only_bits(v16 a, int32_t bits) {
  __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(bits));
  return {_mm256_and_ps(a.lo, mask), _mm256_and_ps(a.hi, mask)};
}
PK_INLINE v16 exponent_of(v16 a) { return only_bits(a, 0x7f800000); }
PK_INLINE v16 absolute(v16 a) { return only_bits(a, 0x7fffffff); }
PK_INLINE v16 with_sign_of(v16 x, v16 a) {
  v16 sign = only_bits(x, static_cast<int32_t>(0x80000000u));
  return {_mm256_or_ps(a.lo, sign.lo), _mm256_or_ps(a.hi, sign.hi)};
}
#else
PK_INLINE v16 load(const e4m3* p) {
  float f[16];
  for (int i = 0; i < 16; ++i) f[i] = to_float(p[i]);
  return load(f);
}
PK_INLINE i32x16 bits_of(v16 a) {
  i32x16 bits;
  memcpy(&bits, &a, sizeof bits);
  return bits;
}
PK_INLINE v16 exponent_of(v16 a) { return from_bits(bits_of(a) & 0x7f800000); }
PK_INLINE v16 absolute(v16 a) { return from_bits(bits_of(a) & 0x7fffffff); }
PK_INLINE v16 with_sign_of(v16 x, v16 a) { return from_bits(bits_of(a) | (bits_of(x) & static_cast<int32_t>(0x80000000u))); }
#endif

PK_INLINE v16 load_n(const e4m3* p, int n) {
  e4m3 full[16] = {};
  memcpy(full, p, static_cast<size_t>(n));
  return load(full);
}

// The nearest e4m3 value, ties to even, saturating at ±448; NaN stays NaN. Where 2^e ≤ |x| < 2^(e+1), a float near 2^(e+20)
// has the unit of three bits of fraction, 2^(e-3); below 2^-6 the unit stays 2^-9.
PK_INLINE v16 round_e4m3(v16 x) {
  v16 a = min(set1(448.0f), absolute(x)), shift = mul(max(set1(0x1p-6f), exponent_of(a)), set1(0x1p20f));
  return with_sign_of(x, sub(add(a, shift), shift));
}
PK_INLINE void store_e4m3(e4m3* p, v16 x) {
  float f[16];
  store(f, round_e4m3(x));
  for (int i = 0; i < 16; ++i) p[i] = to_e4m3(f[i]);
}
