// A stream on a device of its own.
#ifndef MESHFILL_TESTS_KERNELS_LONE_STREAM_H_
#define MESHFILL_TESTS_KERNELS_LONE_STREAM_H_

#include <memory>
#include <utility>

#include "kernels/reference/reference_device.h"
#include "kernels/stream.h"

namespace meshfill {

class LoneStream {
 public:
  explicit LoneStream(std::unique_ptr<Device> device, const StopToken* stop = nullptr)
      : device_(std::move(device)), stream_(device_->NewStream(stop).value()) {}

  Stream& operator*() const { return *stream_; }
  Stream* operator->() const { return stream_.get(); }
  Stream* get() const { return stream_.get(); }
  Device& device() const { return *device_; }

 private:
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
};

inline LoneStream ReferenceStream(DType dtype, const StopToken* stop = nullptr) {
  return LoneStream(MakeReferenceDevice(dtype), stop);
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_KERNELS_LONE_STREAM_H_
