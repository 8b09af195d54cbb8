// A stream of a device whose memory is the host's and whose operations have run when their calls return: what
// such devices share. The operations of a layer are theirs.
#ifndef MESHFILL_KERNELS_HOST_STREAM_H_
#define MESHFILL_KERNELS_HOST_STREAM_H_

#include <memory>
#include <span>

#include "kernels/device.h"
#include "kernels/stream.h"

namespace meshfill {

// Host memory as device memory: no copy. What Device::Place is on such a device.
BufferRef PlaceOnHost(const void* host, size_t size_bytes);
// What Device::Copy is there.
absl::Status CopyOnHost(std::span<const BufferCopy> copies);

class HostStream : public Stream {
 public:
  using Stream::Stream;

  absl::StatusOr<BufferRef> Allocate(size_t size_bytes) override;
  absl::StatusOr<BufferRef> Place(const void* host, size_t size_bytes) override;
  absl::Status Upload(const void* host, size_t size_bytes, void* to) override;
  absl::Status Download(const void* from, size_t size_bytes, void* host) override;
  absl::StatusOr<std::shared_ptr<const StreamPoint>> Mark() override;
  absl::Status Finish() override;
  absl::StatusOr<DeviceMessage> Fetch(DeviceMessage message) override;
  absl::StatusOr<BufferRef> TakeOver(DeviceMessage message) override;
  absl::StatusOr<std::unique_ptr<HostCopy>> CopyHeadsToHost(const CopyHeadsArgs& args,
                                                            BufferRef source) override;
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_HOST_STREAM_H_
