// Row-wise kernels: embedding, norms, gated activation. Y is float, bf16 or Int8<G>; arithmetic is float.
// Threads take rows; each row's bits depend on that row alone.
#pragma once
#include "e4m3.h"
#include "int8_rows.h"
#include "simd.h"
#include "threads.h"

// y[m, :] = table[ids[m], :]. The table is a packed linear weight (see linear.h): row n is lane n%16 of tile n/16.
// pair = elements of K kept together in a lane (1 for float, 2 for bf16).
template <class W>
static void embed(Thread& t, float* y, const uint8_t* packed, const int32_t* ids, int64_t rows, int64_t width) {
  static_assert(sizeof(W) > 1, "rows with scales have kernels of their own");
  constexpr int64_t pair = 4 / sizeof(W);
  const W* table = reinterpret_cast<const W*>(packed);
  int64_t padded = (width + pair - 1) / pair * pair;
  each(t, rows, [&](int64_t m) {
    const W* tile = table + ids[m] / 16 * 16 * padded + ids[m] % 16 * pair;
    for (int64_t k = 0; k < width; ++k) y[m * width + k] = to_float(tile[k / pair * 16 * pair + k % pair]);
  });
}

// Elements from one row of a linear layer's input to the next: bf16 rows are padded to pairs, the pad is zero.
PK_INLINE int64_t row_stride(const float*, int64_t width) { return width; }
PK_INLINE int64_t row_stride(const bf16*, int64_t width) { return (width + 1) / 2 * 2; }
template <int G> PK_INLINE int64_t row_stride(const Int8<G>*, int64_t width) { return int8_stride<G>(width); }
PK_INLINE void zero_pad(float*, int64_t) {}
PK_INLINE void zero_pad(bf16* row, int64_t width) {
  if (width % 2) row[width] = to_bf16(0.0f);
}

// A row of floats for a kernel that rounds a whole row at its end. Not inlined into a loop, or the stack would grow.
#define PK_SCRATCH(name, width) float* name = static_cast<float*>(__builtin_alloca(static_cast<size_t>(width) * sizeof(float)))

// A row of `width`, sixteen lanes at a time; f(offset, lanes).
template <class F> PK_INLINE void lanes(int64_t width, F f) {
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) f(i, 16);
  if (i < width) f(i, static_cast<int>(width - i));
}
template <class T> PK_INLINE v16 load_some(const T* p, int n) { return n == 16 ? load(p) : load_n(p, n); }
template <class T> PK_INLINE void store_some(T* p, v16 a, int n) { n == 16 ? store(p, a) : store_n(p, a, n); }

// y = x / sqrt(mean(x²) + epsilon) * weight, one row. x [width], weight [width], y [width]
template <class Y>
PK_INLINE void norm_row(Y* y, const float* x, const float* weight, int64_t width, float epsilon) {
  v16 squares = zero();
  lanes(width, [&](int64_t i, int n) {
    v16 v = load_some(x + i, n);
    squares = fma(v, v, squares);
  });
  v16 scale = set1(1.0f / sqrtf(sum(squares) / static_cast<float>(width) + epsilon));
  lanes(width, [&](int64_t i, int n) { store_some(y + i, mul(mul(load_some(x + i, n), scale), load_some(weight + i, n)), n); });
  zero_pad(y, width);
}
template <int G>
static __attribute__((noinline)) void norm_row(Int8<G>* y, const float* x, const float* weight, int64_t width, float epsilon) {
  PK_SCRATCH(row, width);
  norm_row(row, x, weight, width, epsilon);
  quantize_row(y, row, width);
}

template <class Y>
static void rms_norm(Thread& t, Y* y, const float* x, const uint8_t* weight, int64_t rows, int64_t width, float epsilon) {
  each(t, rows, [&](int64_t m) {
    norm_row(y + m * row_stride(y, width), x + m * width, reinterpret_cast<const float*>(weight), width, epsilon);
  });
}

// residual += x; y = rms_norm(residual). x, residual, y [rows, width]
template <class Y>
static void add_rms_norm(Thread& t, Y* y, float* residual, const float* x, const uint8_t* weight, int64_t rows, int64_t width, float epsilon) {
  each(t, rows, [&](int64_t m) {
    float* h = residual + m * width;
    lanes(width, [&](int64_t i, int n) { store_some(h + i, add(load_some(h + i, n), load_some(x + m * width + i, n)), n); });
    norm_row(y + m * row_stride(y, width), h, reinterpret_cast<const float*>(weight), width, epsilon);
  });
}

// In place on each of `heads` heads of `dim` columns starting at x; rows are stride apart: query-key normalization.
static inline void head_norm(Thread& t, float* x, int64_t stride, const uint8_t* weight, int64_t rows, int64_t heads, int64_t dim, float epsilon) {
  each(t, rows, [&](int64_t m) {
    for (int64_t h = 0; h < heads; ++h) {
      float* head = x + m * stride + h * dim;
      norm_row(head, head, reinterpret_cast<const float*>(weight), dim, epsilon);
    }
  });
}

// y = silu(gate) * up, one row
template <class Y> PK_INLINE void silu_row(Y* y, const float* gate, const float* up, int64_t width) {
  lanes(width, [&](int64_t i, int n) {
    v16 g = load_some(gate + i, n);
    v16 sigmoid = div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), g))));
    store_some(y + i, mul(mul(g, sigmoid), load_some(up + i, n)), n);
  });
  zero_pad(y, width);
}
template <int G>
static __attribute__((noinline)) void silu_row(Int8<G>* y, const float* gate, const float* up, int64_t width) {
  PK_SCRATCH(row, width);
  silu_row(row, gate, up, width);
  quantize_row(y, row, width);
}

// gate_up [rows, 2*width] holds gate then up; y [rows, width]
template <class Y>
static void silu_mul(Thread& t, Y* y, const float* gate_up, int64_t rows, int64_t width) {
  each(t, rows, [&](int64_t m) {
    const float* gate = gate_up + m * 2 * width;
    silu_row(y + m * row_stride(y, width), gate, gate + width, width);
  });
}

// x[m, :] += bias. x rows are ldx floats apart; bias [width]
static inline void add_bias(Thread& t, float* x, int64_t ldx, const uint8_t* bias, int64_t rows, int64_t width) {
  const float* b = reinterpret_cast<const float*>(bias);
  each(t, rows, [&](int64_t m) {
    lanes(width, [&](int64_t i, int n) { store_some(x + m * ldx + i, add(load_some(x + m * ldx + i, n), load_some(b + i, n)), n); });
  });
}

// y = x·factors; x, y [rows, width], factors [width]
static inline void scale_rows(Thread& t, float* y, const float* x, const uint8_t* factors, int64_t rows, int64_t width) {
  const float* f = reinterpret_cast<const float*>(factors);
  each(t, rows, [&](int64_t m) {
    lanes(width, [&](int64_t i, int n) { store_some(y + m * width + i, mul(load_some(x + m * width + i, n), load_some(f + i, n)), n); });
  });
}

// y = x in bf16; x [rows, width]
static inline void narrow_rows(Thread& t, bf16* y, const float* x, int64_t rows, int64_t width) {
  each(t, rows, [&](int64_t m) {
    bf16* row = y + m * row_stride(y, width);
    lanes(width, [&](int64_t i, int n) { store_some(row + i, load_some(x + m * width + i, n), n); });
    zero_pad(row, width);
  });
}

// y = x·factors rounded to e4m3 in units of `scale` or, where that is null, of each row's max/448; back in floats.
// x, y [rows, width]; factors [width] floats or null (1); scale [1] float or null
static inline void round_e4m3_rows(Thread& t, float* y, const float* x, const uint8_t* factors, const uint8_t* scale, int64_t rows, int64_t width) {
  const float* f = reinterpret_cast<const float*>(factors);
  each(t, rows, [&](int64_t m) {
    float* row = y + m * width;
    v16 highest = zero();
    lanes(width, [&](int64_t i, int n) {
      v16 v = load_some(x + m * width + i, n);
      if (f) v = mul(v, load_some(f + i, n));
      store_some(row + i, v, n);
      if (!scale) highest = max(highest, max(v, sub(zero(), v)));
    });
    float unit = scale ? *reinterpret_cast<const float*>(scale) : maximum(highest) * (1.0f / 448.0f);
    v16 inverse = set1(unit >= SMALLEST_PEAK ? 1.0f / unit : 0.0f);
    lanes(width, [&](int64_t i, int n) {
      v16 v = load_some(row + i, n);
      v16 scaled = scale ? div(v, set1(unit)) : mul(v, inverse);
      store_some(row + i, mul(round_e4m3(scaled), set1(unit)), n);
    });
  });
}

// y[m, :] = x[rows[m], :], rows row_stride(x, width) apart
template <class T>
static void gather_rows(Thread& t, T* y, const T* x, const int32_t* rows, int64_t count, int64_t width) {
  int64_t stride = row_stride(x, width);
  each(t, count, [&](int64_t m) { memcpy(y + m * stride, x + rows[m] * stride, static_cast<size_t>(stride) * sizeof(T)); });
}
