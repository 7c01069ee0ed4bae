// Paged attention over one ragged batch of prefill chunks and decodes.
// The cache's layout and elements, C, are in kv_cache.h.
// Each query row walks the cache in tiles of 64 positions counted from position 0 with an online softmax (Milakov and
// Gimelshein 2018), so its bits depend neither on the batch, the chunking, the block size nor the threads (as long as values are finite:
// rows that walk together multiply each other's later values by zero).
#pragma once
#include "abi.h"
#include "elementwise.h"
#include "kv_cache.h"

// x [dim] rotated in place by cos, sin [dim/2] (half-split pairs), then scaled.
PK_INLINE void rotate(float* x, const float* cos, const float* sin, int64_t dim, float scale) {
  int64_t half = dim / 2;
  for (int64_t d = 0; d < half; ++d) {
    float a = x[d], b = x[d + half];
    x[d] = (a * cos[d] - b * sin[d]) * scale;
    x[d + half] = (b * cos[d] + a * sin[d]) * scale;
  }
}

// Rotates and scales the queries in place, rotates the keys, and writes keys and values to their cache slots.
// q, k, v: columns of rows that are ld floats apart; cos_cache, sin_cache [max_context][dim/2].
// k_scale, v_scale: the layer's, a float each, of an e4m3 cache; the queries take the keys' on.
template <class C>
static void rope_and_cache(Thread& t, const pk_step& s, int layer, float* q, float* k, const float* v, int64_t ld,
                           const uint8_t* cos_cache, const uint8_t* sin_cache, const Heads& heads, float scale,
                           const uint8_t* k_scale = nullptr, const uint8_t* v_scale = nullptr) {
  const float *ks = reinterpret_cast<const float*>(k_scale), *vs = reinterpret_cast<const float*>(v_scale);
  int64_t half = heads.dim / 2;
  if (ks) scale *= *ks;
  parallel(t, s.tokens, 1, [&](int64_t m, int64_t end) {
    int64_t sequence = 0;
    for (; m < end; ++m) {
      while (m >= s.seq_starts[sequence + 1]) ++sequence;
      const float* cos = reinterpret_cast<const float*>(cos_cache) + s.positions[m] * half;
      const float* sin = reinterpret_cast<const float*>(sin_cache) + s.positions[m] * half;
      for (int64_t h = 0; h < heads.query; ++h) rotate(q + m * ld + h * heads.dim, cos, sin, heads.dim, scale);
      int64_t place = s.context_lens[sequence] + m - s.seq_starts[sequence], slot = place % s.block_size;
      int64_t block = s.block_table[sequence * s.blocks_per_sequence + place / s.block_size];
      for (int64_t h = 0; h < heads.kv; ++h) {
        float* key = k + m * ld + h * heads.dim;
        rotate(key, cos, sin, heads.dim, 1.0f);
        cache_write<C>(s.k_cache[layer], s.v_cache[layer], heads, s.block_size, block, h, slot, key, v + m * ld + h * heads.dim, ks, vs);
      }
    }
  });
}

constexpr int TILE = 64;  // cache positions a softmax step covers
constexpr int ROWS = 8;   // query rows (tokens × heads of one kv head) that share a walk over the cache

struct Rows {
  int count;
  const float* q[ROWS];            // [dim] each, rotated and scaled
  int64_t first[ROWS], last[ROWS];  // cache positions seen, inclusive
  float peak[ROWS], total[ROWS];
  alignas(64) float scores[ROWS][TILE];
  alignas(64) float acc[ROWS][MAX_DIM];
};

// scores[r][j] = q[r] · k[j] for TILES K tiles of sixteen positions, from `column` on
template <class C, int R, int TILES>
static void tile_scores(Rows& rows, const C* const* k, int64_t dim, int column) {
  v16 acc[TILES][R];
  for (int i = 0; i < TILES; ++i)
    for (int r = 0; r < R; ++r) acc[i][r] = zero();
  for (int64_t d = 0; d < dim; ++d)
#pragma GCC unroll 4
    for (int i = 0; i < TILES; ++i) {
      v16 key = load(k[i] + d * 16);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[i][r] = fma(key, set1(rows.q[r][d]), acc[i][r]);
    }
  for (int i = 0; i < TILES; ++i)
    for (int r = 0; r < R; ++r) store(rows.scores[r] + column + 16 * i, acc[i][r]);
}

// acc[r] += Σ_j scores[r][j] · v[j] for columns from … to of the tile
template <class C, int R, int WIDE>
static void tile_values_at(Rows& rows, const C* const* v, int64_t dim, int64_t d, int lanes, int from, int to) {
  v16 acc[R][WIDE];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < WIDE; ++i) acc[r][i] = load(rows.acc[r] + d + 16 * i);
  for (int j = from; j < to; ++j) {
    const C* row = v[j / 16] + j % 16 * dim + d;
    v16 value[WIDE];
    for (int i = 0; i < WIDE; ++i) value[i] = lanes == 16 ? load(row + 16 * i) : load_n(row + 16 * i, lanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      v16 weight = set1(rows.scores[r][j]);
#pragma GCC unroll 4
      for (int i = 0; i < WIDE; ++i) acc[r][i] = fma(weight, value[i], acc[r][i]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < WIDE; ++i) store(rows.acc[r] + d + 16 * i, acc[r][i]);
}
template <class C, int R>
static void tile_values(Rows& rows, const C* const* v, int64_t dim, int from, int to) {
  constexpr int WIDE = R <= 4 ? 4 : 2;
  int64_t d = 0;
  for (; d + 16 * WIDE <= dim; d += 16 * WIDE) tile_values_at<C, R, WIDE>(rows, v, dim, d, 16, from, to);
  for (; d < dim; d += 16) tile_values_at<C, R, 1>(rows, v, dim, d, dim - d < 16 ? static_cast<int>(dim - d) : 16, from, to);
}

// One softmax step: scores become weights relative to the running peak; acc and total are rescaled when it rises.
PK_INLINE void softmax_tile(Rows& rows, int r, int64_t start, int64_t dim) {
  constexpr int VECTORS = TILE / 16;
  v16 masked[VECTORS], highest = set1(-INFINITY);
  for (int i = 0; i < VECTORS; ++i) {
    int64_t lo = rows.first[r] - start - 16 * i, hi = rows.last[r] + 1 - start - 16 * i;
    masked[i] = keep_range(load(rows.scores[r] + 16 * i), static_cast<int>(lo < 0 ? 0 : lo > 16 ? 16 : lo),
                           static_cast<int>(hi < 0 ? 0 : hi > 16 ? 16 : hi), set1(-INFINITY));
    highest = max(highest, masked[i]);
  }
  float peak = maximum(highest);
  if (rows.last[r] < start || rows.first[r] >= start + TILE) {
    for (int i = 0; i < VECTORS; ++i) store(rows.scores[r] + 16 * i, zero());
    return;
  }
  if (peak > rows.peak[r]) {
    v16 shrink = exp(set1(rows.peak[r] - peak));
    for (int64_t d = 0; d < dim; d += 16) store(rows.acc[r] + d, mul(load(rows.acc[r] + d), shrink));
    float first_lane[16];
    store(first_lane, shrink);
    rows.total[r] *= first_lane[0];
    rows.peak[r] = peak;
  }
  v16 total = zero();
  for (int i = 0; i < VECTORS; ++i) {
    v16 weight = exp(sub(masked[i], set1(rows.peak[r])));
    store(rows.scores[r] + 16 * i, weight);
    total = add(total, weight);
  }
  rows.total[r] += sum(total);
}

// scores[r][j] ·= the scale of position j, for columns from … to of the tile
template <int R> PK_INLINE void scale_tile(Rows& rows, const float* const* scales, int from, int to) {
  for (int column = from / 16 * 16; column < to; column += 16) {
    v16 scale = load(scales[column / 16]);
    for (int r = 0; r < R; ++r) store(rows.scores[r] + column, mul(load(rows.scores[r] + column), scale));
  }
}

// Asks for the keys and values of the tile that starts at `start`: blocks lie anywhere, which no hardware foresees.
// Worth it for few rows, where reading the cache is most of the work.
template <class C>
PK_INLINE void prefetch_tile(const pk_step& s, const uint8_t* k_cache, const uint8_t* v_cache, const int32_t* table, int64_t kv_head, const Heads& heads,
                             int64_t start, int64_t last) {
  const int64_t bytes = heads.dim * 16 * static_cast<int64_t>(sizeof(C));
  for (int64_t place = start; place <= last && place < start + TILE; place += 16) {
    int64_t block = table[place / s.block_size], slot = place % s.block_size;
    const char* k = reinterpret_cast<const char*>(k_tile<C>(const_cast<uint8_t*>(k_cache), heads, s.block_size, block, kv_head, slot));
    const char* v = reinterpret_cast<const char*>(v_row<C>(const_cast<uint8_t*>(v_cache), heads, s.block_size, block, kv_head, slot));
    for (int64_t i = 0; i < bytes; i += 64) {
      __builtin_prefetch(k + i);
      __builtin_prefetch(v + i);
    }
    if constexpr (OWN_SCALES<C>) {
      __builtin_prefetch(own_scales(const_cast<uint8_t*>(k_cache), heads, s.block_size, block, kv_head, slot));
      __builtin_prefetch(own_scales(const_cast<uint8_t*>(v_cache), heads, s.block_size, block, kv_head, slot));
    }
  }
}

template <class C, int R>
static void walk_cache(Rows& rows, const pk_step& s, const uint8_t* k_cache, const uint8_t* v_cache, const int32_t* table, int64_t kv_head, const Heads& heads) {
  int64_t first = rows.first[0], last = rows.last[0];
  for (int r = 0; r < R; ++r) {
    first = rows.first[r] < first ? rows.first[r] : first;
    last = rows.last[r] > last ? rows.last[r] : last;
    rows.peak[r] = -INFINITY;
    rows.total[r] = 0.0f;
    memset(rows.acc[r], 0, sizeof rows.acc[r]);
    memset(rows.scores[r], 0, sizeof rows.scores[r]);
  }
  for (int64_t start = first / TILE * TILE; start <= last; start += TILE) {
    int from = static_cast<int>(first > start ? first - start : 0), to = static_cast<int>(last + 1 - start < TILE ? last + 1 - start : TILE);
    if (R <= 4 && start + TILE <= last) prefetch_tile<C>(s, k_cache, v_cache, table, kv_head, heads, start + TILE, last);
    const C *keys[TILE / 16], *values[TILE / 16];
    [[maybe_unused]] const float *k_scales[TILE / 16], *v_scales[TILE / 16];
    for (int column = from / 16 * 16; column < to; column += 16) {
      int64_t block = table[(start + column) / s.block_size], slot = (start + column) % s.block_size;
      keys[column / 16] = k_tile<C>(const_cast<uint8_t*>(k_cache), heads, s.block_size, block, kv_head, slot);
      values[column / 16] = v_row<C>(const_cast<uint8_t*>(v_cache), heads, s.block_size, block, kv_head, slot);
      if constexpr (OWN_SCALES<C>) {
        k_scales[column / 16] = own_scales(const_cast<uint8_t*>(k_cache), heads, s.block_size, block, kv_head, slot);
        v_scales[column / 16] = own_scales(const_cast<uint8_t*>(v_cache), heads, s.block_size, block, kv_head, slot);
      }
    }
    constexpr int AT_ONCE = R <= 4 ? 4 : 2;  // enough chains of multiply-adds to fill their latency
    int column = from / 16 * 16;
    for (; column + 16 * AT_ONCE <= to; column += 16 * AT_ONCE) tile_scores<C, R, AT_ONCE>(rows, keys + column / 16, heads.dim, column);
    for (; column < to; column += 16) tile_scores<C, R, 1>(rows, keys + column / 16, heads.dim, column);
    if constexpr (OWN_SCALES<C>) scale_tile<R>(rows, k_scales, from, to);
    for (int r = 0; r < R; ++r) softmax_tile(rows, r, start, heads.dim);
    if constexpr (OWN_SCALES<C>) scale_tile<R>(rows, v_scales, from, to);
    tile_values<C, R>(rows, values, heads.dim, from, to);
  }
}

// Attention of up to ROWS query rows: tokens m … end of a sequence, heads from … to of one key/value head.
template <class C, class Y>
static void attention_rows(const pk_step& s, int layer, Y* y, const float* q, int64_t ld, const Heads& heads, int64_t window,
                           int64_t sequence, int64_t kv_head, int64_t m, int64_t end, int64_t from, int64_t to, const float* v_scale) {
  Rows rows;
  rows.count = 0;
  rows.first[0] = rows.last[0] = 0;
  Y* out[ROWS];
  for (; m < end; ++m)
    for (int64_t h = from; h < to; ++h) {
      int r = rows.count++;
      int64_t place = s.context_lens[sequence] + m - s.seq_starts[sequence];
      rows.q[r] = q + m * ld + h * heads.dim;
      rows.last[r] = place;
      rows.first[r] = window >= 0 && place >= window ? place - window + 1 : 0;
      out[r] = y + (m * heads.query + h) * heads.dim;
    }
  const uint8_t *k_cache = s.k_cache[layer], *v_cache = s.v_cache[layer];
  const int32_t* table = s.block_table + sequence * s.blocks_per_sequence;
  switch (rows.count) {
    case 1: walk_cache<C, 1>(rows, s, k_cache, v_cache, table, kv_head, heads); break;
    case 2: walk_cache<C, 2>(rows, s, k_cache, v_cache, table, kv_head, heads); break;
    case 3: walk_cache<C, 3>(rows, s, k_cache, v_cache, table, kv_head, heads); break;
    case 4: walk_cache<C, 4>(rows, s, k_cache, v_cache, table, kv_head, heads); break;
    case 5: walk_cache<C, 5>(rows, s, k_cache, v_cache, table, kv_head, heads); break;
    case 6: walk_cache<C, 6>(rows, s, k_cache, v_cache, table, kv_head, heads); break;
    case 7: walk_cache<C, 7>(rows, s, k_cache, v_cache, table, kv_head, heads); break;
    default: walk_cache<C, 8>(rows, s, k_cache, v_cache, table, kv_head, heads);
  }
  for (int r = 0; r < rows.count; ++r) {
    v16 total = set1(rows.total[r]);
    for (int64_t d = 0; d < heads.dim; d += 16) {
      v16 mean = div(load(rows.acc[r] + d), total);
      if (v_scale) mean = mul(mean, set1(*v_scale));
      store_some(out[r] + d, mean, heads.dim - d < 16 ? static_cast<int>(heads.dim - d) : 16);
    }
  }
}

// y [tokens, heads.query * dim]; q as rope_and_cache left it; window < 0 sees everything before, else the last `window` positions.
// v_scale: of the layer's values in an e4m3 cache, a float. One unit of work: some tokens of a sequence and the query heads (at most ROWS rows) that share a key/value head.
template <class C, class Y>
static void attention(Thread& t, const pk_step& s, int layer, Y* y, const float* q, int64_t ld, const Heads& heads, int64_t window,
                      const uint8_t* v_scale = nullptr) {
  int64_t group = heads.query / heads.kv, part = group < ROWS ? group : ROWS, tokens = ROWS / part;
  int64_t parts = (group + part - 1) / part, units = 0;
  for (int64_t sequence = 0; sequence < s.sequences; ++sequence)
    units += (s.seq_starts[sequence + 1] - s.seq_starts[sequence] + tokens - 1) / tokens;
  parallel(t, units * heads.kv * parts, 1, [&](int64_t item, int64_t end) {
    int64_t sequence = 0, before = 0;  // units of the sequences before this one
    for (; item < end; ++item) {
      int64_t unit = item / (heads.kv * parts), rest = item % (heads.kv * parts);
      for (;; ++sequence) {
        int64_t own = (s.seq_starts[sequence + 1] - s.seq_starts[sequence] + tokens - 1) / tokens;
        if (unit < before + own) break;
        before += own;
      }
      int64_t m = s.seq_starts[sequence] + (unit - before) * tokens, stop = s.seq_starts[sequence + 1];
      int64_t kv_head = rest / parts, from = kv_head * group + rest % parts * part;
      attention_rows<C>(s, layer, y, q, ld, heads, window, sequence, kv_head, m, m + tokens < stop ? m + tokens : stop, from,
                        from + part < (kv_head + 1) * group ? from + part : (kv_head + 1) * group, reinterpret_cast<const float*>(v_scale));
    }
  });
}
