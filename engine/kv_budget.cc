#include "engine/kv_budget.h"

#include "engine/devices/free_memory.h"

namespace meshfill {
namespace {

constexpr int64_t kDefaultPart = 8;

}  // namespace

int64_t KvBudgetBytes(const EmbeddedPool& pool, std::optional<int64_t> memory_bytes,
                      std::optional<int64_t> host_memory_bytes) {
  if (!pool.hardware->in_host_memory())
    return host_memory_bytes.value_or(DefaultMemoryBudgetBytes() / kDefaultPart);
  return memory_bytes.value_or(pool.capacity.memory_budget_bytes / kDefaultPart);
}

std::shared_ptr<KvDeviceMemory> KvMemoryOfDevices(const EmbeddedPool& pool) {
  const int64_t bytes = pool.capacity.kv_device_bytes;
  return bytes == 0 ? nullptr : std::make_shared<KvDeviceMemory>(pool.devices, bytes);
}

}  // namespace meshfill
