#include "engine/devices/free_memory.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <string>

namespace meshfill {
namespace {

std::optional<int64_t> MachineAvailableBytes() {
  std::ifstream meminfo("/proc/meminfo");
  for (std::string key, unit; meminfo >> key;) {
    int64_t kib = 0;
    if (key == "MemAvailable:" && meminfo >> kib) return kib * 1024;
    std::getline(meminfo, unit);
  }
  return std::nullopt;
}

std::optional<int64_t> ContainerFreeBytes() {
  int64_t limit = 0;
  int64_t used = 0;
  std::ifstream max_file("/sys/fs/cgroup/memory.max");
  std::ifstream current_file("/sys/fs/cgroup/memory.current");
  if (!(max_file >> limit) || !(current_file >> used)) return std::nullopt;  // "max": no limit
  return std::max<int64_t>(0, limit - used);
}

}  // namespace

int64_t FreeMemoryBytes() {
  const std::optional<int64_t> machine = MachineAvailableBytes();
  const std::optional<int64_t> container = ContainerFreeBytes();
  if (machine && container) return std::min(*machine, *container);
  return machine.value_or(container.value_or(0));
}

int64_t DefaultMemoryBudgetBytes() { return FreeMemoryBytes() / 5 * 4; }

}  // namespace meshfill
