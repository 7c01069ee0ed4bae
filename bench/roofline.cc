// What one machine can do at most: bytes read and operations done per second, by any number of threads.
// Each call runs `threads` copies of a loop and returns the wall seconds of the slowest.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

typedef float f32x16 __attribute__((vector_size(64)));
typedef int64_t i64x8 __attribute__((vector_size(64)));

template <class F> static double timed(int threads, F work) {
  auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(work, t);
  work(0);
  for (auto& other : others) other.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
// Keeps a value without storing it.
template <class T> static void keep(T& value) { asm volatile("" : "+v"(value)); }

extern "C" {
// Reads data [bytes, a multiple of 512 × threads] `rounds` times, each thread its own part.
double read_bytes(const char* data, size_t bytes, int rounds, int threads) {
  return timed(threads, [=](int t) {
    size_t part = bytes / static_cast<size_t>(threads);
    const char* own = data + part * static_cast<size_t>(t);
    for (int r = 0; r < rounds; ++r) {
      i64x8 sum[8] = {};
      for (size_t i = 0; i + 512 <= part; i += 512)
        for (size_t j = 0; j < 8; ++j) {
          i64x8 value;
          memcpy(&value, own + i + 64 * j, 64);
          sum[j] += value;
        }
      for (auto& s : sum) keep(s);
    }
  });
}

// 32 operations a multiply-add of 16 floats, 12 chains.
double fp32_operations(int64_t rounds, int threads) {
  return timed(threads, [=](int) {
    f32x16 a = {}, b = {}, chain[12] = {};
    keep(a), keep(b);
    for (int64_t r = 0; r < rounds; ++r)
      for (auto& c : chain) {
        c = a * b + c;
        keep(c);
      }
  });
}

// 128 operations a dot product of 64 int8; a negative time where the machine has none.
double int8_operations([[maybe_unused]] int64_t rounds, [[maybe_unused]] int threads) {
#if defined(__AVX512VNNI__)
  return timed(threads, [=](int) {
    __m512i a = _mm512_set1_epi8(1), b = a, chain[12] = {};
    for (int64_t r = 0; r < rounds; ++r)
      for (auto& c : chain) {
        c = _mm512_dpbusd_epi32(c, a, b);
        keep(c);
      }
  });
#else
  return -1.0;
#endif
}

// 64 operations a dot product of 32 bf16; a negative time where the machine has none.
double bf16_operations([[maybe_unused]] int64_t rounds, [[maybe_unused]] int threads) {
#if defined(__AVX512BF16__)
  return timed(threads, [=](int) {
    __m512bh a = {}, b = {};
    __m512 chain[12] = {};
    for (int64_t r = 0; r < rounds; ++r)
      for (auto& c : chain) {
        c = _mm512_dpbf16_ps(c, a, b);
        keep(c);
      }
  });
#else
  return -1.0;
#endif
}
}
