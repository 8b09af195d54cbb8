#include "engine/devices/free_memory.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <string>

#include "absl/strings/str_format.h"
#include "engine/devices/container_limits.h"

namespace meshfill {
namespace {

// A line of /proc/meminfo, "MemTotal:"; 0 where there is none.
int64_t MachineBytes(const std::string& line) {
  std::ifstream meminfo("/proc/meminfo");
  for (std::string key, rest; meminfo >> key;) {
    int64_t kib = 0;
    if (key == line && meminfo >> kib) return kib * 1024;
    std::getline(meminfo, rest);
  }
  return 0;
}

int64_t Tighter(int64_t machine, std::optional<int64_t> container) {
  if (!container.has_value()) return machine;
  return machine == 0 ? *container : std::min(machine, *container);
}

}  // namespace

int64_t FreeMemoryBytes() {
  return Tighter(MachineBytes("MemAvailable:"), ReadContainerLimits().free_memory_bytes);
}

int64_t TotalMemoryBytes() { return Tighter(MachineBytes("MemTotal:"), ReadContainerLimits().memory_bytes); }

int64_t DefaultMemoryBudgetBytes(int64_t to_come) {
  const int64_t free = FreeMemoryBytes();
  return free == 0 ? 0 : std::max<int64_t>(1, (free - to_come) / 5 * 4);
}

std::string GibText(int64_t bytes) {
  return absl::StrFormat("%.1f GiB", static_cast<double>(bytes) / (1 << 30));
}

}  // namespace meshfill
