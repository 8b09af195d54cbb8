// Device memory in the order of streams: what frees it waits for every stream that used it, and no host does.
#ifndef MESHFILL_KERNELS_CUDA_MEMORY_H_
#define MESHFILL_KERNELS_CUDA_MEMORY_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "kernels/buffer.h"
#include "kernels/cuda/queue.h"
#include "kernels/mutex.h"

namespace meshfill {

// What a Buffer of CUDA memory holds as its allocation. From the device's own pool (cudaMallocAsync), which
// keeps what is freed for the next to ask.
//
//     owner    alloc ── writes ── mark ───────── reads ──┐
//     reader                        └ wait ── reads ──┐  │
//     retire                                          └──┴─ free
//
// Memory that only its owner's stream used is freed on that stream, so that its next allocation has it at
// once. Otherwise a stream of its own waits for all of them, and none of them waits for another.
class CudaAllocation {
 public:
  // `retire`: a stream of the same device on which nothing runs but this. RESOURCE_EXHAUSTED where memory is
  // short, with the bytes needed and free.
  static absl::StatusOr<BufferRef> Allocate(size_t size_bytes, std::shared_ptr<CudaQueue> owner,
                                            std::shared_ptr<CudaQueue> retire);
  ~CudaAllocation();
  CudaAllocation(const CudaAllocation&) = delete;
  CudaAllocation& operator=(const CudaAllocation&) = delete;

  static CudaAllocation& Of(const Buffer& buffer) {
    return *static_cast<CudaAllocation*>(buffer.allocation().get());
  }

  int device() const { return owner_->device(); }
  // Operations of `stream`, too, use the memory, from those called now to those called while it is held. Any
  // thread.
  void AddUser(std::shared_ptr<CudaQueue> stream);

 private:
  CudaAllocation(void* data, std::shared_ptr<CudaQueue> owner, std::shared_ptr<CudaQueue> retire)
      : data_(data), owner_(std::move(owner)), retire_(std::move(retire)) {}

  void* const data_;
  const std::shared_ptr<CudaQueue> owner_;
  const std::shared_ptr<CudaQueue> retire_;
  Mutex mu_;
  std::vector<std::shared_ptr<CudaQueue>> users_ ABSL_GUARDED_BY(mu_);  // others than the owner
};

// The device's pool keeps what is freed from now on, and its peers copy from it without a detour through the
// host where they can reach it. Once for each device.
absl::Status SetUpPool(int device);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_MEMORY_H_
