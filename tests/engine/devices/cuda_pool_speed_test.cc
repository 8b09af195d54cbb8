// What a pool of GPUs runs when it loads, on GPUs that the host plays: every operation once, then its speed.
#include "engine/devices/cuda/cuda_pool_speed.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <vector>

#include "kernels/cuda/cuda_device.h"
#include "kernels/monotonic_time.h"
#include "tests/fake_cuda/fake_cuda.h"

namespace meshfill {

namespace {

double settle_seconds = 0;

}  // namespace

// In place of the GPUs' own: the reference computes here.
Grain CudaGrain() {
  return {.slice_tokens = 128,
          .host_threads = 1,
          .probe_width = 64,
          .probe_kv_heads = 2,
          .probe_flops = 1e6,
          .settle_seconds = settle_seconds};
}

namespace {

constexpr ModelShape kModel = {.layers = 2,
                               .hidden = 128,
                               .intermediate = 192,
                               .q_heads = 4,
                               .kv_heads = 2,
                               .head_dim = 16,
                               .vocab = 100,
                               .dtype = DType::kBf16};

class CudaPoolSpeedTest : public testing::Test {
 protected:
  // One for each rank, as a pool has them: neighbours share one.
  std::vector<std::shared_ptr<Device>> Devices(int ranks, int devices) {
    FakeCuda::set_devices(devices);
    const std::vector<CudaDeviceInfo> infos = FindCudaDevices().value();
    std::vector<std::shared_ptr<Device>> of_rank;
    for (int rank = 0; rank < ranks; ++rank) {
      const bool shares = rank > 0 && rank * devices / ranks == (rank - 1) * devices / ranks;
      of_rank.push_back(shares ? of_rank.back() : MakeCudaDevice(infos[rank * devices / ranks]).value());
    }
    return of_rank;
  }
};

TEST_F(CudaPoolSpeedTest, EachOperationRunsOnEachDevice) {
  const auto of_rank = Devices(4, 2);
  const int64_t before = FakeCuda::bytes_in_use();
  const absl::Status status = LoadCudaKernels(kModel, of_rank);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(FakeCuda::has_context(0) && FakeCuda::has_context(1));
  EXPECT_LE(FakeCuda::bytes_in_use() - before, int64_t{2} << 26);  // the streams' workspaces
}

TEST_F(CudaPoolSpeedTest, EachOperationOfExpertsRuns) {
  ModelShape model = kModel;
  model.experts = {.count = 5, .used = 3, .width = 40, .shared_width = 0};
  model.kinds = {{.form = {.mlp = MlpKind::kExperts}, .layers = 2}};
  model.post_norms = true;
  model.activation = Activation::kGelu;
  const absl::Status status = LoadCudaKernels(model, Devices(1, 1));
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(CudaPoolSpeedTest, RanksShareTheirDevicesSpeed) {
  const auto of_rank = Devices(4, 2);
  const auto speed = MeasureCudaPoolSpeed(kModel, of_rank);
  ASSERT_TRUE(speed.ok()) << speed.status();
  for (const double rate :
       {speed->gemm_flops_per_second, speed->attention_flops_per_second, speed->merge_bytes_per_second,
        speed->link_bytes_per_second, speed->lm_head_bytes_per_second}) {
    EXPECT_TRUE(std::isfinite(rate) && rate > 0) << rate;
  }
  EXPECT_EQ(speed->lone_rank_speedup, 2);
  EXPECT_EQ(speed->slice_tokens, 128);
  EXPECT_LT(speed->link_bytes_per_second, 1e13);  // measured between the devices, not handed over
}

// Products do, and then attention.
TEST_F(CudaPoolSpeedTest, WorksUntilItHasSettled) {
  const auto of_rank = Devices(1, 1);
  for (const double seconds : {0.05, 0.2}) {
    settle_seconds = seconds;
    const auto start = std::chrono::steady_clock::now();
    const auto speed = MeasureCudaPoolSpeed(kModel, of_rank);
    settle_seconds = 0;
    ASSERT_TRUE(speed.ok()) << speed.status();
    EXPECT_GT(SecondsSince(start), 2 * seconds);
  }
}

}  // namespace
}  // namespace meshfill
