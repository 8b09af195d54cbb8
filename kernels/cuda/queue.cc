#include "kernels/cuda/queue.h"

#include "kernels/cuda/launch_status.h"

namespace meshfill {

ScopedCudaDevice::ScopedCudaDevice(int device) {
  changed_ =
      cudaGetDevice(&before_) == cudaSuccess && before_ != device && cudaSetDevice(device) == cudaSuccess;
}

ScopedCudaDevice::~ScopedCudaDevice() {
  if (changed_) cudaSetDevice(before_);
}

double CudaPoint::SecondsSince(const StreamPoint& earlier) const {
  float milliseconds = 0;
  const cudaError_t error =
      cudaEventElapsedTime(&milliseconds, static_cast<const CudaPoint&>(earlier).event_, event_);
  return error == cudaSuccess ? milliseconds / 1e3 : 0;
}

absl::StatusOr<std::shared_ptr<CudaQueue>> CudaQueue::Make(int device) {
  const ScopedCudaDevice scope(device);
  cudaStream_t stream;
  if (cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking); error != cudaSuccess) {
    return LaunchStatus("making a stream", error);
  }
  return std::shared_ptr<CudaQueue>(new CudaQueue(stream, device));
}

absl::StatusOr<std::shared_ptr<const CudaPoint>> CudaQueue::Mark() {
  const ScopedCudaDevice scope(device_);
  cudaEvent_t event;
  if (cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDefault); error != cudaSuccess) {
    return LaunchStatus("making an event", error);
  }
  auto point = std::make_shared<const CudaPoint>(event, device_);
  if (cudaError_t error = cudaEventRecord(event, stream_); error != cudaSuccess) {
    return LaunchStatus("recording an event", error);
  }
  return point;
}

absl::Status CudaQueue::Upload(const void* host, size_t size_bytes, void* to) {
  return LaunchStatus("upload", cudaMemcpyAsync(to, host, size_bytes, cudaMemcpyHostToDevice, stream_));
}

absl::Status CudaQueue::WaitFor(const CudaPoint& point) {
  const ScopedCudaDevice scope(device_);
  return LaunchStatus("waiting for an event", cudaStreamWaitEvent(stream_, point.event(), 0));
}

}  // namespace meshfill
