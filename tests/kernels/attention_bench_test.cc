#include "kernels/cpu/bench/attention_bench.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "kernels/cpu/attention.h"

namespace meshfill {
namespace {

TEST(AttentionBenchTest, CountsTheVisiblePairsOfEveryHead) {
  const AttentionBenchOptions options{.dtype = DType::kF32,
                                      .head_dim = 24,
                                      .q_heads = 6,
                                      .kv_heads = 2,
                                      .tokens = 100,
                                      .threads = 2,
                                      .repeats = 1};
  const absl::StatusOr<KernelBenchResult> result = BenchAttention(options);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->target, SupportedAttentionTargets().front());
  const double flops = 4.0 * 24 * 6 * (100 * 101 / 2);
  EXPECT_NEAR(result->flops_per_second * result->seconds, flops, flops * 1e-9);
  EXPECT_NEAR(result->ratio, result->flops_per_second / result->peak_flops_per_second, result->ratio * 1e-9);
}

TEST(AttentionBenchTest, RunsEveryTargetInBothTypes) {
  for (const std::string& target : SupportedAttentionTargets()) {
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      const absl::StatusOr<KernelBenchResult> result =
          BenchAttention({.dtype = dtype, .tokens = 300, .target = target, .repeats = 2});
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(result->target, target);
      EXPECT_GT(result->ratio, 0);
    }
  }
}

TEST(AttentionBenchTest, NamesTheOptionThatIsOutOfRange) {
  const std::pair<AttentionBenchOptions, std::string> cases[] = {
      {{.dtype = DType::kF16}, "dtype"}, {{.head_dim = 0}, "head_dim"},
      {{.head_dim = 257}, "head_dim"},   {{.q_heads = 3, .kv_heads = 2}, "heads"},
      {{.kv_heads = 0}, "heads"},        {{.tokens = 0}, "tokens"},
      {{.threads = 0}, "threads"},       {{.repeats = 0}, "repeats"},
      {{.target = "mmx"}, "mmx"}};
  for (const auto& [options, name] : cases) {
    const absl::Status status = BenchAttention(options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_NE(status.message().find(name), std::string::npos) << status;
  }
}

}  // namespace
}  // namespace meshfill
