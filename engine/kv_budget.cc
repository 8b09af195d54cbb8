#include "engine/kv_budget.h"

#include "engine/devices/free_memory.h"

namespace meshfill {
namespace {

constexpr int64_t kDefaultPart = 8;

}  // namespace

int64_t KvBudgetBytes(const EmbeddedPoolCapacity& capacity, std::optional<int64_t> memory_bytes,
                      std::optional<int64_t> host_memory_bytes) {
  if (capacity.kv_on_host) return host_memory_bytes.value_or(DefaultMemoryBudgetBytes() / kDefaultPart);
  return memory_bytes.value_or(capacity.memory_budget_bytes / kDefaultPart);
}

int64_t KvBudgetBytes(const EmbeddedPool& pool, std::optional<int64_t> memory_bytes,
                      std::optional<int64_t> host_memory_bytes) {
  return KvBudgetBytes(pool.capacity, memory_bytes, host_memory_bytes);
}

std::shared_ptr<KvDeviceMemory> KvMemoryOfDevices(const EmbeddedPool& pool) {
  const int64_t bytes = pool.capacity.kv_device_bytes;
  return bytes == 0 ? nullptr : std::make_shared<KvDeviceMemory>(pool.devices, bytes);
}

}  // namespace meshfill
