// Whether a CUDA device has failed for good.
#ifndef MESHFILL_KERNELS_CUDA_HEALTH_H_
#define MESHFILL_KERNELS_CUDA_HEALTH_H_

#include <atomic>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "kernels/cuda/queue.h"

namespace meshfill {

// The health of one device, shared by its streams. Any thread may call it.
class CudaHealth {
 public:
  explicit CudaHealth(std::string device) : device_(std::move(device)) {}  // e.g. "GPU 0 (NVIDIA H100)"

  bool lost() const { return lost_; }

  // The error of an operation on `queue`; UNAVAILABLE where it stays, and is the device's: every later call
  // has it, too.
  absl::Status Diagnose(const absl::Status& error, const CudaQueue& queue);

 private:
  const std::string device_;
  std::atomic<bool> lost_{false};
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_HEALTH_H_
