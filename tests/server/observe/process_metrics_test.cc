#include "server/observe/process_metrics.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace meshfill {
namespace {

std::map<std::string, double> Collect() {
  std::map<std::string, double> values;
  for (const prometheus::MetricFamily& family : CollectProcessMetrics()) {
    EXPECT_EQ(family.metric.size(), 1u) << family.name;
    EXPECT_FALSE(family.help.empty()) << family.name;
    const bool counter = family.type == prometheus::MetricType::Counter;
    EXPECT_EQ(counter, family.name.ends_with("_total")) << family.name;
    const prometheus::ClientMetric& metric = family.metric.front();
    values[family.name] = counter ? metric.counter.value : metric.gauge.value;
  }
  return values;
}

TEST(ProcessMetricsTest, HasTheStandardOnes) {
  const auto values = Collect();
  for (const char* name : {"process_cpu_seconds_total", "process_start_time_seconds", "process_threads",
                           "process_virtual_memory_bytes", "process_resident_memory_bytes",
                           "process_open_fds", "process_max_fds"}) {
    EXPECT_TRUE(values.contains(name)) << name;
    EXPECT_GT(values.at(name), 0) << name;
  }
  const double now = absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch());
  EXPECT_LE(values.at("process_start_time_seconds"), now + 1);
  EXPECT_GT(values.at("process_start_time_seconds"), now - 3600);
  EXPECT_GT(values.at("process_virtual_memory_bytes"), values.at("process_resident_memory_bytes"));
}

TEST(ProcessMetricsTest, CountsTheOpenDescriptorsAndNoOther) {
  constexpr int kMost = 10'000;  // more than the test opens
  int open = 0;
  for (int descriptor = 0; descriptor < kMost; ++descriptor) open += fcntl(descriptor, F_GETFD) != -1;
  EXPECT_EQ(Collect().at("process_open_fds"), open);
}

TEST(ProcessMetricsTest, FollowsTheProcess) {
  const auto before = Collect();
  EXPECT_EQ(Collect().at("process_start_time_seconds"), before.at("process_start_time_seconds"));

  std::vector<int> descriptors;
  for (int i = 0; i < 50; ++i) descriptors.push_back(open("/dev/null", O_RDONLY));
  EXPECT_EQ(Collect().at("process_open_fds"), before.at("process_open_fds") + 50);
  for (const int descriptor : descriptors) close(descriptor);
  EXPECT_EQ(Collect().at("process_open_fds"), before.at("process_open_fds"));

  constexpr size_t kBytes = 64 << 20;
  const std::string held(kBytes, 'x');
  EXPECT_GT(Collect().at("process_resident_memory_bytes"),
            before.at("process_resident_memory_bytes") + kBytes / 2);

  double seconds = 0;
  while (seconds < 0.05)
    seconds = Collect().at("process_cpu_seconds_total") - before.at("process_cpu_seconds_total");
  // The first thread may bring others: a sanitizer's own.
  double with_one = 0, with_two = 0;
  std::thread([&] {
    with_one = Collect().at("process_threads");
    std::thread([&] { with_two = Collect().at("process_threads"); }).join();
  }).join();
  EXPECT_GE(with_one, before.at("process_threads") + 1);
  EXPECT_EQ(with_two, with_one + 1);
}

TEST(ProcessMetricsTest, TellsWhereNoDescriptorIsLeft) {
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &old), 0);
  rlimit few = old;
  few.rlim_cur = 100;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  std::vector<int> descriptors;
  for (int each; (each = open("/dev/null", O_RDONLY)) >= 0;) descriptors.push_back(each);
  const auto values = Collect();
  for (const int descriptor : descriptors) close(descriptor);
  setrlimit(RLIMIT_NOFILE, &old);
  EXPECT_EQ(values.at("process_open_fds"), 100);
  EXPECT_EQ(values.at("process_max_fds"), 100);
}

}  // namespace
}  // namespace meshfill
