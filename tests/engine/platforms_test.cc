#include "engine/platforms.h"

#include <gtest/gtest.h>

#include "kernels/cuda/device_info.h"

namespace meshfill {
namespace {

TEST(ParseDevice, KnowsItsNames) {
  for (const std::string name : {"auto", "cpu", "cuda"}) EXPECT_EQ(*ParseDevice(name), name);
  EXPECT_EQ(ParseDevice("gpu").status().message(), "'gpu' is no device; choose one of auto, cpu, cuda");
}

TEST(FindDevices, RefusesANameThatIsNotRegistered) {
  const absl::Status status = FindDevices("gpu", {}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_EQ(status, ParseDevice("gpu").status());
}

TEST(FindDevices, TheCpuIsEverywhere) {
  const auto devices = FindDevices("cpu", {.ranks = 3});
  ASSERT_TRUE(devices.ok()) << devices.status();
  EXPECT_EQ((*devices)->count(), 1);
  EXPECT_EQ((*devices)->DeviceName(0), "cpu");
  EXPECT_TRUE((*devices)->in_host_memory());
}

TEST(FindDevices, TheCpuHasNoNumbers) {
  const absl::Status status = FindDevices("cpu", {.devices = {0}}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_NE(status.message().find("pool.worker.devices names GPUs"), std::string::npos) << status;
}

// Whatever this machine has: auto takes it or the CPU, cuda takes it or says why not.
TEST(FindDevices, AutoTakesWhatCudaWouldTake) {
  const auto found = FindCudaDevices();
  const auto automatic = FindDevices("auto", {.ranks = 64});
  const auto cuda = FindDevices("cuda", {.ranks = 64});
  ASSERT_TRUE(automatic.ok()) << automatic.status();
  if (found.ok()) {
    EXPECT_EQ((*automatic)->count(), static_cast<int>(found->size()));
    EXPECT_EQ((*cuda)->count(), static_cast<int>(found->size()));
    EXPECT_FALSE((*automatic)->in_host_memory());
    return;
  }
  EXPECT_EQ((*automatic)->DeviceName(0), "cpu");
  EXPECT_EQ(found.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(cuda.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(cuda.status().message().find(found.status().message()), std::string::npos) << cuda.status();
  EXPECT_NE(cuda.status().message().find("choose the device cpu"), std::string::npos) << cuda.status();
}

TEST(FindDevices, F32IsTheCpus) {
  const auto automatic = FindDevices("auto", {.dtype = DType::kF32});
  ASSERT_TRUE(automatic.ok()) << automatic.status();
  EXPECT_EQ((*automatic)->DeviceName(0), "cpu");
  EXPECT_EQ((*automatic)->dtype(), DType::kF32);
  EXPECT_EQ(
      FindDevices("cuda", {.dtype = DType::kF32}).status(),
      absl::InvalidArgumentError("device cuda: it computes in bf16, not in f32; leave the dtype out, or "
                                 "choose the device cpu"));
}

TEST(CudaPeakFlops, NamesTheProductNotItsPrefix) {
  EXPECT_EQ(CudaPeakFlops("NVIDIA H100 80GB HBM3"), 989e12);
  EXPECT_EQ(CudaPeakFlops("NVIDIA H100 PCIe"), 756e12);
  EXPECT_EQ(CudaPeakFlops("NVIDIA L40S"), 362e12);
  EXPECT_EQ(CudaPeakFlops("NVIDIA L4"), 121e12);
  EXPECT_EQ(CudaPeakFlops("NVIDIA Something"), 0);
}

}  // namespace
}  // namespace meshfill
