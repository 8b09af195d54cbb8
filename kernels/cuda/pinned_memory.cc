#include "kernels/cuda/pinned_memory.h"

#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/launch_status.h"
#include "kernels/cuda/queue.h"

namespace meshfill {

void FreePinned::operator()(std::byte* memory) const {
  const ScopedCudaDevice scope(device);
  cudaFreeHost(memory);
}

absl::StatusOr<PinnedMemory> AllocatePinnedMemory(int device, size_t size_bytes) {
  const ScopedCudaDevice scope(device);
  void* memory = nullptr;
  const cudaError_t error = cudaHostAlloc(&memory, size_bytes, cudaHostAllocPortable);
  if (error == cudaSuccess) return PinnedMemory(static_cast<std::byte*>(memory), FreePinned{device});
  cudaGetLastError();
  if (error != cudaErrorMemoryAllocation) return LaunchStatus("allocating pinned memory", error);
  return absl::ResourceExhaustedError(
      absl::StrCat(size_bytes, " bytes of pinned host memory were refused; free memory of the host"));
}

}  // namespace meshfill
