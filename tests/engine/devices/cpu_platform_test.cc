#include "engine/devices/cpu/cpu_platform.h"

#include <unistd.h>

#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "engine/devices/container_limits.h"
#include "gtest/gtest.h"

namespace meshfill {
namespace {

constexpr ModelShape kModel{.layers = 2,
                            .hidden = 64,
                            .intermediate = 128,
                            .q_heads = 4,
                            .kv_heads = 2,
                            .head_dim = 16,
                            .vocab = 100,
                            .context_tokens = 4096,
                            .dtype = DType::kF32};

struct Pool {
  std::unique_ptr<PoolDevices> hardware;
  std::vector<std::shared_ptr<Device>> devices;  // by rank
};

Pool MakePool(int ranks, int threads) {
  auto hardware = MakeCpuPlatform()->Find({.ranks = ranks, .threads = threads});
  EXPECT_TRUE(hardware.ok()) << hardware.status();
  auto device = (*hardware)->Make(0, DType::kF32);
  EXPECT_TRUE(device.ok()) << device.status();
  return {*std::move(hardware), std::vector<std::shared_ptr<Device>>(ranks, *std::move(device))};
}

TEST(CpuPlatform, AnotherPoolHasAnotherKey) {
  std::set<std::string> keys;
  for (const int ranks : {1, 2, 4}) {
    for (const int threads : {1, 2}) {
      const Pool pool = MakePool(ranks, threads);
      const std::string key = pool.hardware->SpeedKey(kModel, pool.devices);
      EXPECT_EQ(pool.hardware->SpeedKey(kModel, pool.devices), key);
      EXPECT_NE(key.find(pool.devices[0]->name()), std::string::npos) << key;
      keys.insert(key);
    }
  }
  EXPECT_EQ(keys.size(), 6u);
}

TEST(CpuPlatform, TheKeySaysWhatTheSpeedIsOf) {
  const Pool pool = MakePool(3, 0);  // as many threads as the machine and its limits give
  const std::string key = pool.hardware->SpeedKey(kModel, pool.devices);
  const int threads =
      DefaultThreads(static_cast<int>(std::thread::hardware_concurrency()), ReadContainerLimits());
  EXPECT_NE(key.find(" " + std::to_string(threads) + " threads, 3 ranks"), std::string::npos) << key;
  EXPECT_NE(key.find(" " + std::to_string(sysconf(_SC_NPROCESSORS_ONLN)) + " cores"), std::string::npos)
      << key;
  std::ifstream processors("/proc/cpuinfo");
  for (std::string line; std::getline(processors, line);) {
    if (!line.starts_with("model name")) continue;
    EXPECT_NE(key.find(line.substr(line.find(':') + 1)), std::string::npos) << key;
    break;
  }
}

TEST(CpuPlatform, RefusesGpusThatAreNamed) {
  const absl::Status status = MakeCpuPlatform()->Find({.ranks = 2, .devices = {0, 1}}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_NE(status.message().find("pool.worker.devices"), std::string::npos) << status;
}

TEST(CpuPlatform, RanksThatShareThreadsHaveTheirShare) {
  for (const int ranks : {1, 2, 3, 8}) {
    const Pool pool = MakePool(ranks, 2);
    const auto speed = pool.hardware->MeasureSpeed(kModel, pool.devices);
    ASSERT_TRUE(speed.ok()) << speed.status();
    EXPECT_DOUBLE_EQ(speed->lone_rank_speedup, std::max(1.0, ranks / 2.0));
  }
}

TEST(CpuPlatform, KnowsItsPeakAndItsMemory) {
  const Pool pool = MakePool(2, 1);
  EXPECT_EQ(pool.hardware->count(), 1);
  EXPECT_TRUE(pool.hardware->in_host_memory());
  EXPECT_GT(pool.hardware->PeakFlops(pool.devices).value(), 1e8);
  EXPECT_GT(pool.hardware->BudgetBytes(0).value(), 1 << 20);
}

TEST(CpuPlatform, ConnectsOverGloo) {
  const Pool pool = MakePool(1, 1);
  auto plane = pool.hardware->MakeDataPlane({.listen = "127.0.0.1"});
  ASSERT_TRUE(plane.ok()) << plane.status();
  EXPECT_FALSE((*plane)->connects_slowly());
  auto endpoint = (*plane)->Listen({.rank = 0, .ranks = 1, .run = 1});
  ASSERT_TRUE(endpoint.ok()) << endpoint.status();
  EXPECT_FALSE((*endpoint)->address().empty());
  plane = pool.hardware->MakeDataPlane({.listen = "no such host"});
  ASSERT_TRUE(plane.ok()) << plane.status();
  EXPECT_TRUE(absl::IsInvalidArgument((*plane)->Listen({.ranks = 1}).status()));
}

}  // namespace
}  // namespace meshfill
