// The thread pool (one per process, created by the first plan and lent to the others) and the barrier inside a step.
// Waiting threads poll `spin` times and then park on a futex; with spin = 0 (oversubscribed) they park at once.
#pragma once
#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <new>

#include "abi.h"

static inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// A counter that threads wait on. The wake-up system call is made only when somebody has parked.
struct Signal {
  alignas(64) std::atomic<int32_t> value{0};
  std::atomic<int32_t> parked{0};

  void wait_while(int32_t old, int32_t spin) {
    for (int32_t i = 0; i < spin; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      cpu_relax();
    }
    parked.fetch_add(1);
    while (value.load() == old)
      syscall(SYS_futex, reinterpret_cast<int32_t*>(&value), FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
    parked.fetch_sub(1);
  }
  void wake() {
    if (parked.load()) syscall(SYS_futex, reinterpret_cast<int32_t*>(&value), FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0);
  }
  int32_t add(int32_t n) {
    int32_t before = value.fetch_add(n);
    wake();
    return before;
  }
};

struct Pool {
  pk_pool base;
  Signal generation;  // bumped once a task
  Signal running;     // workers still busy with it
  void (*task)(void*, int32_t) = nullptr;  // null tells the workers to leave
  void* arg = nullptr;
  pthread_t* workers = nullptr;  // [base.threads - 1]
};
struct Worker { Pool* pool; int32_t thread; };

static void* pool_worker(void* p) {
  Worker w = *static_cast<Worker*>(p);
  free(p);
  for (int32_t seen = 0;;) {
    w.pool->generation.wait_while(seen, w.pool->base.spin);
    seen = w.pool->generation.value.load();
    if (!w.pool->task) return nullptr;
    w.pool->task(w.pool->arg, w.thread);
    w.pool->running.add(-1);
  }
}

static void pool_publish(Pool* pool, void (*task)(void*, int32_t), void* arg) {
  pool->task = task;
  pool->arg = arg;
  pool->generation.add(1);
}

static void pool_run(pk_pool* base, void (*task)(void*, int32_t), void* arg) {
  Pool* pool = reinterpret_cast<Pool*>(base);
  if (base->threads == 1) return task(arg, 0);
  pool->running.value.store(base->threads - 1);
  pool_publish(pool, task, arg);
  task(arg, 0);
  for (int32_t left; (left = pool->running.value.load()) != 0;) pool->running.wait_while(left, base->spin);
}

static void pool_destroy(pk_pool* base) {
  Pool* pool = reinterpret_cast<Pool*>(base);
  pool_publish(pool, nullptr, nullptr);
  for (int32_t i = 0; i + 1 < base->threads; ++i) pthread_join(pool->workers[i], nullptr);
  free(pool->workers);
  pool->~Pool();
  free(pool);
}

static pk_pool* pool_create(int32_t threads, int32_t spin) {
  void* memory = aligned_alloc(64, sizeof(Pool));
  if (!memory) return nullptr;
  Pool* pool = new (memory) Pool();
  pool->base = {PLANKILN_ABI, 1, spin, pool_run};
  pool->workers = static_cast<pthread_t*>(calloc(static_cast<size_t>(threads), sizeof(pthread_t)));
  for (int32_t i = 1; pool->workers && i < threads; ++i) {
    Worker* w = static_cast<Worker*>(malloc(sizeof(Worker)));
    if (w) *w = {pool, i};
    if (!w || pthread_create(&pool->workers[i - 1], nullptr, pool_worker, w)) {
      free(w);
      break;
    }
    pool->base.threads = i + 1;
  }
  if (pool->base.threads == threads) return &pool->base;
  pool_destroy(&pool->base);
  return nullptr;
}

// One step's view of a thread: who it is, and the barrier it shares with the others.
struct Barrier {
  alignas(64) std::atomic<int32_t> arrived{0};
  Signal phase;
};
struct Thread {
  int32_t id, count, spin;
  Barrier* shared;
};

static inline void barrier(const Thread& t) {
  if (t.count == 1) return;
  int32_t phase = t.shared->phase.value.load();
  if (t.shared->arrived.fetch_add(1) + 1 == t.count) {
    t.shared->arrived.store(0);
    t.shared->phase.add(1);
  } else {
    t.shared->phase.wait_while(phase, t.spin);
  }
}

// This thread's share [begin, end) of n items, contiguous and even.
struct Range { int64_t begin, end; };
static inline Range share(const Thread& t, int64_t n) { return {n * t.id / t.count, n * (t.id + 1) / t.count}; }
