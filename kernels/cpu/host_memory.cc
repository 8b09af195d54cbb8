#include "kernels/cpu/host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/mutex.h"

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

// All mappings of the process, whole pages each.
class Mappings {
 public:
  static Mappings& Process() {
    static auto& mappings = *new Mappings;
    return mappings;
  }

  // Null where refused.
  void* Take(size_t size_bytes) {
    if (void* const spare = TakeSpare(size_bytes); spare != nullptr) return spare;
    void* data = MapHugeAligned(size_bytes);
    if (data == nullptr) {
      DropSpare();  // other memory of the process may have grown
      data = MapHugeAligned(size_bytes);
    }
    const MutexLock lock(mu_);
    if (data == nullptr) in_use_ -= size_bytes;
    most_in_use_ = std::max(most_in_use_, in_use_);
    return data;
  }

  void Return(void* data, size_t size_bytes) {
    {
      const MutexLock lock(mu_);
      in_use_ -= size_bytes;
      if (keepers_ > 0) {
        AddSpare(static_cast<std::byte*>(data), size_bytes);
        return;
      }
    }
    munmap(data, size_bytes);
  }

  void AddKeeper() {
    const MutexLock lock(mu_);
    if (keepers_++ == 0) most_in_use_ = in_use_;
  }

  void RemoveKeeper() {
    {
      const MutexLock lock(mu_);
      if (--keepers_ > 0) return;
    }
    DropSpare();
  }

  size_t spare_bytes() {
    const MutexLock lock(mu_);
    return spare_bytes_;
  }

 private:
  using Extents = std::map<std::byte*, size_t>;  // bytes by where they begin

  static void Unmap(const Extents& extents) {
    for (const auto& [data, size_bytes] : extents) munmap(data, size_bytes);
  }

  // The front of the smallest extent that is large enough. Null: none is, and there is room for a mapping.
  void* TakeSpare(size_t size_bytes) {
    Extents to_unmap;
    {
      const MutexLock lock(mu_);
      in_use_ += size_bytes;
      auto best = spare_.end();
      for (auto extent = spare_.begin(); extent != spare_.end(); ++extent) {
        if (extent->second < size_bytes) continue;
        if (best == spare_.end() || extent->second < best->second) best = extent;
      }
      if (best != spare_.end()) {
        const auto [data, extent_bytes] = *best;
        spare_.erase(best);
        if (extent_bytes > size_bytes) spare_.emplace(data + size_bytes, extent_bytes - size_bytes);
        spare_bytes_ -= size_bytes;
        return data;
      }
      while (spare_bytes_ > 0 && in_use_ + spare_bytes_ > most_in_use_) {
        const auto smallest =
            std::min_element(spare_.begin(), spare_.end(),
                             [](const auto& one, const auto& other) { return one.second < other.second; });
        spare_bytes_ -= smallest->second;
        to_unmap.insert(spare_.extract(smallest));
      }
    }
    Unmap(to_unmap);
    return nullptr;
  }

  // Neighbours become one.
  void AddSpare(std::byte* data, size_t size_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    spare_bytes_ += size_bytes;
    const auto next = spare_.lower_bound(data);
    if (next != spare_.end() && data + size_bytes == next->first) {
      size_bytes += next->second;
      spare_.erase(next);
    }
    const auto after = spare_.lower_bound(data);
    if (after != spare_.begin()) {
      if (const auto before = std::prev(after); before->first + before->second == data) {
        before->second += size_bytes;
        return;
      }
    }
    spare_.emplace(data, size_bytes);
  }

  void DropSpare() {
    Extents to_unmap;
    {
      const MutexLock lock(mu_);
      spare_bytes_ = 0;
      to_unmap.swap(spare_);
    }
    Unmap(to_unmap);
  }

  Mutex mu_;
  int keepers_ ABSL_GUARDED_BY(mu_) = 0;
  size_t in_use_ ABSL_GUARDED_BY(mu_) = 0;       // bytes
  size_t most_in_use_ ABSL_GUARDED_BY(mu_) = 0;  // since the first keeper came
  size_t spare_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  Extents spare_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

absl::StatusOr<BufferRef> MapHostMemory(size_t size_bytes) {
  constexpr size_t kPageBytes = 4096;
  if (size_bytes > std::numeric_limits<size_t>::max() - kPageBytes) return OutOfMemory(size_bytes);
  const size_t mapped_bytes = RoundUp(size_bytes, kPageBytes);
  void* data = Mappings::Process().Take(mapped_bytes);
  if (data == nullptr) return OutOfMemory(size_bytes);
  return std::make_shared<Buffer>(data, size_bytes, [mapped_bytes](void* mapped, size_t) {
    Mappings::Process().Return(mapped, mapped_bytes);
  });
}

SpareMappings::SpareMappings() { Mappings::Process().AddKeeper(); }

SpareMappings::~SpareMappings() { Mappings::Process().RemoveKeeper(); }

size_t SpareMappings::spare_bytes() { return Mappings::Process().spare_bytes(); }

absl::StatusOr<BufferRef> AllocateHostMemory(size_t size_bytes) {
  if (size_bytes >= kMappedBytes) return MapHostMemory(size_bytes);
  if (size_bytes == 0) return std::make_shared<Buffer>(nullptr, 0, [](void*, size_t) {});
  void* data = std::aligned_alloc(kHostAlignmentBytes, RoundUp(size_bytes, kHostAlignmentBytes));
  if (data == nullptr) return OutOfMemory(size_bytes);
  return std::make_shared<Buffer>(data, size_bytes, [](void* allocated, size_t) { std::free(allocated); });
}

}  // namespace meshfill
