// How much memory this process may still take.
#ifndef MESHFILL_ENGINE_DEVICES_FREE_MEMORY_H_
#define MESHFILL_ENGINE_DEVICES_FREE_MEMORY_H_

#include <cstdint>
#include <string>

namespace meshfill {

// The smaller of the machine's available memory and what is left under the container's limit. 0 where the
// system does not say.
int64_t FreeMemoryBytes();

// The smaller of the machine's memory and the container's limit: more cannot ever be had. 0 likewise.
int64_t TotalMemoryBytes();

// For the activations of one prefill where nobody set a limit: 80 % of what is free now, but for bytes that
// are yet to be taken. Of a pool, once its model is loaded.
int64_t DefaultMemoryBudgetBytes(int64_t to_come = 0);

// "1.5 GiB", for messages.
std::string GibText(int64_t bytes);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_DEVICES_FREE_MEMORY_H_
