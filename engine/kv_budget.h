// How much memory a process gives to K and V that are kept for clients.
#ifndef MESHFILL_ENGINE_KV_BUDGET_H_
#define MESHFILL_ENGINE_KV_BUDGET_H_

#include <cstdint>
#include <optional>

#include "engine/embedded_pool.h"

namespace meshfill {

// Of the ranks' memory where that is the host's (`memory_bytes`), else of the host's (`host_memory_bytes`).
// Left out: a part of what activations may take, beside it.
int64_t KvBudgetBytes(const EmbeddedPool& pool, std::optional<int64_t> memory_bytes,
                      std::optional<int64_t> host_memory_bytes);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_KV_BUDGET_H_
