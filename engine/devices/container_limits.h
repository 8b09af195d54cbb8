// What control groups allow this process: a container's limits, or a service's.
#ifndef MESHFILL_ENGINE_DEVICES_CONTAINER_LIMITS_H_
#define MESHFILL_ENGINE_DEVICES_CONTAINER_LIMITS_H_

#include <cstdint>
#include <optional>
#include <string>

namespace meshfill {

// The tightest of the process's groups and of those above them, by cgroup v2 and v1. Unset: no limit.
struct ContainerLimits {
  std::optional<double> cpus;           // CPU seconds a second
  std::optional<int64_t> memory_bytes;  // limit for all processes of the group together
  // What the group may still take of that limit, its page cache given up: files that were read count as taken
  // until then.
  std::optional<int64_t> free_memory_bytes;
};

// Reads /proc/self/cgroup and /sys/fs/cgroup below `root`. What cannot be read sets no limit.
ContainerLimits ReadContainerLimits(const std::string& root = "");

// Threads for a process that nobody told: one for each of `cores`; under a tighter limit one less than that,
// so that other threads, health among them, are not throttled with the ranks. At least 1.
int DefaultThreads(int cores, const ContainerLimits& limits);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_DEVICES_CONTAINER_LIMITS_H_
