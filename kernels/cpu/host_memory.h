// Host memory for buffers: aligned to cache lines; large blocks mapped on their own, in huge pages where they
// fit.
//
// The system fills new mappings with zeros. So that this is not done in each layer, blocks of one are kept for
// the next while a run computes, and those of one run for the next while a server is in use.
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

// While one lives, mappings that are freed, on any thread, stay for later ones. When the last goes, what lies
// spare goes back to the system. Used and spare, all take no more than were ever used at once since the first
// came.
class SpareMappings {
 public:
  SpareMappings();
  ~SpareMappings();
  SpareMappings(const SpareMappings&) = delete;
  SpareMappings& operator=(const SpareMappings&) = delete;

  static size_t spare_bytes();  // that lie spare now
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_HOST_MEMORY_H_
