#include "kernels/cpu/bench/attention_bench.h"

#include <cmath>
#include <random>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/bench/bench_sample.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/return_if_error.h"
#include "kernels/stream.h"

namespace meshfill {
namespace {

absl::Status CheckOptions(const AttentionBenchOptions& options) {
  const auto error = [](auto... parts) {
    return absl::InvalidArgumentError(absl::StrCat("bench attention: ", parts...));
  };
  if (options.dtype == DType::kF16) return error("dtype is f16; use bf16 or f32");
  if (options.head_dim < 1 || options.head_dim > 256)
    return error("head_dim is ", options.head_dim, "; use 1 to 256");
  if (options.kv_heads < 1 || options.q_heads < 1 || options.q_heads % options.kv_heads != 0) {
    return error("q_heads is ", options.q_heads, ", kv_heads ", options.kv_heads,
                 "; use a divisor of q_heads");
  }
  if (options.tokens < 1) return error("tokens is ", options.tokens, "; use at least 1");
  if (options.threads < 1) return error("threads is ", options.threads, "; use at least 1");
  if (options.repeats < 1) return error("repeats is ", options.repeats, "; use at least 1");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<KernelBenchResult> BenchAttention(const AttentionBenchOptions& options) {
  RETURN_IF_ERROR(CheckOptions(options));
  const std::string target = options.target.empty() ? SupportedAttentionTargets().front() : options.target;
  const int64_t q_elements = options.tokens * options.q_heads * options.head_dim;
  const int64_t kv_elements = options.tokens * options.kv_heads * options.head_dim;
  std::mt19937 random(1);
  const std::vector<char> q = RandomTensor(q_elements, options.dtype, random);
  const std::vector<char> k = RandomTensor(kv_elements, options.dtype, random);
  const std::vector<char> v = RandomTensor(kv_elements, options.dtype, random);
  std::vector<float> o(q_elements);
  std::vector<float> lse(options.tokens * options.q_heads);
  const AttentionBlockArgs args{.q = q.data(),
                                .k = k.data(),
                                .v = v.data(),
                                .q_tokens = options.tokens,
                                .k_tokens = options.tokens,
                                .q_heads = options.q_heads,
                                .kv_heads = options.kv_heads,
                                .head_dim = options.head_dim,
                                .band = {},
                                .scale = 1.0f / std::sqrt(static_cast<float>(options.head_dim)),
                                .carry_in = false,
                                .o = o.data(),
                                .lse = lse.data()};
  const double tokens = static_cast<double>(options.tokens);
  const double flops = 4.0 * options.head_dim * options.q_heads * (tokens * (tokens + 1) / 2);

  ThreadPool pool(options.threads);
  return MeasureBesideRegisterLoop(target, options.dtype, options.threads, options.repeats, flops, [&] {
    return CpuAttentionBlock(args, options.dtype, target, pool, nullptr);
  });
}

}  // namespace meshfill
