// What a generated plan includes, and what it exports besides its model function.
#pragma once
#include "abi.h"
#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "quantized.h"
#include "simd.h"
#include "threads.h"

// The activation that starts `offset` bytes per token into the arena.
template <class T> PK_INLINE T* activation(const pk_step& s, int64_t offset) { return reinterpret_cast<T*>(s.arena + offset * s.max_tokens); }

// Runs `model` on every thread of the pool; it makes at most PHASES kernel calls.
typedef void (*Model)(Thread&, const pk_step&);
template <int PHASES> struct StepTask {
  Model model;
  const pk_step* step;
  int32_t threads, spin;
  Phase phases[PHASES];

  static void on_thread(void* arg, int32_t) {
    StepTask* task = static_cast<StepTask*>(arg);
    Thread t{task->threads, task->spin, task->phases};
    task->model(t, *task->step);
  }
};
template <int PHASES> static inline void run_step(pk_pool* pool, const pk_step* step, Model model) {
  StepTask<PHASES> task{model, step, pool->threads, pool->spin, {}};
  pool->run(pool, StepTask<PHASES>::on_thread, &task);
}

PLANKILN_EXPORT pk_pool* pk_pool_create(int32_t threads, int32_t spin) { return pool_create(threads, spin); }
PLANKILN_EXPORT void pk_pool_destroy(pk_pool* pool) { pool_destroy(pool); }
