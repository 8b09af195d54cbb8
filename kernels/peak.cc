#include "kernels/peak.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "kernels/cpu/amx.h"
#include "kernels/cpu/attention.h"

namespace meshfill {
namespace {

// Each loop keeps as many accumulators as hide the latency of two multiply-adds a cycle and fit the
// registers. They start apart, so that the compiler cannot do the same work once for all; the result depends
// on every step, and floating point forbids to shorten the chains.
struct RegisterLoop {
  float (*run)(int64_t iterations);
  double flops_per_iteration;
};

// x ← x · kFactor + kTerm stays near 1: neither overflow nor subnormals slow it down.
constexpr float kFactor = 0.5f;
constexpr float kTerm = 0.5f;

float RunPortable(int64_t iterations) {
  typedef float Floats __attribute__((vector_size(16)));
  Floats sums[12];
  for (int i = 0; i < 12; ++i) sums[i] = Floats{} + static_cast<float>(i);
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (Floats& sum : sums) sum = sum * kFactor + kTerm;
  }
  for (const Floats& sum : sums) sums[0] += sum;
  return sums[0][0];
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) float RunFma256(int64_t iterations) {
  __m256 sums[12];
  for (int i = 0; i < 12; ++i) sums[i] = _mm256_set1_ps(static_cast<float>(i));
  const __m256 factor = _mm256_set1_ps(kFactor);
  const __m256 term = _mm256_set1_ps(kTerm);
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (__m256& sum : sums) sum = _mm256_fmadd_ps(sum, factor, term);
  }
  for (const __m256& sum : sums) sums[0] += sum;
  return sums[0][0];
}

__attribute__((target("avx512f"))) float RunFma512(int64_t iterations) {
  __m512 sums[24];
  for (int i = 0; i < 24; ++i) sums[i] = _mm512_set1_ps(static_cast<float>(i));
  const __m512 factor = _mm512_set1_ps(kFactor);
  const __m512 term = _mm512_set1_ps(kTerm);
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 24
    for (__m512& sum : sums) sum = _mm512_fmadd_ps(sum, factor, term);
  }
  for (const __m512& sum : sums) sums[0] += sum;
  return sums[0][0];
}

__attribute__((target("avx512f,avx512bw,avx512bf16"))) float RunDpBf16(int64_t iterations) {
  __m512 sums[24];
  for (int i = 0; i < 24; ++i) sums[i] = _mm512_set1_ps(static_cast<float>(i));
  const auto one = (__m512bh)_mm512_set1_epi16(0x3f80);
  const auto small = (__m512bh)_mm512_set1_epi16(0x3380);  // 2^-24
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 24
    for (__m512& sum : sums) sum = _mm512_dpbf16_ps(sum, one, small);
  }
  for (const __m512& sum : sums) sums[0] += sum;
  return sums[0][0];
}

__attribute__((target("avx512f,amx-tile,amx-bf16"))) float RunTiles(int64_t iterations) {
  _tile_loadconfig(&kWholeTiles);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t i = 0; i < iterations; ++i) {
    _tile_dpbf16ps(0, 6, 7);
    _tile_dpbf16ps(1, 6, 7);
    _tile_dpbf16ps(2, 6, 7);
    _tile_dpbf16ps(3, 6, 7);
    _tile_dpbf16ps(4, 6, 7);
    _tile_dpbf16ps(5, 6, 7);
  }
  alignas(64) float sums[256];
  _tile_stored(0, sums, 64);
  _tile_release();
  return sums[0];
}
#endif

RegisterLoop LoopOf(std::string_view target, DType dtype) {
#if defined(__x86_64__)
  if (target == "amx_bf16" && dtype == DType::kBf16) return {RunTiles, 6 * 16 * 16 * 32 * 2};
  if (target == "avx512_bf16" && dtype == DType::kBf16) return {RunDpBf16, 24 * 32 * 2};
  if (target == "amx_bf16" || target == "avx512_bf16" || target == "avx512") return {RunFma512, 24 * 16 * 2};
  if (target == "avx2") return {RunFma256, 12 * 8 * 2};
#endif
  return {RunPortable, 12 * 4 * 2};
}

double SecondsOf(const RegisterLoop& loop, int threads, int64_t iterations) {
  std::vector<float> results(threads);
  std::vector<std::thread> others;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 1; i < threads; ++i) others.emplace_back([&, i] { results[i] = loop.run(iterations); });
  results[0] = loop.run(iterations);
  for (std::thread& thread : others) thread.join();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  // The results are looked at, so that the loops cannot be left out.
  volatile float sink = 0;
  for (const float result : results) sink = sink + result;
  return elapsed.count();
}

}  // namespace

RegisterLoopSpeed MeasureRegisterLoop(std::string_view target, DType dtype, int threads, double seconds) {
  const RegisterLoop loop = LoopOf(target, dtype);
  double best = 0, total_flops = 0, total_seconds = 0;
  int64_t iterations = 1 << 12;
  while (total_seconds < seconds) {
    const double elapsed = std::max(SecondsOf(loop, threads, iterations), 1e-9);
    const double flops = loop.flops_per_iteration * static_cast<double>(iterations) * threads;
    best = std::max(best, flops / elapsed);
    total_flops += flops;
    total_seconds += elapsed;
    if (elapsed < seconds / 16) iterations *= 2;  // short runs measure the start of the threads
  }
  return {.best = best, .average = total_flops / total_seconds};
}

double MeasurePeakFlops(DType dtype, int threads, double seconds) {
  return MeasureRegisterLoop(SupportedAttentionTargets().front(), dtype, threads, seconds).best;
}

}  // namespace meshfill
