#include "engine/devices/container_limits.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <vector>

namespace meshfill {
namespace {

// v1 writes "no limit" as the largest multiple of a page.
constexpr int64_t kUnlimitedBytes = int64_t{1} << 60;

// The number that a file begins with; nullopt where there is no such file, or a word ("max").
template <typename Number>
std::optional<Number> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  Number number;
  if (file >> number) return number;
  return std::nullopt;
}

template <typename Number>
void Tighten(std::optional<Number>& limit, Number other) {
  limit = std::min(limit.value_or(other), other);
}

// The page cache of memory.stat, by the names of its lines: the kernel gives it up before the limit is met.
int64_t CachedBytes(const std::string& stat_file, const std::string& active, const std::string& inactive) {
  std::ifstream file(stat_file);
  int64_t cached = 0, bytes = 0;
  for (std::string name; file >> name >> bytes;) {
    if (name == active || name == inactive) cached += bytes;
  }
  return cached;
}

void TightenMemory(const std::string& limit_file, const std::string& used_file, int64_t cached,
                   ContainerLimits& limits) {
  const auto limit = ReadNumber<int64_t>(limit_file);
  const auto used = ReadNumber<int64_t>(used_file);
  if (!limit.has_value() || *limit >= kUnlimitedBytes) return;
  Tighten(limits.memory_bytes, *limit);
  if (!used.has_value()) return;
  const int64_t kept = std::max<int64_t>(0, *used - cached);
  Tighten(limits.free_memory_bytes, std::max<int64_t>(0, *limit - kept));
}

// cpu.max of v2: "150000 100000", or "max 100000".
void TightenCpus(const std::string& max_file, ContainerLimits& limits) {
  std::ifstream file(max_file);
  double quota = 0, period = 0;
  if (file >> quota >> period && quota > 0 && period > 0) Tighten(limits.cpus, quota / period);
}

// "/a/b": "", "/a" and "/a/b". In a namespace of its own a group sees itself as the root.
std::vector<std::string> GroupsAbove(const std::string& group) {
  std::vector<std::string> groups = {""};
  for (size_t end = group.find('/', 1); group.size() > 1; end = group.find('/', end + 1)) {
    groups.push_back(group.substr(0, end));
    if (end == std::string::npos) break;
  }
  return groups;
}

void ReadV2(const std::string& folder, ContainerLimits& limits) {
  const int64_t cached = CachedBytes(folder + "/memory.stat", "active_file", "inactive_file");
  TightenMemory(folder + "/memory.max", folder + "/memory.current", cached, limits);
  TightenCpus(folder + "/cpu.max", limits);
}

void ReadV1(const std::string& mount, const std::string& controllers, const std::string& group,
            ContainerLimits& limits) {
  std::istringstream names(controllers);
  for (std::string name; std::getline(names, name, ',');) {
    const std::string folder = mount + "/" + name + group;
    if (name == "memory") {
      const int64_t cached = CachedBytes(folder + "/memory.stat", "total_active_file", "total_inactive_file");
      TightenMemory(folder + "/memory.limit_in_bytes", folder + "/memory.usage_in_bytes", cached, limits);
    }
    if (name == "cpu") {
      const auto quota = ReadNumber<double>(folder + "/cpu.cfs_quota_us");
      const auto period = ReadNumber<double>(folder + "/cpu.cfs_period_us");
      if (quota.value_or(-1) > 0 && period.value_or(0) > 0) Tighten(limits.cpus, *quota / *period);
    }
  }
}

}  // namespace

ContainerLimits ReadContainerLimits(const std::string& root) {
  const std::string mount = root + "/sys/fs/cgroup";
  ContainerLimits limits;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "0::/group", or "4:cpu,cpuacct:/group"
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    for (const std::string& group : GroupsAbove(line.substr(second + 1))) {
      controllers.empty() ? ReadV2(mount + group, limits) : ReadV1(mount, controllers, group, limits);
    }
  }
  return limits;
}

int DefaultThreads(int cores, const ContainerLimits& limits) {
  if (!limits.cpus.has_value() || *limits.cpus >= cores) return std::max(1, cores);
  return std::max(1, static_cast<int>(std::floor(*limits.cpus)) - 1);
}

}  // namespace meshfill
