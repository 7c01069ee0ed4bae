// y[M, N] = x[M, K] · W for weights packed in tiles of 16 outputs:
//   float W: [ceil(N/16)][K][16];   bf16 W: [ceil(N/16)][ceil(K/2)][16][2], x already rounded to bf16;
//   e4m3 W: [ceil(N/16)][K][16], then a float scale for each output; x floats.
// Every output is one chain of fused multiply-adds over ascending K in one lane, whatever M, the tile sizes
// or the threads: a row's bits do not depend on the batch it is in.
#pragma once
#include "e4m3.h"
#include "simd.h"
#include "threads.h"

template <class W> struct Packed;
template <> struct Packed<float> {
  using X = float;
  static constexpr int64_t pair = 1;
  static inline __attribute__((always_inline)) v16 step(v16 acc, const float* w, const float* x) { return fma(load(w), set1(*x), acc); }
};
template <> struct Packed<e4m3> {
  using X = float;
  static constexpr int64_t pair = 1;
  static inline __attribute__((always_inline)) v16 step(v16 acc, const e4m3* w, const float* x) { return fma(load(w), set1(*x), acc); }
};
template <> struct Packed<bf16> {
  using X = bf16;
  static constexpr int64_t pair = 2;
#if defined(PK_AVX512) && defined(__AVX512BF16__)
  static inline __attribute__((always_inline)) v16 step(v16 acc, const bf16* w, const bf16* x) {
    int32_t both;
    memcpy(&both, x, 4);
    return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(_mm512_loadu_si512(w)), reinterpret_cast<__m512bh>(_mm512_set1_epi32(both)))};
  }
#else
  static inline __attribute__((always_inline)) v16 step(v16 acc, const bf16* w, const bf16* x) {
    return fma(odd(w), set1(to_float(x[1])), fma(even(w), set1(to_float(x[0])), acc));
  }
#endif
};

// ROWS × TILES·16 outputs held in registers over the whole of K. x rows are ldx elements apart, y rows ldy floats.
// scales: null, or a factor for each output.
template <class W, int ROWS, int TILES>
static void linear_block(float* y, int64_t ldy, const typename Packed<W>::X* x, int64_t ldx, const W* w, const float* scales, int64_t tile_stride, int64_t steps, int last_lanes) {
  constexpr int64_t pair = Packed<W>::pair;
  v16 acc[ROWS][TILES];
  for (int m = 0; m < ROWS; ++m)
    for (int n = 0; n < TILES; ++n) acc[m][n] = zero();
  for (int64_t k = 0; k < steps; ++k)
#pragma GCC unroll 8
    for (int n = 0; n < TILES; ++n)
#pragma GCC unroll 8
      for (int m = 0; m < ROWS; ++m)
        acc[m][n] = Packed<W>::step(acc[m][n], w + n * tile_stride + k * 16 * pair, x + m * ldx + k * pair);
  if (scales)
    for (int m = 0; m < ROWS; ++m)
      for (int n = 0; n < TILES; ++n) acc[m][n] = mul(acc[m][n], load(scales + 16 * n));
  for (int m = 0; m < ROWS; ++m)
    for (int n = 0; n < TILES; ++n) {
      float* out = y + m * ldy + n * 16;
      if (n + 1 < TILES || last_lanes == 16) store(out, acc[m][n]);
      else store_n(out, acc[m][n], last_lanes);
    }
}

template <class W, int TILES>
static void linear_rows(float* y, int64_t ldy, const typename Packed<W>::X* x, int64_t ldx, const W* w, const float* scales, int64_t tile_stride, int64_t steps, int last_lanes, int64_t rows) {
#if defined(PK_AVX512)
  constexpr int MOST = 6;
#else
  constexpr int MOST = TILES == 1 ? 6 : 2;
#endif
  for (; rows >= MOST; rows -= MOST, y += MOST * ldy, x += MOST * ldx)
    linear_block<W, MOST, TILES>(y, ldy, x, ldx, w, scales, tile_stride, steps, last_lanes);
  if constexpr (MOST > 2) {
    if (rows >= 4) {
      linear_block<W, 4, TILES>(y, ldy, x, ldx, w, scales, tile_stride, steps, last_lanes);
      rows -= 4, y += 4 * ldy, x += 4 * ldx;
    }
    if (rows >= 2) {
      linear_block<W, 2, TILES>(y, ldy, x, ldx, w, scales, tile_stride, steps, last_lanes);
      rows -= 2, y += 2 * ldy, x += 2 * ldx;
    }
  }
  if (rows) linear_block<W, 1, TILES>(y, ldy, x, ldx, w, scales, tile_stride, steps, last_lanes);
}

template <class W>
static void linear(Thread& t, float* y, int64_t ldy, const typename Packed<W>::X* x, const uint8_t* packed, int64_t M, int64_t N, int64_t K) {
  constexpr int64_t pair = Packed<W>::pair;
  int64_t steps = (K + pair - 1) / pair, tile_stride = steps * 16 * pair, ldx = steps * pair, tiles = (N + 15) / 16;
#if defined(PK_AVX512)
  constexpr int WIDE = 4;
  bool wide = true;
#else
  constexpr int WIDE = 2;
  bool wide = M <= 2;
#endif
  const W* w = reinterpret_cast<const W*>(packed);
  const float* scales = sizeof(W) == 1 ? reinterpret_cast<const float*>(packed + tiles * tile_stride) : nullptr;
  parallel(t, M ? tiles : 0, WIDE, [&](int64_t n, int64_t end) {
    while (n < end) {
      const W* tile = w + n * tile_stride;
      const float* scale = scales ? scales + n * 16 : nullptr;
      float* out = y + n * 16;
      if (wide && end - n >= WIDE && (n + WIDE) * 16 <= N) {
        linear_rows<W, WIDE>(out, ldy, x, ldx, tile, scale, tile_stride, steps, 16, M);
        n += WIDE;
      } else {
        linear_rows<W, 1>(out, ldy, x, ldx, tile, scale, tile_stride, steps, static_cast<int>(N - n * 16 < 16 ? N - n * 16 : 16), M);
        n += 1;
      }
    }
  });
}
