// What a stream of a CUDA device computes with; the device keeps it for the next.
#ifndef MESHFILL_KERNELS_CUDA_CUDA_LANE_H_
#define MESHFILL_KERNELS_CUDA_CUDA_LANE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/cuda/host_copies.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/queue.h"
#include "kernels/cuda/row_uploads.h"

namespace meshfill {

struct CudaLane {
  std::shared_ptr<CudaQueue> queue;   // computes
  std::shared_ptr<CudaQueue> copies;  // brings messages from other devices
  std::shared_ptr<CudaQueue> retire;  // the device's: frees what several queues used
  BufferRef workspace;                // scratch memory of matrix products, CudaGemm::kWorkspaceBytes
  std::unique_ptr<CudaHostCopies> host_copies;  // null: this lane loads weights
  std::unique_ptr<CudaRowUploads> row_uploads;  // null: it does not

  absl::StatusOr<BufferRef> Allocate(size_t size_bytes) const {
    return CudaAllocation::Allocate(size_bytes, queue, retire);
  }
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_CUDA_LANE_H_
