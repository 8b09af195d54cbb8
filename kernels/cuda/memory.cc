#include "kernels/cuda/memory.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/launch_status.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

absl::StatusOr<cudaMemPool_t> Pool(int device) {
  cudaMemPool_t pool;
  if (cudaError_t error = cudaDeviceGetDefaultMemPool(&pool, device); error != cudaSuccess) {
    return LaunchStatus("asking for the memory pool", error);
  }
  return pool;
}

// What the pool could not serve because others hold it, or because it lies in pieces of other sizes: once
// everything has run and the pool has given back what it keeps, the driver has it.
cudaError_t AllocateAfterTrim(void** data, size_t size_bytes, const CudaQueue& stream) {
  cudaGetLastError();  // forget that it failed
  cudaDeviceSynchronize();
  if (absl::StatusOr<cudaMemPool_t> pool = Pool(stream.device()); pool.ok()) cudaMemPoolTrimTo(*pool, 0);
  return cudaMallocAsync(data, size_bytes, stream.get());
}

}  // namespace

absl::StatusOr<BufferRef> CudaAllocation::Allocate(size_t size_bytes, std::shared_ptr<CudaQueue> owner,
                                                   std::shared_ptr<CudaQueue> retire) {
  if (size_bytes == 0) {
    return std::make_shared<Buffer>(nullptr, 0,
                                    std::shared_ptr<void>(new CudaAllocation(nullptr, owner, retire)));
  }
  const ScopedCudaDevice scope(owner->device());
  void* data = nullptr;
  cudaError_t error = cudaMallocAsync(&data, size_bytes, owner->get());
  if (error == cudaErrorMemoryAllocation) error = AllocateAfterTrim(&data, size_bytes, *owner);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    size_t free_bytes = 0, total_bytes = 0;
    cudaMemGetInfo(&free_bytes, &total_bytes);
    return absl::ResourceExhaustedError(absl::StrCat("GPU ", owner->device(), ": ", size_bytes,
                                                     " bytes were refused, ", free_bytes, " of ", total_bytes,
                                                     " are free; use a shorter prompt or more GPUs"));
  }
  if (error != cudaSuccess) return LaunchStatus("allocating memory", error);
  return std::make_shared<Buffer>(
      data, size_bytes, std::shared_ptr<void>(new CudaAllocation(data, std::move(owner), std::move(retire))));
}

// A failure here is the device's, which its next operation reports.
CudaAllocation::~CudaAllocation() {
  if (data_ == nullptr) return;
  const MutexLock lock(mu_);
  const CudaQueue* freeing = owner_.get();
  if (!users_.empty()) {
    freeing = retire_.get();
    users_.push_back(owner_);
    for (const std::shared_ptr<CudaQueue>& user : users_) {
      if (auto point = user->Mark(); point.ok()) (void)retire_->WaitFor(**point);
    }
  }
  const ScopedCudaDevice scope(freeing->device());
  cudaFreeAsync(data_, freeing->get());
}

void CudaAllocation::AddUser(std::shared_ptr<CudaQueue> stream) {
  const MutexLock lock(mu_);
  if (stream == owner_ || std::find(users_.begin(), users_.end(), stream) != users_.end()) return;
  users_.push_back(std::move(stream));
}

absl::Status SetUpPool(int device) {
  ASSIGN_OR_RETURN(cudaMemPool_t pool, Pool(device));
  uint64_t threshold = UINT64_MAX;
  if (cudaError_t error = cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold);
      error != cudaSuccess) {
    return LaunchStatus("setting up the memory pool", error);
  }
  int devices = 0;
  if (cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess) {
    return LaunchStatus("counting the devices", error);
  }
  for (int peer = 0; peer < devices; ++peer) {
    int reachable = 0;
    if (peer == device || cudaDeviceCanAccessPeer(&reachable, peer, device) != cudaSuccess || reachable == 0)
      continue;
    cudaMemAccessDesc access = {};
    access.location = {.type = cudaMemLocationTypeDevice, .id = peer};
    access.flags = cudaMemAccessFlagsProtReadWrite;
    if (cudaError_t error = cudaMemPoolSetAccess(pool, &access, 1); error != cudaSuccess) {
      return LaunchStatus("opening the memory pool to a peer", error);
    }
  }
  return absl::OkStatus();
}

}  // namespace meshfill
