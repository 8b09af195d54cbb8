#include "kernels/peak.h"

#include <gtest/gtest.h>

#include <string>

#include "kernels/cpu/attention.h"

namespace meshfill {
namespace {

constexpr double kSeconds = 0.08;

// FLOPs in a cycle that no core passes: two multiply-adds of 16 lanes (bf16: of pairs), or a product of tiles
// every 16 cycles.
double MostFlopsPerCycle(const std::string& target, DType dtype) {
  if (dtype == DType::kF32) return 2 * 16 * 2;
  return target == "amx_bf16" ? 16 * 16 * 32 * 2 / 16 : 2 * 16 * 2 * 2;
}

// A loop that the compiler shortened would beat what a core can do at 7 GHz.
TEST(PeakTest, IsPossibleForACore) {
  for (const std::string& target : SupportedAttentionTargets()) {
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      const RegisterLoopSpeed speed = MeasureRegisterLoop(target, dtype, 1, kSeconds);
      EXPECT_GT(speed.average, 1e8) << target << " " << DTypeName(dtype);
      EXPECT_GE(speed.best * (1 + 1e-9), speed.average) << target << " " << DTypeName(dtype);
      EXPECT_LT(speed.best, MostFlopsPerCycle(target, dtype) * 7e9) << target << " " << DTypeName(dtype);
    }
  }
}

TEST(PeakTest, WiderInstructionsAreFaster) {
  const auto targets = SupportedAttentionTargets();
  if (targets.front() == "portable") GTEST_SKIP() << "one target only";
  const double widest = MeasureRegisterLoop(targets.front(), DType::kBf16, 1, kSeconds).best;
  const double portable = MeasureRegisterLoop("portable", DType::kBf16, 1, kSeconds).best;
  EXPECT_GT(widest, 1.5 * portable);
}

TEST(PeakTest, MeasuresTheWidestTarget) {
  const double widest =
      MeasureRegisterLoop(SupportedAttentionTargets().front(), DType::kF32, 1, kSeconds).best;
  const double peak = MeasurePeakFlops(DType::kF32, 1, kSeconds);
  EXPECT_GT(peak, widest / 4);  // the machine may be busy: right within a small factor
  EXPECT_LT(peak, widest * 4);
}

TEST(PeakTest, CountsTheWorkOfEveryThread) {
  // The machine may be busy: the best of a few tries.
  double peak = 0, of_one = 1;
  for (int tries = 0; tries < 10 && peak <= of_one / 4; ++tries) {
    peak = MeasurePeakFlops(DType::kF32, 3, kSeconds);
    of_one = MeasurePeakFlops(DType::kF32, 1, kSeconds);
  }
  EXPECT_GT(peak, of_one / 4);
}

}  // namespace
}  // namespace meshfill
