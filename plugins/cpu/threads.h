// The thread pool (one per process, created by the first plan and lent to the others) and the sharing of work in a step.
// Work is taken, not assigned: whoever is running takes the next piece, so a thread that the system has put aside delays
// only the piece it holds. Waiting threads poll `spin` times and then park on a futex, which frees their core.
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

  // Returns when somebody has changed the value from `old` and called wake, or earlier.
  void wait_while(int32_t old, int32_t spin) {
    for (int32_t i = 0; i < spin; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      cpu_relax();
    }
    parked.fetch_add(1);
    if (value.load() == old)
      syscall(SYS_futex, reinterpret_cast<int32_t*>(&value), FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
    parked.fetch_sub(1);
  }
  void wait_until(int32_t wanted, int32_t spin) {
    for (int32_t now; (now = value.load()) != wanted;) wait_while(now, spin);
  }
  void wake() {
    if (parked.load()) syscall(SYS_futex, reinterpret_cast<int32_t*>(&value), FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0);
  }
};

struct Pool {
  pk_pool base;
  Signal generation;                       // counts tasks; a change calls the workers
  Signal inside;                           // workers that may be touching the task
  alignas(64) std::atomic<int32_t> open{0};  // generation of the task that may still be joined, 0 when none may
  std::atomic<bool> leaving{false};
  void (*task)(void*, int32_t) = nullptr;
  void* arg = nullptr;
  pthread_t* workers = nullptr;            // [base.threads - 1]
};
struct Worker { Pool* pool; int32_t thread; };

static void* pool_worker(void* p) {
  Worker w = *static_cast<Worker*>(p);
  Pool* pool = w.pool;
  free(p);
  for (int32_t seen = 0;;) {
    while (pool->generation.value.load() == seen) pool->generation.wait_while(seen, pool->base.spin);
    seen = pool->generation.value.load();
    if (pool->leaving.load()) return nullptr;
    pool->inside.value.fetch_add(1);
    if (pool->open.load() == seen) pool->task(pool->arg, w.thread);  // else it was done without this thread
    if (pool->inside.value.fetch_sub(1) == 1) pool->inside.wake();
  }
}

static void pool_call(Pool* pool) {
  pool->generation.value.fetch_add(1);
  pool->generation.wake();
}

// The caller takes part as thread 0 and does not wait for workers that never came.
static void pool_run(pk_pool* base, void (*task)(void*, int32_t), void* arg) {
  Pool* pool = reinterpret_cast<Pool*>(base);
  pool->task = task;
  pool->arg = arg;
  if (pool->generation.value.load() == -1) pool->generation.value.store(0);  // 0 means closed
  pool->open.store(pool->generation.value.load() + 1);
  if (base->threads > 1) pool_call(pool);
  task(arg, 0);
  pool->open.store(0);
  pool->inside.wait_until(0, base->spin);
}

static void pool_destroy(pk_pool* base) {
  Pool* pool = reinterpret_cast<Pool*>(base);
  pool->leaving.store(true);
  pool_call(pool);
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

// One kernel call's work: pieces handed out and pieces done.
struct Phase {
  alignas(64) std::atomic<int32_t> next{0};
  Signal done;
};
// One thread's way through a step: every thread meets the same kernel calls in the same order, one phase each.
struct Thread {
  int32_t count, spin;
  Phase* phase;
};

// f(begin, end) on ranges that cover 0 … n, some four a thread, each but the last a multiple of `unit`; returns when all
// are done. What one thread wrote in a phase, every thread sees in the next.
template <class F> static inline void parallel(Thread& t, int64_t n, int64_t unit, F f) {
  if (n == 0) return;
  if (t.count == 1) return f(int64_t{0}, n);
  int64_t size = (n + 4 * t.count - 1) / (4 * t.count);
  size = (size + unit - 1) / unit * unit;
  int32_t pieces = static_cast<int32_t>((n + size - 1) / size);
  Phase& phase = *t.phase++;
  while (phase.next.load(std::memory_order_relaxed) < pieces) {
    int64_t piece = phase.next.fetch_add(1);
    if (piece >= pieces) break;
    f(piece * size, piece * size + size < n ? piece * size + size : n);
    if (phase.done.value.fetch_add(1) + 1 == pieces) phase.done.wake();
  }
  phase.done.wait_until(pieces, t.spin);
}

// f(i) for i in 0 … n.
template <class F> static inline void each(Thread& t, int64_t n, F f) {
  parallel(t, n, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}
