// A queue of operations on one CUDA device (a CUDA stream), and points in it.
//
// Everything that one rank waits for on the device is an event that has been recorded already: a wait on the
// device always ends, whatever the hosts of other ranks do.
#ifndef MESHFILL_KERNELS_CUDA_QUEUE_H_
#define MESHFILL_KERNELS_CUDA_QUEUE_H_

#include <cuda_runtime_api.h>

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/stream.h"

namespace meshfill {

// Makes `device` this thread's device while it lives. Every call of the runtime stands in such a scope: it
// would otherwise make a context, half a gigabyte, on a device that nobody chose. The outermost scope of a
// thread leaves its device behind for the same reason.
class ScopedCudaDevice {
 public:
  explicit ScopedCudaDevice(int device);
  ~ScopedCudaDevice();
  ScopedCudaDevice(const ScopedCudaDevice&) = delete;
  ScopedCudaDevice& operator=(const ScopedCudaDevice&) = delete;

 private:
  const int before_;  // -1: no scope has chosen yet
};

// An event that has been recorded. Any thread.
class CudaPoint final : public StreamPoint {
 public:
  CudaPoint(cudaEvent_t event, int device) : event_(event), device_(device) {}
  ~CudaPoint() override;
  CudaPoint(const CudaPoint&) = delete;
  CudaPoint& operator=(const CudaPoint&) = delete;

  double SecondsSince(const StreamPoint& earlier) const override;  // 0 where the device has failed
  cudaError_t Query() const;                                       // cudaErrorNotReady: not passed yet
  cudaEvent_t event() const { return event_; }
  int device() const { return device_; }

 private:
  const cudaEvent_t event_;
  const int device_;
};

// Any thread may call; operations of several threads come in any order.
class CudaQueue {
 public:
  // kFirst: its kernels start before those that others have queued, as room comes free.
  enum class Priority { kEqual, kFirst };
  static absl::StatusOr<std::shared_ptr<CudaQueue>> Make(int device, Priority priority = Priority::kEqual);
  ~CudaQueue();  // once what is queued has run
  CudaQueue(const CudaQueue&) = delete;
  CudaQueue& operator=(const CudaQueue&) = delete;

  cudaStream_t get() const { return stream_; }
  int device() const { return device_; }

  absl::StatusOr<std::shared_ptr<const CudaPoint>> Mark();
  // From pageable memory the driver has read all of it when it returns.
  absl::Status Upload(const void* host, size_t size_bytes, void* to);
  // What is queued from now on runs behind `point`, of any stream of any device.
  absl::Status WaitFor(const CudaPoint& point);

 private:
  CudaQueue(cudaStream_t stream, int device) : stream_(stream), device_(device) {}

  const cudaStream_t stream_;
  const int device_;
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_QUEUE_H_
