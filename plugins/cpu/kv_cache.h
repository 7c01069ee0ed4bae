// Where keys and values lie, and how a number becomes an element of the cache, C:
//   float, bf16   the number itself, rounded
//   e4m3          the number in units of the layer's scale, rounded and saturated
//   int8_t        a multiple of the position's own max|x| / 127, which is kept as a float
// One layer: K [block][kv_head][block_size/16][dim][16], V [block][kv_head][block_size][dim]; for int8_t each
// [block][kv_head] is followed by its scales, [block_size] floats.
#pragma once
#include "abi.h"
#include "e4m3.h"
#include "int8_rows.h"
#include "simd.h"

struct Heads { int64_t query, kv, dim; };
constexpr int MAX_DIM = 256;

template <class C> constexpr bool OWN_SCALES = false;
template <> constexpr bool OWN_SCALES<int8_t> = true;

template <class C> PK_INLINE uint8_t* region(uint8_t* cache, const Heads& heads, int64_t block_size, int64_t block, int64_t head) {
  return cache + (block * heads.kv + head) * block_size * (heads.dim * static_cast<int64_t>(sizeof(C)) + (OWN_SCALES<C> ? 4 : 0));
}
template <class C>
PK_INLINE C* k_tile(uint8_t* cache, const Heads& heads, int64_t block_size, int64_t block, int64_t head, int64_t slot) {
  return reinterpret_cast<C*>(region<C>(cache, heads, block_size, block, head)) + slot / 16 * heads.dim * 16;
}
template <class C>
PK_INLINE C* v_row(uint8_t* cache, const Heads& heads, int64_t block_size, int64_t block, int64_t head, int64_t slot) {
  return reinterpret_cast<C*>(region<C>(cache, heads, block_size, block, head)) + slot * heads.dim;
}
// K's or V's scales, from a slot on.
PK_INLINE float* own_scales(uint8_t* cache, const Heads& heads, int64_t block_size, int64_t block, int64_t head, int64_t slot) {
  return reinterpret_cast<float*>(region<int8_t>(cache, heads, block_size, block, head) + block_size * heads.dim) + slot;
}

#if defined(PK_AVX512)
PK_INLINE v16 load(const int8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))}; }
#elif defined(PK_AVX2)
PK_INLINE v16 load(const int8_t* p) {
  __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
#else
PK_INLINE v16 load(const int8_t* p) {
  float f[16];
  for (int i = 0; i < 16; ++i) f[i] = static_cast<float>(p[i]);
  return load(f);
}
#endif
PK_INLINE v16 load_n(const int8_t* p, int n) {
  int8_t full[16] = {};
  memcpy(full, p, static_cast<size_t>(n));
  return load(full);
}

// x [dim] as elements y [dim rounded up to 16]. layer_scale: of e4m3. own: where int8_t leaves its scale; NaN or infinity
// in x makes it NaN, so that it stays visible.
PK_INLINE void narrow(e4m3* y, const float* x, int64_t dim, const float* layer_scale, float*) {
  for (int64_t d = 0; d < dim; d += 16) {
    v16 part = dim - d < 16 ? load_n(x + d, static_cast<int>(dim - d)) : load(x + d);
    store_e4m3(y + d, div(part, set1(*layer_scale)));
  }
}
PK_INLINE void narrow(int8_t* y, const float* x, int64_t dim, const float*, float* own) {
  alignas(64) float row[MAX_DIM] = {};
  memcpy(row, x, static_cast<size_t>(dim) * sizeof(float));
  v16 highest = zero(), trouble = zero();
  for (int64_t d = 0; d < dim; d += 16) {
    v16 part = load(row + d);
    highest = max(highest, max(part, sub(zero(), part)));
    trouble = fma(part, zero(), trouble);
  }
  float peak = maximum(highest);
  v16 inverse = set1(peak >= SMALLEST_PEAK ? 127.0f / peak : 0.0f);
  for (int64_t d = 0; d < dim; d += 16) store_int8(y + d, round_nearest(mul(load(row + d), inverse)));
  *own = peak * (1.0f / 127.0f) + sum(trouble);
}

// Writes the key and the value [dim] of one position and head.
template <class C>
PK_INLINE void cache_write(uint8_t* k_cache, uint8_t* v_cache, const Heads& heads, int64_t block_size, int64_t block, int64_t head, int64_t slot,
                           const float* key, const float* value, const float* k_scale, const float* v_scale) {
  C* kt = k_tile<C>(k_cache, heads, block_size, block, head, slot) + slot % 16;
  C* vr = v_row<C>(v_cache, heads, block_size, block, head, slot);
  if constexpr (sizeof(C) > 1) {
    for (int64_t d = 0; d < heads.dim; ++d) {
      kt[d * 16] = from_float<C>(key[d]);
      vr[d] = from_float<C>(value[d]);
    }
  } else {
    C narrowed[MAX_DIM];
    float *k_own = nullptr, *v_own = nullptr;
    if constexpr (OWN_SCALES<C>) {
      k_own = own_scales(k_cache, heads, block_size, block, head, slot);
      v_own = own_scales(v_cache, heads, block_size, block, head, slot);
    }
    narrow(narrowed, key, heads.dim, k_scale, k_own);
    for (int64_t d = 0; d < heads.dim; ++d) kt[d * 16] = narrowed[d];
    narrow(narrowed, value, heads.dim, v_scale, v_own);
    memcpy(vr, narrowed, static_cast<size_t>(heads.dim));
  }
}
