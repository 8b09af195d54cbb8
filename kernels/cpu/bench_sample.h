// What the benchmarks of kernels share: their inputs and their statistics.
#ifndef MESHFILL_KERNELS_CPU_BENCH_SAMPLE_H_
#define MESHFILL_KERNELS_CPU_BENCH_SAMPLE_H_

#include <cstdint>
#include <random>
#include <vector>

#include "kernels/dtype.h"

namespace meshfill {

// The register loop runs beside a kernel for as long as the kernel did, within these bounds.
inline constexpr double kMinPeakSeconds = 0.05;
inline constexpr double kMaxPeakSeconds = 1.0;

// Standard normal elements, f32 or bf16: with zeros, or with equal scores, the multipliers would draw less
// power than in real use.
std::vector<char> RandomTensor(int64_t elements, DType dtype, std::mt19937& random);

double Median(std::vector<double> values);  // of at least one

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_BENCH_SAMPLE_H_
