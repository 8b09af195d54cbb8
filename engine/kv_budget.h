// How much memory a process gives to K and V that are kept for clients.
#ifndef MESHFILL_ENGINE_KV_BUDGET_H_
#define MESHFILL_ENGINE_KV_BUDGET_H_

#include <cstdint>
#include <memory>
#include <optional>

#include "engine/embedded_pool.h"
#include "engine/kv/kv_device_memory.h"

namespace meshfill {

// The budget in bytes for K and V that are kept. Where the ranks' memory is the host's, `memory_bytes`; left
// out: a part of the pool's memory budget for activations, beside it. Else `host_memory_bytes`; left out: a
// part of the host's default memory budget.
//
// Behind GPUs `memory_bytes` is how much of that stays in their memory, as KvMemoryOfDevices has it.
int64_t KvBudgetBytes(const EmbeddedPoolCapacity& capacity, std::optional<int64_t> memory_bytes,
                      std::optional<int64_t> host_memory_bytes);
int64_t KvBudgetBytes(const EmbeddedPool& pool, std::optional<int64_t> memory_bytes,
                      std::optional<int64_t> host_memory_bytes);

// Null: all that is kept is in the host's memory.
std::shared_ptr<KvDeviceMemory> KvMemoryOfDevices(const EmbeddedPool& pool);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_KV_BUDGET_H_
