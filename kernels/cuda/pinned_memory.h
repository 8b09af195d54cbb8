// Memory of the host that a device copies from and to by itself, while the host goes on.
#ifndef MESHFILL_KERNELS_CUDA_PINNED_MEMORY_H_
#define MESHFILL_KERNELS_CUDA_PINNED_MEMORY_H_

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"

namespace meshfill {

struct FreePinned {
  int device;
  void operator()(std::byte* memory) const;
};
using PinnedMemory = std::unique_ptr<std::byte, FreePinned>;

// Contents are unspecified. RESOURCE_EXHAUSTED: the host refuses them.
absl::StatusOr<PinnedMemory> AllocatePinnedMemory(int device, size_t size_bytes);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_PINNED_MEMORY_H_
