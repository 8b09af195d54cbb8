// Host memory for buffers: aligned to cache lines; large blocks mapped on their own, in huge pages where they
// fit.
#ifndef MESHFILL_KERNELS_CPU_HOST_MEMORY_H_
#define MESHFILL_KERNELS_CPU_HOST_MEMORY_H_

#include <cstddef>

#include "absl/status/statusor.h"
#include "kernels/buffer.h"

namespace meshfill {

inline constexpr size_t kHostAlignmentBytes = 64;  // a cache line, and the widest vector

// `size_bytes` may be 0. Contents are unspecified. RESOURCE_EXHAUSTED, with the bytes asked for, where the
// system refuses them. Any thread; the buffer may be freed on any other.
absl::StatusOr<BufferRef> AllocateHostMemory(size_t size_bytes);
// The same in a mapping of its own, apart from the heap, as AllocateHostMemory has large ones. Above 0.
absl::StatusOr<BufferRef> MapHostMemory(size_t size_bytes);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_HOST_MEMORY_H_
