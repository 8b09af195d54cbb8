#include "engine/devices/device.h"

#include <gtest/gtest.h>

namespace meshfill {
namespace {

TEST(ParseDevice, KnowsItsNames) {
  EXPECT_EQ(*ParseDevice("auto"), DeviceChoice::kAuto);
  EXPECT_EQ(*ParseDevice("cpu"), DeviceChoice::kCpu);
  EXPECT_EQ(*ParseDevice("cuda"), DeviceChoice::kCuda);
  EXPECT_EQ(ParseDevice("gpu").status().message(), "'gpu' is no device; choose one of auto, cpu, cuda");
}

TEST(ChooseDevices, TheCpuNeedsNone) {
  const auto devices = ChooseDevices(DeviceChoice::kCpu);
  ASSERT_TRUE(devices.ok()) << devices.status();
  EXPECT_TRUE(devices->empty());
}

// Whatever this machine has: auto takes it or the CPU, cuda takes it or says why not.
TEST(ChooseDevices, AutoTakesWhatCudaWouldTake) {
  const auto found = FindCudaDevices();
  const auto automatic = ChooseDevices(DeviceChoice::kAuto);
  const auto cuda = ChooseDevices(DeviceChoice::kCuda);
  ASSERT_TRUE(automatic.ok()) << automatic.status();
  if (found.ok()) {
    EXPECT_EQ(automatic->size(), found->size());
    EXPECT_EQ(cuda->size(), found->size());
    return;
  }
  EXPECT_TRUE(automatic->empty());
  EXPECT_EQ(found.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(cuda.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(cuda.status().message().find(found.status().message()), std::string::npos) << cuda.status();
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
