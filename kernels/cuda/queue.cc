#include "kernels/cuda/queue.h"

#include "kernels/cuda/launch_status.h"

namespace meshfill {

namespace {

thread_local int chosen_device = -1;

void Choose(int device) {
  if (device != chosen_device && cudaSetDevice(device) == cudaSuccess) chosen_device = device;
}

}  // namespace

ScopedCudaDevice::ScopedCudaDevice(int device) : before_(chosen_device) { Choose(device); }

ScopedCudaDevice::~ScopedCudaDevice() {
  if (before_ >= 0) Choose(before_);
}

CudaPoint::~CudaPoint() {
  const ScopedCudaDevice scope(device_);
  cudaEventDestroy(event_);
}

cudaError_t CudaPoint::Query() const {
  const ScopedCudaDevice scope(device_);
  return cudaEventQuery(event_);
}

double CudaPoint::SecondsSince(const StreamPoint& earlier) const {
  const ScopedCudaDevice scope(device_);
  float milliseconds = 0;
  const cudaError_t error =
      cudaEventElapsedTime(&milliseconds, static_cast<const CudaPoint&>(earlier).event_, event_);
  return error == cudaSuccess ? milliseconds / 1e3 : 0;
}

absl::StatusOr<std::shared_ptr<CudaQueue>> CudaQueue::Make(int device, Priority priority) {
  const ScopedCudaDevice scope(device);
  int last = 0, first = 0;
  if (cudaError_t error = cudaDeviceGetStreamPriorityRange(&last, &first); error != cudaSuccess) {
    return LaunchStatus("asking for priorities", error);
  }
  cudaStream_t stream;
  if (cudaError_t error = cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                                       priority == Priority::kFirst ? first : last);
      error != cudaSuccess) {
    return LaunchStatus("making a stream", error);
  }
  return std::shared_ptr<CudaQueue>(new CudaQueue(stream, device));
}

CudaQueue::~CudaQueue() {
  const ScopedCudaDevice scope(device_);
  cudaStreamDestroy(stream_);
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
