#include "engine/devices/container_limits.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>

namespace meshfill {
namespace {

// A machine's files below a folder of their own.
class ContainerLimitsTest : public testing::Test {
 protected:
  ~ContainerLimitsTest() override { std::filesystem::remove_all(root_); }

  ContainerLimits Read(const std::map<std::string, std::string>& files) {
    std::filesystem::remove_all(root_);
    for (const auto& [path, text] : files) {
      const std::filesystem::path file = root_ + "/" + path;
      std::filesystem::create_directories(file.parent_path());
      std::ofstream(file) << text << "\n";
    }
    return ReadContainerLimits(root_);
  }

  const std::string root_ = testing::TempDir() + "cgroup." + std::to_string(getpid());
};

TEST_F(ContainerLimitsTest, AMachineWithoutGroupsHasNoLimits) {
  for (const auto& files : {std::map<std::string, std::string>{{"proc/self/other", ""}},
                            {{"proc/self/cgroup", "0::/"}},
                            {{"proc/self/cgroup", "nonsense\n::\n0"}},
                            {{"proc/self/cgroup", "0::/"},
                             {"sys/fs/cgroup/memory.max", "max"},
                             {"sys/fs/cgroup/memory.current", "5"},
                             {"sys/fs/cgroup/cpu.max", "max 100000"}},
                            {{"proc/self/cgroup", "3:memory:/\n2:cpu,cpuacct:/"},
                             {"sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712"},
                             {"sys/fs/cgroup/memory/memory.usage_in_bytes", "5"},
                             {"sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1"},
                             {"sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000"}}}) {
    const ContainerLimits limits = Read(files);
    EXPECT_FALSE(limits.cpus.has_value());
    EXPECT_FALSE(limits.memory_bytes.has_value());
    EXPECT_FALSE(limits.free_memory_bytes.has_value());
  }
}

TEST_F(ContainerLimitsTest, ReadsAContainersLimitsOfBothVersions) {
  const std::map<std::string, std::string> v2 = {{"proc/self/cgroup", "0::/"},
                                                 {"sys/fs/cgroup/memory.max", "1000"},
                                                 {"sys/fs/cgroup/memory.current", "300"},
                                                 {"sys/fs/cgroup/cpu.max", "150000 100000"}};
  const std::map<std::string, std::string> v1 = {
      {"proc/self/cgroup", "4:cpu,cpuacct:/\n3:memory:/\n1:name=systemd:/"},
      {"sys/fs/cgroup/memory/memory.limit_in_bytes", "1000"},
      {"sys/fs/cgroup/memory/memory.usage_in_bytes", "300"},
      {"sys/fs/cgroup/cpu/cpu.cfs_quota_us", "150000"},
      {"sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000"}};
  for (const auto& files : {v2, v1}) {
    const ContainerLimits limits = Read(files);
    EXPECT_EQ(limits.cpus, 1.5);
    EXPECT_EQ(limits.memory_bytes, 1000);
    EXPECT_EQ(limits.free_memory_bytes, 700);
  }
}

// A model's files that were read stay in the page cache, and in what the group is said to use.
TEST_F(ContainerLimitsTest, ThePageCacheIsFree) {
  const std::string stat = "anon 100\nfile 250\ninactive_file 150\nactive_file 50\nunevictable 7";
  const std::string hierarchy =
      "inactive_file 1\nactive_file 1\ntotal_inactive_file 150\ntotal_active_file 50";
  const auto v2 = [&](const std::string& used) {
    return Read({{"proc/self/cgroup", "0::/"},
                 {"sys/fs/cgroup/memory.max", "1000"},
                 {"sys/fs/cgroup/memory.current", used},
                 {"sys/fs/cgroup/memory.stat", stat}});
  };
  const auto v1 = [&](const std::string& used) {
    return Read({{"proc/self/cgroup", "3:memory:/"},
                 {"sys/fs/cgroup/memory/memory.limit_in_bytes", "1000"},
                 {"sys/fs/cgroup/memory/memory.usage_in_bytes", used},
                 {"sys/fs/cgroup/memory/memory.stat", hierarchy}});
  };
  EXPECT_EQ(v2("900").free_memory_bytes, 300);
  EXPECT_EQ(v1("900").free_memory_bytes, 300);
  EXPECT_EQ(v2("1300").free_memory_bytes, 0) << "above its limit";
  EXPECT_EQ(v2("10").free_memory_bytes, 1000) << "the two files were not read at the same moment";
}

// A service's own group, with a tighter one above it.
TEST_F(ContainerLimitsTest, TheTightestOfTheGroupsAboveCounts) {
  const ContainerLimits limits =
      Read({{"proc/self/cgroup", "0::/machine.slice/meshfill.service"},
            {"sys/fs/cgroup/machine.slice/memory.max", "1000"},
            {"sys/fs/cgroup/machine.slice/memory.current", "990"},
            {"sys/fs/cgroup/machine.slice/cpu.max", "800000 100000"},
            {"sys/fs/cgroup/machine.slice/meshfill.service/memory.max", "600"},
            {"sys/fs/cgroup/machine.slice/meshfill.service/memory.current", "100"},
            {"sys/fs/cgroup/machine.slice/meshfill.service/cpu.max", "200000 100000"}});
  EXPECT_EQ(limits.cpus, 2);
  EXPECT_EQ(limits.memory_bytes, 600);
  EXPECT_EQ(limits.free_memory_bytes, 10) << "its neighbours have taken the slice's";
  EXPECT_EQ(Read({{"proc/self/cgroup", "0::/a"},
                  {"sys/fs/cgroup/a/memory.max", "10"},
                  {"sys/fs/cgroup/a/memory.current", "20"}})
                .free_memory_bytes,
            0);
}

// However many groups are above, and in both versions.
TEST_F(ContainerLimitsTest, EveryGroupAboveMaySetALimit) {
  for (const std::string limited : {"", "/a", "/a/bc", "/a/bc/d"}) {
    const std::string v2 = "sys/fs/cgroup" + limited, memory = "sys/fs/cgroup/memory" + limited,
                      cpu = "sys/fs/cgroup/cpu" + limited;
    for (const auto& files :
         {std::map<std::string, std::string>{
              {"proc/self/cgroup", "0::/a/bc/d"}, {v2 + "/memory.max", "10"}, {v2 + "/cpu.max", "50 25"}},
          {{"proc/self/cgroup", "4:cpuacct,cpu:/a/bc/d\n3:memory:/a/bc/d"},
           {memory + "/memory.limit_in_bytes", "10"},
           {cpu + "/cpu.cfs_quota_us", "50"},
           {cpu + "/cpu.cfs_period_us", "25"}}}) {
      const ContainerLimits limits = Read(files);
      EXPECT_EQ(limits.memory_bytes, 10) << limited;
      EXPECT_FALSE(limits.free_memory_bytes.has_value()) << "nothing says what is used";
      EXPECT_EQ(limits.cpus, 2) << limited;
    }
  }
}

TEST_F(ContainerLimitsTest, HalfALimitIsNone) {
  for (const std::string& text : {"100000", "0 100000", "100000 0"}) {
    EXPECT_FALSE(Read({{"proc/self/cgroup", "0::/"}, {"sys/fs/cgroup/cpu.max", text}}).cpus.has_value())
        << text;
  }
  for (const auto& [quota, period] : {std::pair("100000", ""), {"", "100000"}, {"100000", "0"}, {"0", "5"}}) {
    EXPECT_FALSE(Read({{"proc/self/cgroup", "2:cpu:/"},
                       {"sys/fs/cgroup/cpu/cpu.cfs_quota_us", quota},
                       {"sys/fs/cgroup/cpu/cpu.cfs_period_us", period}})
                     .cpus.has_value())
        << quota << " of " << period;
  }
}

TEST(DefaultThreads, LeavesRoomBelowALimit) {
  const auto threads = [](int cores, std::optional<double> cpus) {
    return DefaultThreads(cores, {.cpus = cpus});
  };
  EXPECT_EQ(threads(16, std::nullopt), 16);
  EXPECT_EQ(threads(16, 16), 16);
  EXPECT_EQ(threads(16, 64), 16);
  EXPECT_EQ(threads(64, 16), 15);
  EXPECT_EQ(threads(64, 2.5), 1);
  EXPECT_EQ(threads(64, 1), 1);
  EXPECT_EQ(threads(64, 0.25), 1);
  EXPECT_EQ(threads(0, std::nullopt), 1);
}

}  // namespace
}  // namespace meshfill
