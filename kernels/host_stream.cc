#include "kernels/host_stream.h"

#include <cstring>
#include <utility>

#include "kernels/return_if_error.h"

namespace meshfill {

BufferRef PlaceOnHost(const void* host, size_t size_bytes) {
  return std::make_shared<Buffer>(const_cast<void*>(host), size_bytes, [](void*, size_t) {});
}

absl::Status CopyOnHost(std::span<const BufferCopy> copies) {
  for (const BufferCopy& copy : copies) {
    if (copy.from->size_bytes() == 0) continue;
    std::memcpy(copy.to->data(), copy.from->data(), copy.from->size_bytes());
  }
  return absl::OkStatus();
}

absl::StatusOr<BufferRef> HostStream::Allocate(size_t size_bytes) { return device().Allocate(size_bytes); }

absl::StatusOr<BufferRef> HostStream::Place(const void* host, size_t size_bytes) {
  return PlaceOnHost(host, size_bytes);
}

absl::Status HostStream::Upload(const void* host, size_t size_bytes, void* to) {
  if (size_bytes > 0) std::memcpy(to, host, size_bytes);
  return absl::OkStatus();
}

absl::Status HostStream::Download(const void* from, size_t size_bytes, void* host) {
  if (size_bytes > 0) std::memcpy(host, from, size_bytes);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const StreamPoint>> HostStream::Mark() { return nullptr; }

absl::Status HostStream::Finish() { return absl::OkStatus(); }

absl::StatusOr<DeviceMessage> HostStream::Fetch(DeviceMessage message) { return message; }

absl::StatusOr<BufferRef> HostStream::TakeOver(DeviceMessage message) { return std::move(message.buffer); }

absl::StatusOr<std::unique_ptr<HostCopy>> HostStream::CopyHeadsToHost(const CopyHeadsArgs& args, BufferRef) {
  RETURN_IF_ERROR(CopyHeads(args));
  return nullptr;
}

}  // namespace meshfill
