#include "server/cli/bench/bench_kernel.h"

#include <gtest/gtest.h>

namespace meshfill {
namespace {

// A CPU has a register loop beside it.
TEST(KernelBench, SaysTheRatioToARegisterLoop) {
  const KernelBenchResult result = {.target = "avx2",
                                    .seconds = 0.25,
                                    .flops_per_second = 50e9,
                                    .peak_flops_per_second = 80e9,
                                    .ratio = 0.625};
  EXPECT_EQ(KernelBenchJson(result, {{"tokens", 7}}, 2),
            R"({"target":"avx2","tokens":7,"threads":2,"seconds":0.25,"flops_per_second":50000000000.0,)"
            R"("peak_flops_per_second":80000000000.0,"ratio":0.625})"
            "\n");
  EXPECT_EQ(KernelBenchText(result, "attention", "bf16, 7 tokens", 2),
            "avx2, bf16, 7 tokens, 2 threads\n"
            "attention       50.0 GFLOP/s (250 ms)\n"
            "register loop   80.0 GFLOP/s\n"
            "ratio           0.625\n");
  EXPECT_EQ(KernelBenchText(result, "linear layer", "f32", 1),
            "avx2, f32, 1 thread\n"
            "linear layer    50.0 GFLOP/s (250 ms)\n"
            "register loop   80.0 GFLOP/s\n"
            "ratio           0.625\n");
}

// A GPU has a data sheet.
TEST(KernelBench, SaysThePartOfTheDataSheetsPeak) {
  KernelBenchResult result = {
      .target = "NVIDIA H100", .seconds = 2, .flops_per_second = 600e12, .peak_flops_per_second = 800e12};
  EXPECT_EQ(KernelBenchJson(result, {{"tokens", 7}}, 1),
            R"({"target":"NVIDIA H100","tokens":7,"seconds":2.0,"flops_per_second":600000000000000.0,)"
            R"("peak_flops_per_second":800000000000000.0})"
            "\n");
  EXPECT_EQ(KernelBenchText(result, "attention", "bf16", 1),
            "NVIDIA H100, bf16\nattention       600.0 TFLOP/s (2.0 s), 75.0 % of the data sheet's peak\n");
  result.peak_flops_per_second = 0;  // not known
  EXPECT_EQ(KernelBenchText(result, "attention", "bf16", 1),
            "NVIDIA H100, bf16\nattention       600.0 TFLOP/s (2.0 s), 0.0 % of the data sheet's peak\n");
}

}  // namespace
}  // namespace meshfill
