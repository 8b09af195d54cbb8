// What the benchmarks of kernels share: their inputs, and how they are measured.
#ifndef MESHFILL_KERNELS_CPU_BENCH_BENCH_SAMPLE_H_
#define MESHFILL_KERNELS_CPU_BENCH_BENCH_SAMPLE_H_

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/dtype.h"
#include "kernels/kernel_bench.h"

namespace meshfill {

// Standard normal elements, f32 or bf16: with zeros, or with equal scores, the multipliers would draw less
// power than in real use.
std::vector<char> RandomTensor(int64_t elements, DType dtype, std::mt19937& random);

// Each repeat runs `kernel`, and then at once the register loop of `target` on as many threads for about as
// long, by its average: a clock that drifts or a busy neighbour meets both. Errors: the kernel's.
absl::StatusOr<KernelBenchResult> MeasureBesideRegisterLoop(const std::string& target, DType dtype,
                                                            int threads, int repeats, double flops,
                                                            const std::function<absl::Status()>& kernel);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_BENCH_BENCH_SAMPLE_H_
