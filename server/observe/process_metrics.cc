#include "server/observe/process_metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <system_error>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace meshfill {
namespace {

double SecondsOf(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return absl::ToDoubleSeconds(absl::DurationFromTimespec(time));
}

// Fields of /proc/self/stat, by their numbers in proc(5).
constexpr int kThreadsField = 20, kStartField = 22, kVirtualField = 23, kResidentField = 24;
constexpr int kFirstField = 3;  // behind the name, which may hold anything

std::vector<int64_t> StatFields() {
  std::ifstream file("/proc/self/stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const size_t name_end = text.rfind(") ");
  std::vector<int64_t> fields(kResidentField + 1);
  if (name_end == std::string::npos) return {};
  int number = kFirstField;
  for (const absl::string_view field : absl::StrSplit(absl::string_view(text).substr(name_end + 2), ' ')) {
    if (number > kResidentField) return fields;
    if (!absl::SimpleAtoi(field, &fields[number++])) fields[number - 1] = 0;  // the state is a letter
  }
  return {};
}

// Computed once: the two clocks drift apart, but a start is a start.
double StartSeconds(int64_t start_ticks) {
  static const double start = absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()) -
                              SecondsOf(CLOCK_BOOTTIME) +
                              static_cast<double>(start_ticks) / static_cast<double>(sysconf(_SC_CLK_TCK));
  return start;
}

std::optional<double> MaxDescriptors() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return std::nullopt;
  return static_cast<double>(limit.rlim_cur);
}

// Open descriptors; all that there may be where none is left to count with.
std::optional<double> OpenDescriptors() {
  std::error_code error;
  std::filesystem::directory_iterator entry("/proc/self/fd", error);
  if (error == std::errc::too_many_files_open) return MaxDescriptors();
  int64_t count = -1;  // the directory's own
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) ++count;
  if (error) return std::nullopt;
  return static_cast<double>(count);
}

}  // namespace

int64_t ResidentBytes() {
  const std::vector<int64_t> fields = StatFields();
  return fields.empty() ? 0 : fields[kResidentField] * sysconf(_SC_PAGESIZE);
}

std::vector<prometheus::MetricFamily> CollectProcessMetrics() {
  std::vector<prometheus::MetricFamily> families;
  const auto add = [&](const char* name, const char* help, prometheus::MetricType type, double value) {
    prometheus::ClientMetric metric;
    (type == prometheus::MetricType::Counter ? metric.counter.value : metric.gauge.value) = value;
    families.push_back({name, help, type, {metric}});
  };
  const auto gauge = [&](const char* name, const char* help, double value) {
    add(name, help, prometheus::MetricType::Gauge, value);
  };
  add("process_cpu_seconds_total", "User and system CPU time of this process, in seconds.",
      prometheus::MetricType::Counter, SecondsOf(CLOCK_PROCESS_CPUTIME_ID));
  if (const std::vector<int64_t> fields = StatFields(); !fields.empty()) {
    gauge("process_start_time_seconds", "When this process started, in seconds since 1970.",
          StartSeconds(fields[kStartField]));
    gauge("process_threads", "Threads of this process.", static_cast<double>(fields[kThreadsField]));
    gauge("process_virtual_memory_bytes", "Virtual memory of this process.",
          static_cast<double>(fields[kVirtualField]));
    gauge("process_resident_memory_bytes", "Resident memory of this process.",
          static_cast<double>(fields[kResidentField]) * static_cast<double>(sysconf(_SC_PAGESIZE)));
  }
  if (const auto open = OpenDescriptors()) gauge("process_open_fds", "Open file descriptors.", *open);
  if (const auto most = MaxDescriptors()) gauge("process_max_fds", "The most open file descriptors.", *most);
  return families;
}

}  // namespace meshfill
