#include "kernels/peak.h"

#include <gtest/gtest.h>

#include <string>

#include "kernels/cpu/attention.h"

namespace meshfill {
namespace {

constexpr double kSeconds = 0.08;

// A loop that the compiler shortened would beat what any core can do: 4 multiply-adds of 16 lanes (bf16: of
// pairs) a cycle at 8 GHz.
TEST(PeakTest, IsPossibleForACore) {
  for (const std::string& target : SupportedAttentionTargets()) {
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      const double flops = MeasureTargetPeakFlops(target, dtype, 1, kSeconds);
      EXPECT_GT(flops, 1e8) << target << " " << DTypeName(dtype);
      EXPECT_LT(flops, 4 * 16 * 2 * (dtype == DType::kBf16 ? 2 : 1) * 8e9)
          << target << " " << DTypeName(dtype);
    }
  }
}

TEST(PeakTest, WiderInstructionsAreFaster) {
  const auto targets = SupportedAttentionTargets();
  if (targets.front() == "portable") GTEST_SKIP() << "one target only";
  const double widest = MeasureTargetPeakFlops(targets.front(), DType::kBf16, 1, kSeconds);
  const double portable = MeasureTargetPeakFlops("portable", DType::kBf16, 1, kSeconds);
  EXPECT_GT(widest, 1.5 * portable);
}

TEST(PeakTest, MeasuresTheWidestTarget) {
  const double widest = MeasureTargetPeakFlops(SupportedAttentionTargets().front(), DType::kF32, 1, kSeconds);
  const double peak = MeasurePeakFlops(DType::kF32, 1, kSeconds);
  EXPECT_GT(peak, widest / 4);  // the machine may be busy: right within a small factor
  EXPECT_LT(peak, widest * 4);
}

TEST(PeakTest, CountsTheWorkOfEveryThread) {
  const double peak = MeasurePeakFlops(DType::kF32, 3, kSeconds);
  EXPECT_GT(peak, MeasurePeakFlops(DType::kF32, 1, kSeconds) / 4);
}

}  // namespace
}  // namespace meshfill
