#include "kernels/cpu/bench/gemm_bench.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "kernels/cpu/attention.h"

namespace meshfill {
namespace {

TEST(GemmBenchTest, CountsAMultiplyAndAnAddForEachProduct) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const absl::StatusOr<KernelBenchResult> result = BenchGemm(
        {.dtype = dtype, .tokens = 70, .in_features = 96, .out_features = 130, .threads = 2, .repeats = 1});
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->target, SupportedAttentionTargets().front());
    const double flops = 2.0 * 70 * 96 * 130;
    EXPECT_NEAR(result->flops_per_second * result->seconds, flops, flops * 1e-9);
    EXPECT_NEAR(result->ratio, result->flops_per_second / result->peak_flops_per_second,
                result->ratio * 1e-9);
  }
}

TEST(GemmBenchTest, NamesTheOptionThatIsOutOfRange) {
  const std::pair<GemmBenchOptions, std::string> cases[] = {
      {{.dtype = DType::kF16}, "dtype"},     {{.tokens = 0}, "tokens"},   {{.in_features = 0}, "in_features"},
      {{.out_features = 0}, "out_features"}, {{.threads = 0}, "threads"}, {{.repeats = 0}, "repeats"}};
  for (const auto& [options, name] : cases) {
    const absl::Status status = BenchGemm(options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_NE(status.message().find(name), std::string::npos) << status;
  }
}

}  // namespace
}  // namespace meshfill
