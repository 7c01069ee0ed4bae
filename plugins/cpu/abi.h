// The C interface between a compiled plan (plan.so) and the process that loads it.
// Plain C types only; every pointer has its shape beside it. Bump PLANKILN_ABI on any change of meaning or layout.
#pragma once
#include <cstdint>

#define PLANKILN_ABI 2
#define PLANKILN_EXPORT extern "C" __attribute__((visibility("default")))

// The process's one thread pool. Whoever creates it fills these fields, so a plan built elsewhere can use it.
struct pk_pool {
  int32_t abi;
  int32_t threads;
  int32_t spin;                                                        // polls before a waiting thread parks
  void (*run)(pk_pool*, void (*task)(void* arg, int32_t thread), void* arg);  // task on every thread, then return
};

struct pk_info {
  int32_t abi;
  int32_t layers;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t kv_row_bytes;          // of one token's keys, or values, in one head, with their scale
  int32_t vocab;
  int32_t max_context;           // rows of the RoPE tables
  int64_t arena_bytes_per_token;
  int64_t weight_bytes;
};

struct pk_step {
  const uint8_t* weights;        // [info.weight_bytes], 64-byte aligned
  uint8_t* arena;                // [info.arena_bytes_per_token * max_tokens], 64-byte aligned
  int64_t max_tokens;
  int32_t tokens;                // T
  int32_t sequences;             // S
  int32_t blocks_per_sequence;   // B
  int32_t wanted;                // R
  int32_t block_size;            // multiple of 16
  const int32_t* input_ids;      // [T]
  const int32_t* positions;      // [T]
  const int32_t* seq_starts;     // [S+1]
  const int32_t* context_lens;   // [S]
  const int32_t* block_table;    // [S, B]
  const int32_t* logit_rows;     // [R]
  uint8_t* const* k_cache;       // [layers] of [kv_blocks, kv_heads, block_size * info.kv_row_bytes]: see kv_cache.h
  uint8_t* const* v_cache;       // as k_cache
  float* logits;                 // [R, vocab]
};

// Exported by every plan:
//   const pk_info* pk_plan_info(void);
//   void pk_run(pk_pool*, const pk_step*);
//   pk_pool* pk_pool_create(int32_t threads, int32_t spin);   // null when threads cannot be started
//   void pk_pool_destroy(pk_pool*);
