#include "kernels/cpu/host_memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace meshfill {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;
// From here on a block is worth a mapping of its own, and its huge pages.
constexpr size_t kMappedBytes = 2 * kHugePageBytes;

absl::Status OutOfMemory(size_t size_bytes) {
  return absl::ResourceExhaustedError(absl::StrCat(
      "host memory: ", size_bytes, " bytes were refused by the system; use a shorter prompt or more memory"));
}

constexpr size_t RoundUp(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// A mapping that starts on a huge page's boundary; null where refused.
void* MapHugeAligned(size_t size_bytes) {
  if (size_bytes > std::numeric_limits<size_t>::max() / 2) return nullptr;
  const size_t mapped_bytes = size_bytes + kHugePageBytes;
  void* mapped = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  const auto begin = reinterpret_cast<uintptr_t>(mapped);
  const uintptr_t aligned = RoundUp(begin, kHugePageBytes);
  const uintptr_t end = aligned + size_bytes;
  if (aligned > begin) munmap(mapped, aligned - begin);
  if (begin + mapped_bytes > end) munmap(reinterpret_cast<void*>(end), begin + mapped_bytes - end);
  void* data = reinterpret_cast<void*>(aligned);
  madvise(data, size_bytes, MADV_HUGEPAGE);  // a hint: without huge pages it is only slower
  return data;
}

}  // namespace

absl::StatusOr<BufferRef> MapHostMemory(size_t size_bytes) {
  constexpr size_t kPageBytes = 4096;
  if (size_bytes > std::numeric_limits<size_t>::max() - kPageBytes) return OutOfMemory(size_bytes);
  const size_t mapped_bytes = RoundUp(size_bytes, kPageBytes);
  void* data = MapHugeAligned(mapped_bytes);
  if (data == nullptr) return OutOfMemory(size_bytes);
  return std::make_shared<Buffer>(data, size_bytes,
                                  [mapped_bytes](void* mapped, size_t) { munmap(mapped, mapped_bytes); });
}

absl::StatusOr<BufferRef> AllocateHostMemory(size_t size_bytes) {
  if (size_bytes >= kMappedBytes) return MapHostMemory(size_bytes);
  if (size_bytes == 0) return std::make_shared<Buffer>(nullptr, 0, [](void*, size_t) {});
  void* data = std::aligned_alloc(kHostAlignmentBytes, RoundUp(size_bytes, kHostAlignmentBytes));
  if (data == nullptr) return OutOfMemory(size_bytes);
  return std::make_shared<Buffer>(data, size_bytes, [](void* allocated, size_t) { std::free(allocated); });
}

}  // namespace meshfill
