// What the benches of a device's kernels print.
#ifndef MESHFILL_SERVER_CLI_BENCH_BENCH_KERNEL_H_
#define MESHFILL_SERVER_CLI_BENCH_BENCH_KERNEL_H_

#include <string>

#include "kernels/kernel_bench.h"
#include "nlohmann/json.hpp"

namespace meshfill {

// `inputs`: what was measured. `threads` counts where the result is of a CPU.
std::string KernelBenchJson(const KernelBenchResult& result, const nlohmann::ordered_json& inputs,
                            int threads);

// `kernel`: "attention". `inputs`: "bf16, head_dim 128, …".
std::string KernelBenchText(const KernelBenchResult& result, const std::string& kernel,
                            const std::string& inputs, int threads);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_BENCH_BENCH_KERNEL_H_
