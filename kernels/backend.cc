// Backends whose device memory is the host's.
#include "kernels/backend.h"

#include <cstring>

namespace meshfill {

absl::StatusOr<BufferRef> Backend::Place(const void* host, size_t size_bytes) {
  return std::make_shared<Buffer>(const_cast<void*>(host), size_bytes, [](void*, size_t) {});
}

absl::Status Backend::Upload(const void* host, size_t size_bytes, void* to) {
  if (size_bytes > 0) std::memcpy(to, host, size_bytes);
  return absl::OkStatus();
}

absl::Status Backend::Download(const void* from, size_t size_bytes, void* host) {
  if (size_bytes > 0) std::memcpy(host, from, size_bytes);
  return absl::OkStatus();
}

}  // namespace meshfill
